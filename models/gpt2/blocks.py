"""Micro-batches of consecutive tokens, which every rank computes for itself."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_vpipe.errors import Refusal
from ds_vpipe.models.gpt2.text import Tokens

MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TextBlocks:
    """A text cut into blocks of S tokens; data-parallel replica r of R takes every R-th group of B blocks.

    Attributes:
        tokens: int32 [N].
        length: S.
        size: B, of a micro-batch.
        replica: r.
        replicas: R.

    Raises:
        VPipeConfigError: the text is too short for one micro-batch per replica.
    """

    tokens: Tokens
    length: int
    size: int
    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.per_epoch == 0:
            need = self.length * self.size * self.replicas
            raise Refusal(
                "text", len(self.tokens), f"at least {need} tokens, one micro-batch per replica", "give more --text"
            ).error()

    @property
    def per_epoch(self) -> int:
        """Micro-batches of a replica in an epoch."""
        return len(self.tokens) // (self.length * self.size * self.replicas)

    def micro_batches(self, seed: int | None, start: int = 0) -> Iterator[MicroBatch]:
        """Inputs and labels, both the tokens int64 [B, S], epoch after epoch without end.

        Args:
            seed: of the order of the blocks, another one in every epoch; None: as in the text.
            start: number of the first micro-batch.
        """
        blocks, number = len(self.tokens) // self.length, start
        while True:
            epoch, place = divmod(number, self.per_epoch)
            order = np.arange(blocks) if seed is None else np.random.default_rng((seed, epoch)).permutation(blocks)
            for group in range(place, self.per_epoch):
                begin = (group * self.replicas + self.replica) * self.size
                rows = [self._block(int(index)) for index in order[begin : begin + self.size]]
                tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
                yield tokens, tokens
                number += 1

    def _block(self, index: int) -> Tokens:
        return self.tokens[index * self.length : (index + 1) * self.length]

"""GPT-2 as pipeline layers, built from Hugging Face's own blocks.

With L blocks, B sequences per micro-batch of S tokens, hidden size H, vocabulary V:

=========================  ============================  ==========================================
decoder of its own         decoder tied to the words
=========================  ============================  ==========================================
0                          0                             word embeddings (tied)
0                          1                             positions and dropout
1 .. L                     2 .. L + 1                    blocks
L + 1                      L + 2                         the last layer norm
L + 1                      L + 3                         decoder: the words once more (tied)
=========================  ============================  ==========================================

``input_ids`` int64 [B, S] go in, one tensor ``hidden`` [B, S, H] crosses each boundary, and logits [B, S, V] come out.
There is no padding mask: samples are full, and padding at the end would change nothing before it.
"""

import math
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from transformers import GPT2Config
from transformers.masking_utils import create_causal_mask
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from ds_vpipe.models.attention import choose_attention
from ds_vpipe.models.seeds import seeded


class WordLayer(nn.Module):
    """Word embeddings: the tied layer."""

    def __init__(self, config: GPT2Config, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
            initialise(self, config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Word vectors [B, S, H] of ``input_ids``."""
        return self.wte(input_ids)


class PositionLayer(nn.Module):
    """Position embeddings and dropout."""

    def __init__(self, config: GPT2Config, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
            self.drop = nn.Dropout(config.embd_pdrop)
            initialise(self, config)

    def forward(self, vectors: Tensor) -> Tensor:
        """Word vectors to ``hidden``."""
        positions = torch.arange(vectors.size(1), device=vectors.device)
        return self.drop(vectors + self.wpe(positions))


class EmbeddingLayer(PositionLayer):
    """Layer 0 of a model with a decoder of its own: word and position embeddings."""

    def __init__(self, config: GPT2Config, seed: int) -> None:
        super().__init__(config, seed)
        self.wte = WordLayer(config, seed).wte

    def forward(self, input_ids: Tensor) -> Tensor:
        """``input_ids`` to ``hidden``."""
        return super().forward(self.wte(input_ids))


class BlockLayer(nn.Module):
    """One block: causal attention and feed-forward, each behind its layer norm."""

    def __init__(self, config: GPT2Config, index: int, seed: int) -> None:
        super().__init__()
        self.config = config
        with seeded(seed):
            self.block = GPT2Block(config, layer_idx=index)
            initialise(self, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` to ``hidden``."""
        mask = create_causal_mask(self.config, hidden, attention_mask=None, past_key_values=None)
        return self.block(hidden, attention_mask=mask)


class NormLayer(nn.Module):
    """The last layer norm."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` to what the decoder reads [B, S, H]."""
        return self.ln_f(hidden)


class HeadLayer(NormLayer):
    """Last layer norm and a decoder of its own."""

    def __init__(self, config: GPT2Config, seed: int) -> None:
        super().__init__(config)
        with seeded(seed):
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            initialise(self, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` to logits [B, S, V]."""
        return self.lm_head(super().forward(hidden))


def decode(layer: WordLayer, hidden: Tensor) -> Tensor:
    """Logits [B, S, V] by the word embeddings."""
    return nn.functional.linear(hidden, layer.wte.weight)


@torch.no_grad()
def initialise(layer: nn.Module, config: GPT2Config) -> None:
    """GPT-2's initialisation: normal weights, those that end a residual path smaller by the root of their number.

    Radford et al., "Language Models are Unsupervised Multitask Learners", section 2.3. Biases are zero and layer norms
    one as they are built.
    """
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 2:
            paths = 2 * config.num_hidden_layers if name.endswith("c_proj.weight") else 1
            parameter.normal_(std=config.initializer_range / math.sqrt(paths))


def gpt2_layers(config: GPT2Config, seed: int = 0, tied: bool | None = None) -> list[Any]:
    """The ``L + 4`` layer specifications, or ``L + 2`` with a decoder of its own.

    Each layer is initialised from a seed of its own, so that initial weights do not depend on the split.

    Args:
        config: of the model.
        seed: of the first layer.
        tied: whether the decoder is the word embeddings; default: as ``config.tie_word_embeddings`` says.
    """
    choose_attention(config)
    last = config.num_hidden_layers + 1
    blocks = [LayerSpec(BlockLayer, config, index, seed + index + 1) for index in range(config.num_hidden_layers)]
    if not (config.tie_word_embeddings if tied is None else tied):
        return [LayerSpec(EmbeddingLayer, config, seed), *blocks, LayerSpec(HeadLayer, config, seed + last)]
    return [
        TiedLayerSpec("words", WordLayer, config, seed, tied_weight_attr="wte.weight"),
        LayerSpec(PositionLayer, config, seed),
        *blocks,
        LayerSpec(NormLayer, config),
        TiedLayerSpec("words", WordLayer, config, seed, forward_fn=decode, tied_weight_attr="wte.weight"),
    ]

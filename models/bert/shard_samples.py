"""Samples out of HDF5 shards, in an order that keeps a rank in one place for long.

A compressed row costs as much as the whole stretch around it, so shards are read in blocks of rows, of which the
latest two stay decoded. An epoch takes the blocks in an order drawn for it, and the rows of a block in an order drawn
for both; so every row comes once an epoch, every file does, and the order is a function of (seed, epoch) alone.
Epochs do not change what is stored: another mask of the same text is another row (see `preparation`).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ds_vpipe.errors import Refusal
from ds_vpipe.models.bert.sample import Ints, Order, Sample, shuffled
from ds_vpipe.models.bert.shards import Rows, Shard, open_shard, read_rows, sample_of

BLOCK_ROWS = 32768
_BLOCKS_KEPT = 2


class ShardSamples:
    """The rows of some shards.

    Args:
        shards: the files, at least one, all with one sequence length; see `open_shards`.
        max_predictions: P, prediction slots of a sample; those a row has beyond them are left out.
        vocab_size: of the model.
        keep_order: take the rows as they are stored, in every epoch.
        block_rows: rows decoded at once.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        max_predictions: int,
        vocab_size: int,
        keep_order: bool = False,
        block_rows: int = BLOCK_ROWS,
    ) -> None:
        self._max_predictions = max_predictions
        self._vocab_size = vocab_size
        self._keep_order = keep_order
        self._blocks = [
            (shard, start, min(start + block_rows, shard.rows))
            for shard in shards
            for start in range(0, shard.rows, block_rows)
        ]
        lengths = [stop - start for _, start, stop in self._blocks]
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._decoded: OrderedDict[int, Rows] = OrderedDict()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def sample(self, index: int, epoch: int) -> Sample:
        """Row `index`, which is the same in every epoch.

        Raises:
            VPipeConfigError: the file is broken; names it, the key and the row.
        """
        block = int(np.searchsorted(self._starts, index, side="right")) - 1
        return sample_of(self._rows(block), index - int(self._starts[block]), self._max_predictions)

    def order(self, seed: int, epoch: int) -> Order:
        """The order in which an epoch takes the rows: each index once."""
        return np.arange(len(self)) if self._keep_order else _BlockOrder(self._starts, seed, epoch)

    def _rows(self, block: int) -> Rows:
        if block not in self._decoded:
            while len(self._decoded) >= _BLOCKS_KEPT:
                self._decoded.popitem(last=False)
            self._decoded[block] = read_rows(*self._blocks[block], self._vocab_size)
        self._decoded.move_to_end(block)
        return self._decoded[block]


class _BlockOrder:
    """Blocks in a drawn order and the rows of each likewise, drawn when they are come to.

    Args:
        starts: int64 [blocks + 1], the first row of each block, and the number of rows.
        seed: of the order.
        epoch: of the order.
    """

    def __init__(self, starts: Ints, seed: int, epoch: int) -> None:
        self._starts = starts
        self._key = (seed, epoch)
        self._blocks = shuffled(len(starts) - 1, seed, epoch)
        self._ends = np.cumsum(np.diff(starts)[self._blocks])
        self._drawn: tuple[int, Ints] = (-1, np.empty(0, dtype=np.int64))

    def __getitem__(self, positions: slice) -> Ints:
        numbers = range(*positions.indices(int(self._starts[-1])))
        return np.array([self._index(number) for number in numbers], dtype=np.int64)

    def _index(self, position: int) -> int:
        place = int(np.searchsorted(self._ends, position, side="right"))
        block = int(self._blocks[place])
        length = int(self._starts[block + 1] - self._starts[block])
        if self._drawn[0] != block:
            self._drawn = (block, np.random.default_rng((*self._key, block)).permutation(length))
        return int(self._starts[block] + self._drawn[1][position - int(self._ends[place]) + length])


def open_shards(paths: Sequence[Path]) -> list[Shard]:
    """Look at the shapes of all files; those without rows are left out.

    Raises:
        VPipeConfigError: a file is broken, or its sequences are not as long as those of the first one.
    """
    shards = [shard for shard in map(open_shard, paths) if shard.rows > 0]
    for shard in shards:
        if shard.sequence_length != shards[0].sequence_length:
            allowed = f"{shards[0].sequence_length} tokens per sequence, as in {shards[0].path}"
            remedy = "keep shards of another length in another folder"
            raise Refusal(f"{shard.path}: input_ids", shard.sequence_length, allowed, remedy).error()
    return shards


def digest_of(folder: Path, shards: Sequence[Shard]) -> str:
    """Equal for two folders if their files have the same names, sizes and shapes."""
    lines = [
        f"{shard.path.relative_to(folder)} {shard.path.stat().st_size} {shard.rows} {shard.sequence_length}"
        for shard in shards
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

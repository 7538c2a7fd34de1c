"""HDF5 shards of pre-training samples, in the layout of NVIDIA's BERT, which vPipe reads too.

=========================  ========  =====  ================================================================
key                        shape     type   holds
=========================  ========  =====  ================================================================
``input_ids``              [N, S]    i4     token numbers, masked
``input_mask``             [N, S]    i1     1 where there is a token
``segment_ids``            [N, S]    i1     0 for the first segment, 1 for the second
``masked_lm_positions``    [N, P]    i4     the first 0 ends the list: position 0 is never predicted
``masked_lm_ids``          [N, P]    i4     the tokens that were there
``next_sentence_labels``   [N]       i1     0 if the second segment continues the first, 1 if it is random
=========================  ========  =====  ================================================================

Files with "training" in their names are for training, those with "validation" or "test" for validation.

A compressed row costs as much as the whole stretch around it, so shards are read in blocks of rows, of which the
latest two stay decoded. An epoch takes the blocks in an order drawn for it, and the rows of a block in an order drawn
for both; so every row comes once an epoch, and the order is a function of (seed, epoch) alone. Epochs do not change
what is stored: another mask of the same text is another row.
"""

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ds_vpipe.errors import Refusal, VPipeConfigError, show
from ds_vpipe.models.bert.masking import IGNORED_LABEL, Ints, Sample, shuffled

TYPES = {
    "input_ids": "i4",
    "input_mask": "i1",
    "segment_ids": "i1",
    "masked_lm_positions": "i4",
    "masked_lm_ids": "i4",
    "next_sentence_labels": "i1",
}
SUFFIXES = (".hdf5", ".h5")
MANIFEST = "preparation.json"
BLOCK_ROWS = 32768
_BLOCKS_KEPT = 2
_CHUNK_ROWS = 256
_UNREADABLE = (OSError, KeyError, RuntimeError, TypeError, ValueError)  # what h5py says of damage, whichever it hits
_REMEDY = "make the file anew, or take it out of the folder"

Rows = dict[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Shard:
    """HDF5 file whose keys and shapes are right.

    Attributes:
        path: the file.
        rows: N, number of samples.
        sequence_length: S.
        predictions: P.
    """

    path: Path
    rows: int
    sequence_length: int
    predictions: int


class ShardSamples:
    """Samples in the rows of shards.

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
        """Row `index`, the same in every epoch.

        Raises:
            VPipeConfigError: the file is broken; names it, the key and the row.
        """
        block = int(np.searchsorted(self._starts, index, side="right")) - 1
        return sample_of(self._rows(block), index - int(self._starts[block]), self._max_predictions)

    def order(self, seed: int, epoch: int) -> "Ints | _BlockOrder":
        """Order of an epoch: every row once."""
        return np.arange(len(self)) if self._keep_order else _BlockOrder(self._starts, seed, epoch)

    def _rows(self, block: int) -> Rows:
        if block not in self._decoded:
            while len(self._decoded) >= _BLOCKS_KEPT:
                self._decoded.popitem(last=False)
            self._decoded[block] = read_rows(*self._blocks[block], self._vocab_size)
        self._decoded.move_to_end(block)
        return self._decoded[block]


class _BlockOrder:
    """Blocks in a drawn order and the rows of each likewise, drawn on demand.

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


def find_shards(folder: Path) -> tuple[list[Path], list[Path]]:
    """Training and validation files below a folder, each in the order of their paths."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    training = [path for path in files if "training" in path.name]
    others = [path for path in files if "training" not in path.name]
    return training, [path for path in others if "validation" in path.name or "test" in path.name]


def open_shard(path: Path) -> Shard:
    """Keys and shapes of a file; no row is read.

    Raises:
        VPipeConfigError: it is no HDF5 file or a truncated one, or a key is missing or has a wrong shape or type.
    """
    with _opened(path) as file:
        try:
            found = {key: file.get(key) for key in TYPES}  # None also for a link that leads nowhere
            present = ", ".join(sorted(file)) or "no keys"
            kinds = {key: item.dtype for key, item in found.items() if isinstance(item, h5py.Dataset)}
            shapes = {key: tuple(found[key].shape or ()) for key in kinds}  # None is a dataset without a dataspace
        except _UNREADABLE as error:
            allowed = "headers that HDF5 can read"
            raise Refusal(str(path), _line(error), allowed, _REMEDY, "damaged?").error() from error
    for key in TYPES:
        if key not in kinds:
            reason = f"the file has {present}"
            raise Refusal(f"{path}: {key}", None, f"the keys {', '.join(TYPES)}", _REMEDY, reason).error()
        if kinds[key].kind not in "iub":
            raise Refusal(f"{path}: {key}", str(kinds[key]), "integers", _REMEDY).error()
    ids, positions = shapes["input_ids"], shapes["masked_lm_positions"]
    if len(ids) != 2:
        raise Refusal(f"{path}: input_ids", list(ids), "a shape [rows, sequence length]", _REMEDY).error()
    if len(positions) != 2:
        raise Refusal(f"{path}: masked_lm_positions", list(positions), "a shape [rows, predictions]", _REMEDY).error()
    rows, predictions = ids[0], positions[1]
    expected = {
        "input_mask": ids,
        "segment_ids": ids,
        "masked_lm_positions": (rows, predictions),
        "masked_lm_ids": (rows, predictions),
        "next_sentence_labels": (rows,),
    }
    for key, shape in expected.items():
        if shapes[key] != shape:
            allowed = f"the shape {list(shape)}, for input_ids has {list(ids)}"
            raise Refusal(f"{path}: {key}", list(shapes[key]), allowed, _REMEDY, "wrong shape").error()
    return Shard(path, rows, ids[1], predictions)


def open_shards(paths: Sequence[Path]) -> list[Shard]:
    """Shapes of all files with rows.

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
    """Digest of names, sizes and shapes of the files."""
    lines = [
        f"{shard.path.relative_to(folder)} {shard.path.stat().st_size} {shard.rows} {shard.sequence_length}"
        for shard in shards
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Origin of the shards in a folder (``made_of``, ``result``), None if they were not prepared here.

    Raises:
        VPipeConfigError: it cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        result = content["result"]
        if result is not None and not isinstance(result["unigram_entropy"], float):
            raise ValueError(f"unigram_entropy {show(result['unigram_entropy'])} is no number")
        return {"made_of": dict(content["made_of"]), "result": result}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VPipeConfigError(f"{path}: not readable: {error}; remove it to do without, or prepare anew") from error


def read_rows(shard: Shard, start: int, stop: int, vocab_size: int) -> Rows:
    """Rows start .. stop - 1 of a shard, int64, checked.

    Args:
        shard: the file.
        start: first row.
        stop: one past the last row.
        vocab_size: of the model; token numbers are less.

    Raises:
        VPipeConfigError: the file is broken; names it, the key, the row and the value.
    """
    rows: Rows = {}
    with _opened(shard.path) as file:
        for key in TYPES:
            try:
                rows[key] = file[key][start:stop].astype(np.int64)
            except _UNREADABLE as error:
                where = f"{shard.path}: {key}, rows {start} to {stop - 1}"
                raise Refusal(where, _line(error), "data that HDF5 can read", _REMEDY, "truncated?").error() from error
            if len(rows[key]) != stop - start:
                raise Refusal(f"{shard.path}: {key}", len(rows[key]), f"{shard.rows} rows", _REMEDY, "changed").error()
    _check(shard, start, rows, vocab_size)
    return rows


def sample_of(rows: Rows, index: int, max_predictions: int) -> Sample:
    """Row `index` of `read_rows` as a sample; predictions beyond its slots are left out."""
    positions = rows["masked_lm_positions"][index]
    ends = np.flatnonzero(positions == 0)
    count = min(int(ends[0]) if len(ends) else len(positions), max_predictions)
    masked_positions = np.zeros(max_predictions, dtype=np.int64)
    masked_positions[:count] = positions[:count]
    labels = np.full(max_predictions, IGNORED_LABEL, dtype=np.int64)
    labels[:count] = rows["masked_lm_ids"][index][:count]
    return Sample(
        rows["input_ids"][index],
        rows["segment_ids"][index],
        rows["input_mask"][index] != 0,
        masked_positions,
        labels,
        int(rows["next_sentence_labels"][index]),
    )


def write_shard(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples as a shard, which appears complete or not at all."""
    labels = np.stack([sample.masked_lm_labels for sample in samples])
    columns = {
        "input_ids": np.stack([sample.input_ids for sample in samples]),
        "input_mask": np.stack([sample.padding_mask for sample in samples]),
        "segment_ids": np.stack([sample.token_type_ids for sample in samples]),
        "masked_lm_positions": np.stack([sample.masked_positions for sample in samples]),
        "masked_lm_ids": np.where(labels == IGNORED_LABEL, 0, labels),
        "next_sentence_labels": np.array([sample.next_sentence_label for sample in samples]),
    }
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with h5py.File(unfinished, "w") as file:
            for key, column in columns.items():
                chunk = (min(_CHUNK_ROWS, len(samples)), *column.shape[1:])
                file.create_dataset(key, data=column.astype(TYPES[key]), chunks=chunk, compression="gzip")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _opened(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise Refusal(str(path), _line(error), "a complete HDF5 file", _REMEDY, "truncated?").error() from error


def _check(shard: Shard, start: int, rows: Rows, vocab_size: int) -> None:
    positions = rows["masked_lm_positions"]
    # What stands after the end of the list says nothing.
    used = np.cumsum(positions == 0, axis=1) == 0
    tokens = (0, vocab_size - 1, "a token of the model's vocabulary; see --config_name and --vocab_size")
    limits = {
        "input_ids": tokens,
        "input_mask": (0, 1, "0 or 1"),
        "segment_ids": (0, 1, "0 or 1"),
        "masked_lm_positions": (1, shard.sequence_length - 1, "a position of the sequence"),
        "masked_lm_ids": tokens,
        "next_sentence_labels": (0, 1, "0 or 1"),
    }
    for key, (lowest, highest, what) in limits.items():
        wrong = (rows[key] < lowest) | (rows[key] > highest)
        if key.startswith("masked_lm"):
            wrong &= used
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0])
            where = f"{shard.path}: {key}, row {start + int(place[0])}"
            raise Refusal(where, int(rows[key][place]), f"{lowest} to {highest}, {what}", _REMEDY).error()
    empty = np.flatnonzero(~used.any(axis=1))
    if len(empty):
        where = f"{shard.path}: masked_lm_positions, row {start + int(empty[0])}"
        raise Refusal(where, 0, "at least one position before the first 0", _REMEDY, "nothing to predict").error()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())

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

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ds_vpipe.errors import Refusal, VPipeConfigError, show
from ds_vpipe.models.bert.samples import Ints, Sample, Samples, shuffled
from ds_vpipe.whole_file import whole_file

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

Rows = dict[str, Ints]


@dataclass(frozen=True)
class Shard:
    """HDF5 file whose keys and shapes are right: `rows` samples of S tokens with P prediction slots."""

    path: Path
    rows: int
    sequence_length: int
    predictions: int


class ShardSamples(Samples):
    """Samples in the rows of shards.

    Args:
        shards: at least one, all with one sequence length; see `open_shards`.
        slots: prediction slots of a sample; those a row has beyond them are left out.
        vocab_size: of the model.
        keep_order: take the rows as they are stored, in every epoch.
        block_rows: rows decoded at once.
    """

    def __init__(
        self, shards: Sequence[Shard], slots: int, vocab_size: int, keep_order: bool = False,
        block_rows: int = BLOCK_ROWS,
    ) -> None:  # fmt: skip
        blocks = [
            (shard, start, min(start + block_rows, shard.rows))
            for shard in shards
            for start in range(0, shard.rows, block_rows)
        ]
        self._keep_order = keep_order
        self._lengths = np.array([stop - start for _, start, stop in blocks], dtype=np.int64)
        self._ends = np.cumsum(self._lengths)
        self._rows = lru_cache(_BLOCKS_KEPT)(lambda block: read_rows(*blocks[block], slots, vocab_size))
        super().__init__(int(self._ends[-1]))

    def sample(self, index: int, epoch: int) -> Sample:
        """Row `index`, the same in every epoch.

        Raises:
            VPipeConfigError: the file is broken; names it, the key and the row.
        """
        block = int(np.searchsorted(self._ends, index, side="right"))
        row = index - self._ends[block]  # counted from the end of the block
        return {key: column[row] for key, column in self._rows(block).items()}

    def index(self, position: int, seed: int, epoch: int) -> int:
        """Row at a position of an epoch, which has every row once."""
        if self._keep_order:
            return position
        blocks = shuffled(len(self._lengths), seed, epoch)
        ends = np.cumsum(self._lengths[blocks])
        place = int(np.searchsorted(ends, position, side="right"))
        block = int(blocks[place])
        begin, length = int(self._ends[block] - self._lengths[block]), int(self._lengths[block])
        return begin + int(shuffled(length, seed, epoch, block)[position - ends[place]])


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
            shapes = {key: list(found[key].shape or ()) for key in kinds}  # None is a dataset without a dataspace
        except _UNREADABLE as error:
            raise _refusal(path, error, "headers that HDF5 can read", "damaged?") from error

    for key in TYPES:
        if key not in kinds:
            raise _refusal(f"{path}: {key}", None, f"the keys {', '.join(TYPES)}", f"the file has {present}")
        if kinds[key].kind not in "iub":
            raise _refusal(f"{path}: {key}", str(kinds[key]), "integers")
    ids, positions = shapes["input_ids"], shapes["masked_lm_positions"]
    for key, second in (("input_ids", "sequence length"), ("masked_lm_positions", "predictions")):
        if len(shapes[key]) != 2:
            raise _refusal(f"{path}: {key}", shapes[key], f"a shape [rows, {second}]")
    rows, slots = ids[:1], positions[1:]
    for key, shape in zip(TYPES, (ids, ids, ids, rows + slots, rows + slots, rows), strict=True):
        if shapes[key] != shape:
            raise _refusal(f"{path}: {key}", shapes[key], f"the shape {shape}, for input_ids has {ids}", "wrong shape")
    return Shard(path, ids[0], ids[1], positions[1])


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


def read_rows(shard: Shard, start: int, stop: int, slots: int, vocab_size: int) -> Rows:
    """Rows start .. stop - 1 of a shard, int64, checked; zeros fill the ``slots`` after the end of the predictions.

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
                raise _refusal(where, error, "data that HDF5 can read", "truncated?") from error
            if len(rows[key]) != stop - start:
                raise _refusal(f"{shard.path}: {key}", len(rows[key]), f"{shard.rows} rows", "changed")
    used = np.cumsum(rows["masked_lm_positions"] == 0, axis=1) == 0
    _check(shard, start, rows, used, vocab_size)
    for key in ("masked_lm_positions", "masked_lm_ids"):
        rows[key] = np.pad(np.where(used, rows[key], 0), ((0, 0), (0, slots)))[:, :slots]
    return rows


def write_shard(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples as a shard, which appears complete or not at all."""
    with whole_file(path, several=True) as part, h5py.File(part, "w") as file:
        for key, kind in TYPES.items():
            column = np.stack([sample[key] for sample in samples]).astype(kind)
            chunk = (min(_CHUNK_ROWS, len(samples)), *column.shape[1:])
            file.create_dataset(key, data=column, chunks=chunk, compression="gzip")


def _opened(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise _refusal(path, error, "a complete HDF5 file", "truncated?") from error


def _check(shard: Shard, start: int, rows: Rows, used: Any, vocab_size: int) -> None:
    """Refuse values out of range. What stands after the end of a list of predictions says nothing."""
    bit = (0, 1, "0 or 1")
    token = (0, vocab_size - 1, "a token of the model's vocabulary; see --config_name and --vocab_size")
    position = (1, shard.sequence_length - 1, "a position of the sequence")
    for key, (lowest, highest, what) in zip(TYPES, (token, bit, bit, position, token, bit), strict=True):
        wrong = (rows[key] < lowest) | (rows[key] > highest)
        if key.startswith("masked_lm"):
            wrong &= used
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0])
            where = f"{shard.path}: {key}, row {start + int(place[0])}"
            raise _refusal(where, int(rows[key][place]), f"{lowest} to {highest}, {what}")
    empty = np.flatnonzero(~used.any(axis=1))
    if len(empty):
        where = f"{shard.path}: masked_lm_positions, row {start + int(empty[0])}"
        raise _refusal(where, 0, "at least one position before the first 0", "nothing to predict")


def _refusal(where: Path | str, given: object, allowed: str, reason: str = "") -> VPipeConfigError:
    given = " ".join(str(given).split()) if isinstance(given, Exception) else given
    return Refusal(str(where), given, allowed, _REMEDY, reason).error()

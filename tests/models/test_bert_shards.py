"""HDF5 shards: what is written is read, broken ones are named, and epochs take every row once."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.arguments import parse_arguments
from ds_vpipe.models.bert.data import micro_batches, prepare
from ds_vpipe.models.bert.model import bert_config
from ds_vpipe.models.bert.samples import Masking, RandomSamples, Sample, Vocabulary
from ds_vpipe.models.bert.shards import (
    TYPES,
    ShardSamples,
    find_shards,
    open_shard,
    open_shards,
    read_rows,
    write_shard,
)

LENGTH, SLOTS, VOCABULARY = 32, 6, 600


def samples(count: int, seed: int = 0, length: int = LENGTH) -> list[Sample]:
    source = RandomSamples(count, Masking(Vocabulary.numbered(VOCABULARY), length, SLOTS), seed)
    return [source.sample(index, 0) for index in range(count)]


def assert_same(one: Sample, two: Sample) -> None:
    assert one.keys() == two.keys()
    for key, column in one.items():
        np.testing.assert_array_equal(column, two[key], err_msg=key)


def row(rows: dict[str, Any], index: int) -> Sample:
    return {key: column[index] for key, column in rows.items()}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "part_training.hdf5"
    write_shard(path, samples(10))
    return path


def changed(path: Path, key: str, value: Any) -> None:
    """Put another array in the place of a key, or none."""
    with h5py.File(path, "a") as file:
        del file[key]
        if value is not None:
            file[key] = value


def with_entry(path: Path, key: str, place: Any, value: int) -> None:
    with h5py.File(path, "a") as file:
        file[key][place] = value


def test_layout_is_nvidias(shard: Path) -> None:
    with h5py.File(shard) as file:
        assert {key: file[key].dtype.str[1:] for key in file} == TYPES
        assert {file[key].compression for key in file} == {"gzip"}
        assert {key: file[key].shape for key in file} == {
            "input_ids": (10, LENGTH),
            "input_mask": (10, LENGTH),
            "segment_ids": (10, LENGTH),
            "masked_lm_positions": (10, SLOTS),
            "masked_lm_ids": (10, SLOTS),
            "next_sentence_labels": (10,),
        }
    assert [path.name for path in shard.parent.iterdir()] == [shard.name]


def test_what_is_written_is_read(shard: Path) -> None:
    rows = read_rows(open_shard(shard), 3, 10, SLOTS, VOCABULARY)
    for index, sample in enumerate(samples(10)[3:]):
        assert_same(row(rows, index), sample)


def test_the_first_zero_ends_the_list_and_slots_may_be_fewer_or_more(shard: Path) -> None:
    with_entry(shard, "masked_lm_positions", (0, slice(None)), [7, 9, 0, 11, 999, 3])
    with_entry(shard, "masked_lm_ids", (0, slice(None)), [50, 51, 52, 53, 9999, 55])
    for slots in (1, 2, SLOTS, 9):
        sample = row(read_rows(open_shard(shard), 0, 10, slots, VOCABULARY), 0)
        assert sample["masked_lm_positions"].tolist() == ([7, 9] + [0] * 9)[:slots]
        assert sample["masked_lm_ids"].tolist() == ([50, 51] + [0] * 9)[:slots]


def test_files_are_found_by_their_names(tmp_path: Path) -> None:
    names = [
        "b/wiki_training_1.hdf5",
        "a_training.h5",
        "wiki_test_0.hdf5",
        "c_validation.hdf5",
        "x.hdf5",
        "training.txt",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    training, validation = find_shards(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in training] == ["a_training.h5", "b/wiki_training_1.hdf5"]
    assert [path.name for path in validation] == ["c_validation.hdf5", "wiki_test_0.hdf5"]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("segment_ids", None, "segment_ids: got null; the file has input_ids, "),
        ("input_ids", np.zeros((10, LENGTH), "f4"), 'input_ids: got "float32"; allowed: integers'),
        ("input_ids", np.zeros(10, "i4"), "input_ids: got [10]; allowed: a shape [rows, sequence length]"),
        ("masked_lm_positions", np.zeros(10, "i4"), "masked_lm_positions: got [10]; allowed: a shape"),
        ("input_mask", np.zeros((10, 31), "i1"), "input_mask: got [10, 31]; wrong shape; allowed: the shape [10, 32]"),
        ("masked_lm_ids", np.zeros((10, 5), "i4"), "masked_lm_ids: got [10, 5]; wrong shape"),
        ("next_sentence_labels", np.zeros(9, "i1"), "next_sentence_labels: got [9]; wrong shape"),
        ("input_ids", h5py.Empty("i4"), "input_ids: got []; allowed: a shape [rows, sequence length]"),
        ("segment_ids", h5py.ExternalLink("gone.hdf5", "/x"), "segment_ids: got null; the file has input_ids, "),
    ],
)
def test_wrong_keys_and_shapes_are_named(shard: Path, key: str, value: Any, says: str) -> None:
    changed(shard, key, value)
    with pytest.raises(VPipeConfigError, match=re.escape(f"{shard}: {says}")) as caught:
        open_shard(shard)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "place", "value", "says"),
    [
        ("input_ids", (7, 3), VOCABULARY, "input_ids, row 7: got 600; allowed: 0 to 599, a token of the model's"),
        ("masked_lm_ids", (8, 0), 700, "masked_lm_ids, row 8: got 700; allowed: 0 to 599, a token of the model's"),
        ("masked_lm_positions", (9, 1), LENGTH, "masked_lm_positions, row 9: got 32; allowed: 1 to 31, a position"),
        ("masked_lm_positions", (6, 0), 0, "masked_lm_positions, row 6: got 0; nothing to predict"),
        ("next_sentence_labels", 5, 2, "next_sentence_labels, row 5: got 2; allowed: 0 to 1"),
        ("segment_ids", (5, 0), -1, "segment_ids, row 5: got -1; allowed: 0 to 1"),
        ("input_mask", (9, 31), 2, "input_mask, row 9: got 2; allowed: 0 to 1"),
    ],
)
def test_wrong_values_are_named_with_their_row(shard: Path, key: str, place: Any, value: int, says: str) -> None:
    with_entry(shard, key, place, value)
    with pytest.raises(VPipeConfigError, match=re.escape(f"{shard}: {says}")) as caught:
        read_rows(open_shard(shard), 5, 10, SLOTS, VOCABULARY)
    assert "\n" not in str(caught.value)
    read_rows(open_shard(shard), 0, 5, SLOTS, VOCABULARY)


def test_truncated_files_are_named(shard: Path) -> None:
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(VPipeConfigError, match=rf"{re.escape(str(shard))}: got .*truncated") as caught:
        open_shard(shard)
    assert "\n" not in str(caught.value)


def test_a_damaged_header_is_named(shard: Path) -> None:
    content = shard.read_bytes()
    refused = []
    for place in range(0, 4096, 16):
        shard.write_bytes(content[:place] + b"\xa5" * 16 + content[place + 16 :])
        try:
            read_rows(open_shard(shard), 0, 10, SLOTS, VOCABULARY)
        except VPipeConfigError as error:
            refused.append(str(error))
    assert len(refused) > 40
    assert all(str(shard) in line and "\n" not in line for line in refused)


def test_damaged_data_are_named_with_key_and_rows(shard: Path) -> None:
    with h5py.File(shard) as file:
        chunk = file["segment_ids"].id.get_chunk_info(0)
    content = bytearray(shard.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"\xff" * chunk.size
    shard.write_bytes(content)
    with pytest.raises(VPipeConfigError, match=r"segment_ids, rows 0 to 9: got .*HDF5 can read") as caught:
        read_rows(open_shard(shard), 0, 10, SLOTS, VOCABULARY)
    assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    bad = samples(2)
    bad[1]["input_ids"] = np.zeros(LENGTH - 1, dtype=np.int64)
    with pytest.raises(ValueError, match="same shape"):
        write_shard(tmp_path / "x_training.hdf5", bad)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, count in enumerate((7, 5, 9)):
        write_shard(folder / f"{number}_training.hdf5", samples(count, seed=number))
    return folder


def arguments(folder: Path, *options: str) -> Any:
    return parse_arguments(["--deepspeed_config", "c", "--data_dir", str(folder), *options])


def rows_of(folder: Path, **options: Any) -> ShardSamples:
    return ShardSamples(open_shards(find_shards(folder)[0]), SLOTS, VOCABULARY, block_rows=4, **options)


def test_an_epoch_takes_every_row_of_every_file_once_and_block_by_block(folder: Path) -> None:
    rows = rows_of(folder)
    assert len(rows) == 21

    def order_of(seed: int, epoch: int, rows: ShardSamples = rows) -> list[int]:
        return [rows.index(position, seed, epoch) for position in range(21)]

    blocks = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6]
    orders = []
    for epoch in range(3):
        order = order_of(1, epoch)
        assert sorted(order) == list(range(21))
        visited = [blocks[index] for index in order]
        assert len([1 for one, two in itertools.pairwise(visited) if one != two]) == 6
        backwards = [rows.index(position, 1, epoch) for position in reversed(range(21))]
        assert backwards[::-1] == order
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]
    # The rows of a block have another order in every epoch, too, and with every seed.
    others = [*orders, order_of(2, 0)]
    within = [[index for index in order if blocks[index] == block] for block in (0, 2, 4, 5) for order in others]
    assert len(set(map(tuple, within))) > 8
    assert order_of(2, 0) != orders[0]
    assert order_of(1, 4, rows_of(folder, keep_order=True)) == list(range(21))


def test_rows_are_the_same_whoever_asks_and_whenever(folder: Path) -> None:
    stored = samples(7, 0) + samples(5, 1) + samples(9, 2)
    rows = rows_of(folder)
    for index in (20, 0, 8, 4, 12, 20, 11):
        assert_same(rows.sample(index, epoch=index), stored[index])


def test_replicas_are_disjoint_and_cover_the_epoch(folder: Path) -> None:
    seen = []
    for replica in range(2):
        batches = micro_batches(rows_of(folder), 2, 3, 21, replica, 2)
        for (ids, _, _, _), _ in itertools.islice(batches, 5):
            seen.extend(map(tuple, ids.tolist()))
    assert len(seen) == len(set(seen)) == 20


def test_lengths_must_agree_and_empty_files_do_no_harm(folder: Path, tmp_path: Path) -> None:
    write_shard(folder / "9_training.hdf5", samples(1, length=LENGTH + 1))
    with pytest.raises(VPipeConfigError, match=r"9_training\.hdf5: input_ids: got 33; allowed: 32 tokens"):
        rows_of(folder)
    (folder / "9_training.hdf5").unlink()
    before = prepare(arguments(folder), bert_config("tiny")).digest
    with h5py.File(folder / "8_training.hdf5", "w") as file:
        for key, kind in TYPES.items():
            shape = {"input": LENGTH, "segme": LENGTH, "maske": SLOTS}.get(key[:5])
            file[key] = np.zeros((0,) if shape is None else (0, shape), kind)
    assert len(rows_of(folder)) == 21
    (folder / "1_training.hdf5").unlink()
    assert prepare(arguments(folder), bert_config("tiny")).digest != before


def test_lengths_of_validation_and_command_line_must_be_that_of_training(folder: Path) -> None:
    def error(*options: str) -> str:
        with pytest.raises(VPipeConfigError) as caught:
            prepare(arguments(folder, *options), bert_config("tiny"))
        return str(caught.value)

    assert "sequences have 32 tokens, which does not fit --max_seq_length 48;" in error("--max_seq_length", "48")
    write_shard(folder / "9_validation.hdf5", samples(1, length=LENGTH + 1))
    says = f"sequences have 32 tokens, which does not fit {folder / '9_validation.hdf5'} with 33;"
    assert says in error()
    assert says in error("--max_seq_length", "32")

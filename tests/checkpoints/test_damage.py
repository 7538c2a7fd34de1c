"""Files that are not as they were written never load with other values."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_vpipe.checkpoints.damage import files_of, refuse_damage, share_of
from ds_vpipe.errors import VPipeError
from ds_vpipe.export import main

CONTENT = {"weight": torch.arange(40.0), "step": torch.tensor(3), "text": "words"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for tag in ("step1", "step2"):
        (tmp_path / tag).mkdir()
        torch.save(CONTENT, tmp_path / tag / "mp_rank_00_model_states.pt")
    return tmp_path / "step2" / "mp_rank_00_model_states.pt"


def refusal(file: Path) -> str:
    try:
        refuse_damage(file.parent, [file])
    except VPipeError as error:
        return str(error)
    return ""


def same(content: Any) -> bool:
    return (
        content.keys() == CONTENT.keys()
        and content["text"] == "words"
        and all(torch.equal(content[name], CONTENT[name]) for name in ("weight", "step"))  # type: ignore[arg-type]
    )


def test_no_bit_changes_a_value_without_a_word(file: Path) -> None:
    good, draws = file.read_bytes(), random.Random(1)
    assert refusal(file) == ""
    refused = 0
    for position in range(0, len(good), 3):
        spoilt = bytearray(good)
        spoilt[position] ^= 1 << draws.randrange(8)
        file.write_bytes(spoilt)
        if refusal(file):
            refused += 1
            continue
        try:
            content = torch.load(file, weights_only=True)
        except Exception:  # torch refuses what is no archive any more
            continue
        assert same(content), position
    assert refused > len(good) // 3 // 5  # the others are in gaps between records, and in fields that nobody reads


def test_a_file_that_is_cut_off_names_itself_and_the_other_checkpoints(file: Path) -> None:
    good = file.read_bytes()
    for size in (4, 100, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:size])
        assert refusal(file).startswith(
            f"checkpoint {str(file.parent)!r}: got {file.name}, which is cut off or damaged"
        )
        assert "\n" not in refusal(file)
        assert refusal(file).endswith("load another tag: ['step1']")


def test_an_empty_file_is_named(file: Path) -> None:
    file.write_bytes(b"")
    assert refusal(file).startswith(f"checkpoint {str(file.parent)!r}: got {file.name}, which is empty; allowed")


def test_what_has_no_checksums_is_left_to_torch(file: Path) -> None:
    torch.save(CONTENT, file, _use_new_zipfile_serialization=False)
    assert refusal(file) == ""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(CONTENT, file)
    finally:
        torch.serialization.set_crc32_options(True)
    assert refusal(file) == ""
    assert same(torch.load(file))


def test_every_file_is_read_once_by_the_ranks_that_see_it() -> None:
    """Two machines with folders of their own, the second of which has a file less."""
    folders = [[Path(name) for name in "abcde"], [Path(name) for name in "abcd"]]
    machines = [0, 1, 0, 1, 1]
    seen = [folders[machine] for machine in machines]
    shares = [share_of(rank, seen, seen[rank]) for rank in range(5)]
    for machine in (0, 1):
        read = [file for rank, share in enumerate(shares) if machines[rank] == machine for file in share]
        assert sorted(read) == folders[machine]


def test_export_refuses_what_a_disk_has_changed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nested = file.parent / "zero" / "fp32.pt"
    nested.parent.mkdir()
    torch.save(CONTENT, nested)
    spoilt = bytearray(nested.read_bytes())
    at = spoilt.index(CONTENT["weight"].numpy().tobytes())  # type: ignore[attr-defined]
    spoilt[at + 7] ^= 1
    nested.write_bytes(spoilt)
    assert files_of(file.parent) == [file, nested]
    assert main([str(file.parent), str(file.with_name("out.safetensors"))]) == 2
    error = capsys.readouterr().err
    assert f"checkpoint {str(file.parent)!r}: got zero/fp32.pt, which has been changed since it was written" in error
    assert error.endswith("load another tag: ['step1']\n")

"""Files that appear complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vpipe.whole_file import whole_file


@pytest.mark.parametrize("several", [False, True])
def test_a_file_is_whole_or_as_it_was(tmp_path: Path, several: bool) -> None:
    path = tmp_path / "file"
    for text, failing in (("first", False), ("second", True), ("third", False)):
        try:
            with whole_file(path, several=several) as part:
                part.write_text(text)
                if failing:
                    raise OSError
        except OSError:
            assert path.read_text() == "first"
        assert [found.name for found in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "third"


def test_what_a_killed_process_has_left_is_written_over(tmp_path: Path) -> None:
    with whole_file(tmp_path / "file") as left:
        left.touch()
    left.write_text("half")
    with whole_file(tmp_path / "file") as part:
        part.write_text("whole")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("file", "whole")]


@pytest.mark.parametrize("name", ["new", "empty"])
def test_a_folder_is_whole_or_as_it_was(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    path, left = tmp_path / name, tmp_path / f".{name}.part"
    left.mkdir()
    (left / "left").touch()  # by a process that was killed

    def write(file: str) -> None:
        with whole_file(path) as part:
            part.mkdir()
            (part / file).touch()
            if file == "half":
                raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write("half")
    assert (path.exists(), left.exists()) == (name == "empty", False)
    write("whole")
    assert [found.name for found in path.iterdir()] == ["whole"]
    assert not left.exists()

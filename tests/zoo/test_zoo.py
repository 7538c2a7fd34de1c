"""The table of architectures that can be split says what a sample of them gives."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

ROOT = Path(__file__).parents[2]
SAMPLE = 16


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "zoo"))
    import zoo

    return zoo


def compared() -> list[str]:
    """Model types of the table's first part, in an order that has nothing to do with what they are."""
    page = (ROOT / "docs" / "data" / "zoo.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (\S+) \| \S+ \| (?:equal \| \d+ \| \d+% \|  \||refused \|)", page, re.MULTILINE)
    return sorted(found, key=lambda kind: hashlib.sha256(kind.encode()).digest())


@pytest.mark.parametrize("kind", compared()[:SAMPLE])
def test_a_sample_gives_what_the_table_says(zoo: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "STAGES", (4,))
    if kind not in zoo.architectures() and not of_this_version(zoo):
        pytest.skip("another release of the library, without this model type")
    *_, found = zoo.examine(kind, *zoo.architectures()[kind])
    if of_this_version(zoo):
        wanted = zoo.read()[kind]
        remedy = f"python tests/zoo/zoo.py {kind} --output docs/data/zoo.md"
        assert (found.outcome, found.pieces, found.largest) == (wanted.outcome, wanted.pieces, wanted.largest), remedy
    else:
        assert found.outcome != zoo.DEFECT, found.remark


def test_the_table_has_every_architecture_and_its_head_line_is_counted(zoo: Any) -> None:
    rows = zoo.read()
    if of_this_version(zoo):
        assert list(rows) == list(zoo.architectures())
        assert zoo.page(list(rows.values())) == zoo.PAGE.read_text(encoding="utf-8")
        count = re.search(r"\d+ of \d+ architectures", zoo.page(list(rows.values())))
        assert count is not None
        assert f"[{count[0]}](data/zoo.md)" in (ROOT / "docs" / "plain_models.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["pegasus", "altclip"])
def test_inputs_with_the_usual_names_need_no_example(zoo: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders with a decoder, images beside text."""
    monkeypatch.setattr(zoo, "STAGES", (4,))
    if kind not in zoo.architectures() and not of_this_version(zoo):
        pytest.skip("another release of the library, without this model type")
    *_, found = zoo.examine(kind, *zoo.architectures()[kind])
    assert (found.outcome, found.remark) == (zoo.EQUAL, "")


def of_this_version(zoo: Any) -> bool:
    return f"transformers {transformers.__version__}, " in zoo.PAGE.read_text(encoding="utf-8")

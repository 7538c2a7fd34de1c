"""docs/compatibility.md says what the tests run."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import compatibility
import pytest


@cache
def files() -> dict[str, Path]:
    """Test files by name."""
    return {path.name: path for path in Path(__file__).parents[1].rglob("test_*.py")}


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_page_is_up_to_date() -> None:
    assert compatibility.PAGE.read_text() == compatibility.page(), "run: python tests/support/compatibility.py"


@pytest.mark.parametrize("test", sorted(set(compatibility.tests_named())))
def test_named_tests_exist(test: str) -> None:
    file, _, function = test.partition("::")
    assert file in files()
    assert not function or function in functions(files()[file])

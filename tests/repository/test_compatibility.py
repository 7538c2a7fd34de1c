"""docs/compatibility.md says what the tests run."""

from __future__ import annotations

import ast
from pathlib import Path

import compatibility
import pytest


def test_page_is_up_to_date() -> None:
    assert compatibility.PAGE.read_text() == compatibility.page(), "run: python tests/support/compatibility.py"


@pytest.mark.parametrize("test", sorted(set(compatibility.tests_named())))
def test_named_tests_exist(test: str) -> None:
    file, _, function = test.partition("::")
    tree = ast.parse(next(Path(__file__).parents[1].rglob(file)).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not function or function in names

"""Sentences out of docstrings and text, documents, and their key."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vpipe.models.bert import corpus

DOCSTRING = """
    A line of prose: with a colon in it it stays whole.

    Return the *mean* of every :class:`~numbers.Real` in the list. It is ``None``
    if the list has no element at all!

    Args:
        values: the numbers whose mean is wanted
        axis (int): which of the dimensions goes away. See [the guide](https://example.org/x) for more of this.

    .. note:: ignored directive lines are left out here

    >>> mean([1, 2, 3])
    2

    ```python
    this code is certainly not an English sentence
    ```
    x = f(3, 4) + g[5] * 7 / (8 - 2)
"""


def test_prose_is_kept_and_code_is_not() -> None:
    assert corpus.sentences(DOCSTRING) == [
        "A line of prose: with a colon in it it stays whole.",
        "Return the mean of every numbers.Real in the list.",
        "It is None if the list has no element at all!",
        "the numbers whose mean is wanted",
        "which of the dimensions goes away.",
        "See the guide for more of this.",
    ]


def test_files_become_documents_without_repetition() -> None:
    first = ["This is the first sentence. And here comes the second one.", "This is the first sentence."]
    second = ["And here comes the second one. A third sentence is new. So is the fourth one."]
    assert corpus._distinct([first, second]) == [
        ["This is the first sentence.", "And here comes the second one."],
        ["A third sentence is new.", "So is the fourth one."],
    ]


def test_long_texts_are_cut_into_documents() -> None:
    text = " ".join(f"Sentence {'a' * n} is here." for n in range(1, 2 * corpus.MAX_SENTENCES + 6))
    assert [len(document) for document in corpus._distinct([[text]])] == [corpus.MAX_SENTENCES] * 2 + [5]


def test_docstrings_are_read_in_source_order_without_import(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text('"""never read"""')
    (tmp_path / "broken.py").write_text('"""no Python"""\ndef (:')
    (tmp_path / "code.py").write_text(
        '"""module"""\nraise SystemExit\nclass A:\n    """class"""\n    def f(self):\n        """method"""\n'
        'async def g():\n    """function"""\n    x = """no docstring"""\n'
    )
    assert [texts for texts in corpus._docstrings(tmp_path) if texts] == [["module", "class", "method", "function"]]


def test_the_key_names_versions_and_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    before = corpus.docstring_key()
    assert corpus.docstring_key() == before
    monkeypatch.setattr(corpus, "_EXTRACTION_VERSION", 99)
    assert corpus.docstring_key() != before

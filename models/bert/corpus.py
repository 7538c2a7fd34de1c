"""English prose that every installation has, in docstrings and help topics, and its sentences.

The corpus is the English prose in the docstrings of the standard library, torch, transformers and deepspeed,
and in the help topics of pydoc. It is real text of about 10 MB that is already on the machine: nothing is shipped and
nothing is downloaded. Sources are parsed, never imported.

Docstrings mix prose with signatures, tables, doctests and markup. What is kept: paragraphs of ordinary lines, cut into
sentences, of which those survive that have a few words and consist mostly of letters. A document is a list of
sentences. Those that occur twice are kept once, otherwise boilerplate would be repeated thousands of times and held-out
documents would not be unseen.
"""

import ast
import importlib.util
import inspect
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from ds_vpipe.models.bert.samples import digest_of
from ds_vpipe.run_record import package_version

Document = list[str]

PACKAGES = ("torch", "transformers", "deepspeed")
MAX_SENTENCES = 64  # longer documents are cut, so that one large file does not end up on one side of the split
MIN_SENTENCES = 2

_EXTRACTION_VERSION = 1  # raise it when the rules here change: it is part of the cache key
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test", "lib2to3"}

MIN_WORDS = 4
MAX_CHARACTERS = 1000
MIN_LETTER_SHARE = 0.8

_FENCE = re.compile(r"^\s*(```|~~~)")
_NOT_PROSE = re.compile(r"^\s*(>>>|\.\.\.|\.\. |[-=~^+*#|_\s]+$|\||@)")
_PARAGRAPH_START = re.compile(r"^\s*([-*\u2022]\s+|\d+[.)]\s+|#+\s+)")
_FIELD_NAME = re.compile(r"^\s*(:\w+[^:]*:\s*|[`*]*[\w.]+[`*]*(,\s*[`*]*[\w.]+[`*]*)*\s*(\([^)]*\))?\s*:(\s+|$))")
_ROLE = re.compile(r":[\w:]+:`~?([^`<]*)(<[^`]*>)?`")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)|`([^`<]*)\s*<[^`>]*>`_+")
_MARKUP = re.compile(r"[`*]+")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]?[A-Z0-9])")
_SPACES = re.compile(r"\s+")


def sentences(text: str) -> list[str]:
    """English sentences of a docstring in order, without mark-up and what is no prose."""
    return [sentence for paragraph in _paragraphs(text) for sentence in _split(paragraph)]


def docstring_key() -> str:
    """Versions of Python, packages and rules: the name of the corpus."""
    versions = [f"{package}-{package_version(package)}" for package in PACKAGES]
    return digest_of([f"python-{platform.python_version()}", *versions, f"rules-{_EXTRACTION_VERSION}"])


def write_docstrings(path: Path) -> None:
    """Write the corpus as text, with blank lines between documents."""
    path.write_text("\n\n".join(map("\n".join, docstring_documents())), encoding="utf-8")


def docstring_documents() -> list[Document]:
    """Documents of the corpus, in an order that does not depend on the file system."""
    texts = [list(topics.values()), *_docstrings(Path(sysconfig.get_path("stdlib")))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            texts.extend(_docstrings(Path(next(iter(spec.submodule_search_locations)))))
    return _distinct(texts)


def _paragraphs(text: str) -> list[str]:
    paragraphs: list[list[str]] = [[]]
    fenced = False
    for line in inspect.cleandoc(text).splitlines():
        if _FENCE.match(line):
            fenced = not fenced
            paragraphs.append([])
        elif fenced:
            continue
        elif not line.strip() or _NOT_PROSE.match(line):
            paragraphs.append([])
        elif _PARAGRAPH_START.match(line) or _FIELD_NAME.match(line):
            # A list item or a parameter: its marker or name is no prose, what follows may be.
            rest = _PARAGRAPH_START.sub("", line)
            paragraphs.append([_FIELD_NAME.sub("", rest, count=1)])
        else:
            paragraphs[-1].append(line)
    return [" ".join(lines) for lines in paragraphs if lines]


def _split(paragraph: str) -> list[str]:
    plain = _ROLE.sub(r"\1", paragraph)
    plain = _LINK.sub(lambda match: match.group(1) or match.group(2) or "", plain)
    plain = _SPACES.sub(" ", _MARKUP.sub("", plain)).strip()
    return [sentence for sentence in _SENTENCE_END.split(plain) if _is_prose(sentence)]


def _is_prose(sentence: str) -> bool:
    words = sentence.split()
    letters, characters = sum(map(str.isalpha, sentence)), sum(map(len, words))
    of_a_length = len(words) >= MIN_WORDS and len(sentence) <= MAX_CHARACTERS
    return of_a_length and letters >= MIN_LETTER_SHARE * characters


def _docstrings(root: Path) -> Iterator[list[str]]:
    """The docstrings of every Python file under a folder, one list per file."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py"):
                yield _docstrings_of(Path(folder, name))


def _docstrings_of(path: Path) -> list[str]:
    source = path.read_text(encoding="utf-8", errors="ignore")
    if '"""' not in source and "'''" not in source:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nodes: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):  # templates and test inputs that are no Python
        return []
    texts = []
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                texts.append(text)
            nodes.extend(reversed(node.body))  # in source order
    return texts


def _distinct(texts_of_files: Iterable[list[str]]) -> list[Document]:
    """Sentences of each file, those seen before left out, cut into documents."""
    seen: set[str] = set()
    documents: list[Document] = []
    for texts in texts_of_files:
        kept: Document = []
        for sentence in (sentence for text in texts for sentence in sentences(text)):
            key = sentence.lower()
            if key not in seen:
                seen.add(key)
                kept.append(sentence)
        pieces = [kept[start : start + MAX_SENTENCES] for start in range(0, len(kept), MAX_SENTENCES)]
        documents.extend(piece for piece in pieces if len(piece) >= MIN_SENTENCES)
    return documents

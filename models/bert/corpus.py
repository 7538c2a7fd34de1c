"""The documents to train on: docstrings and help topics that every installation has, or the user's own files.

The default corpus is the English prose in the docstrings of the standard library, torch, transformers and deepspeed,
and in the help topics of pydoc. It is real text of about 10 MB that is already on the machine: nothing is shipped and
nothing is downloaded. Sources are parsed, never imported.

A document is a list of sentences. Sentences that occur twice are kept once, otherwise boilerplate would be repeated
thousands of times and held-out documents would not be unseen.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.prose import sentences

Document = list[str]

PACKAGES = ("torch", "transformers", "deepspeed")
MAX_SENTENCES = 64  # longer documents are cut, so that one large file does not end up on one side of the split
MIN_SENTENCES = 2

_EXTRACTION_VERSION = 1  # raise it when the rules here or in `prose` change: it is part of the cache key
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test", "lib2to3"}


def default_key() -> str:
    """Names the content of the default corpus without reading it: Python, package and extraction versions."""
    versions = [f"{package}-{_version(package)}" for package in PACKAGES]
    return _digest([f"python-{platform.python_version()}", *versions, f"rules-{_EXTRACTION_VERSION}"])


def default_documents() -> list[Document]:
    """The documents of the default corpus, in an order that does not depend on the file system."""
    texts = [_help_topics(), *_docstrings(Path(sysconfig.get_path("stdlib")))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            texts.extend(_docstrings(Path(next(iter(spec.submodule_search_locations)))))
    return _distinct(texts)


def files_key(paths: Iterable[Path]) -> str:
    """Names the content of the user's files.

    Raises:
        VPipeConfigError: a file does not exist or cannot be read.
    """
    return _digest(
        [hashlib.sha256(_read(path).encode()).hexdigest() for path in paths] + [f"rules-{_EXTRACTION_VERSION}"]
    )


def file_documents(paths: Iterable[Path]) -> list[Document]:
    """The documents of the user's files: prose in UTF-8, paragraphs separated by blank lines.

    Raises:
        VPipeConfigError: a file does not exist or cannot be read.
    """
    return _distinct([[_read(path)] for path in paths])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VPipeConfigError(f"--train_file {path}: not readable as UTF-8 text: {error}") from error


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _help_topics() -> list[str]:
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        return []
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            return [str(text) for text in ast.literal_eval(node.value).values()]
    return []


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

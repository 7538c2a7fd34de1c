"""Sentences of English prose, taken out of docstrings and plain text.

Docstrings mix prose with signatures, tables, doctests and markup. What is kept: paragraphs of ordinary lines, cut into
sentences, of which those survive that have a few words and consist mostly of letters.
"""

import inspect
import re

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
    """The English sentences of a docstring or a plain text, in order, white space collapsed, mark-up removed."""
    return [sentence for paragraph in _paragraphs(text) for sentence in _split(paragraph)]


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
    if len(words) < MIN_WORDS or len(sentence) > MAX_CHARACTERS:
        return False
    characters = sum(map(len, words))
    letters = sum(map(str.isalpha, sentence))
    return letters >= MIN_LETTER_SHARE * characters

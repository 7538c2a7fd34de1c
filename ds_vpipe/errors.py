"""Exceptions of ds_vpipe, the wording of refused settings and files, and lines of a rank.

Every message is one line with the key, the value given, what is allowed and what to do: every rank prints it, and
launchers interleave the output of ranks, so that a message of several lines cannot be read. Values are shown as JSON
because that is how the user wrote them.
"""

import difflib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LONGEST_VALUE = 100


class VPipeError(RuntimeError):
    """Base of all errors raised by ds_vpipe."""


class VPipeConfigError(VPipeError, ValueError):
    """A wrong setting: its key, the value given, what is allowed and what to do."""


class PipelinePeerError(VPipeError):
    """A failed wait for another stage: time limit, lost peer, or a failure there.

    ``reason`` is the part that is sent on to other stages: the first failure.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message


class PipelineProtocolError(VPipeError):
    """A message out of order: a defect in ds_vpipe, or different code on different ranks."""


class CallOrderError(VPipeError, AssertionError):
    """Calls of ``engine(...)``, ``backward()`` and ``step()`` out of DeepSpeed's order."""


class OutputError(VPipeError, AttributeError):
    """An attribute of what ``engine(...)`` returned in training that the stage does not have."""


def show(value: object) -> str:
    """Return ``value`` as JSON on one line, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        try:
            text = repr(value)
        except (ValueError, RecursionError):  # too many digits, or too deep
            text = f"a {type(value).__name__} too large to show"
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def flat(text: str) -> str:
    """Return ``text`` on one line that can be encoded: JSON and names of files have halves of characters."""
    return " ".join(text.split()).encode(errors="backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """Return the kind and the words of an exception, on one line."""
    try:
        words = flat(str(error))
    except Exception:  # of a class whose text needs what it has not been given
        words = "its text cannot be shown"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def say(text: str) -> None:
    """Write a line of this rank on standard error, at once: those of others may come between two writes."""
    try:
        sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] ds_vpipe: {text}\n")
        sys.stderr.flush()
    except OSError:  # nobody reads it any more; what is still to be written would fail at the end of this process
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return ``', did you mean "x"?'`` for the closest of ``known``, or an empty string."""
    if not isinstance(word, str):
        return ""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f', did you mean "{by_lower[close[0]]}"?' if close else ""


@dataclass(frozen=True)
class Refusal:
    """One setting that is refused."""

    key: str  # full name, such as vpipe.recompute_ratio[1]
    value: object
    allowed: str
    remedy: str  # as an imperative
    reason: str = ""  # where "it is not among the allowed" does not say it

    def __str__(self) -> str:
        reason = f"{self.reason}; " if self.reason else ""
        return flat(f"{self.key}: got {show(self.value)}; {reason}allowed: {self.allowed}; {self.remedy}")

    def error(self) -> VPipeConfigError:
        """Return the exception to raise."""
        return VPipeConfigError(str(self))


def parse_json(text: str, loads: Callable[..., object] = json.loads) -> object:
    """The content of a JSON text.

    Raises:
        ValueError: it is none, or has a key twice.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found, keys = dict(pairs), [key for key, _ in pairs]
        if len(found) < len(keys):
            raise ValueError(f"key {show(next(key for key in found if keys.count(key) > 1))} is given twice")
        return found

    return loads(text, object_pairs_hook=unique)


def read_json(
    path: str | os.PathLike[str],
    key: str,
    allowed: str,
    remedy: str,
    parse: Callable[[str], object] = parse_json,
    form: str = "JSON",
) -> dict[str, Any]:
    """The object in a JSON file, or in one of another form, that the setting ``key`` names.

    Raises:
        VPipeConfigError: the file cannot be read or holds no object.
    """
    content: object
    try:
        content = parse(Path(path).read_text(encoding="utf-8-sig"))
        reason = "it holds no object"
    except OSError as error:
        content, reason = None, f"the file cannot be read: {error.strerror} (current directory {Path.cwd()})"
    except (ValueError, TypeError, RecursionError) as error:
        content, reason = None, f"it is not {form}: {error}"
    if not isinstance(content, dict):
        raise Refusal(key, str(path), allowed, remedy, reason).error()
    return content


def raise_first(refusals: Sequence[Refusal]) -> None:
    """Raise the first of ``refusals``, saying how many more there are. Returns if there is none.

    Raises:
        VPipeConfigError: ``refusals`` is not empty.
    """
    if refusals:
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        raise VPipeConfigError(f"{refusals[0]}{more}")

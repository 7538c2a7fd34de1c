"""What a check found, in one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        level: ``error`` if training will not start or be wrong, ``warning`` if it may.
        check: what was looked at.
        text: what was found.
        remedy: what to do about it; empty if it is ok.
    """

    level: Level
    check: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return " ".join(f"{self.level}: {self.check}: {self.text}{remedy}".split())

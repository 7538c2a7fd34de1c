"""What became of one field, in one line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_vpipe.errors import show


@dataclass(frozen=True)
class Remark:
    """What became of a field of the files that were read.

    Attributes:
        kind: ``kept`` if it means the same, ``changed`` if it does not quite, ``dropped`` if it has no counterpart.
        field: its name, with the file's where it is not the YAML.
        value: what it says; None if it is absent.
        becomes: the new setting; empty if there is none.
        why: the difference, or what to do instead.
    """

    kind: Literal["kept", "changed", "dropped"]
    field: str
    value: object
    becomes: str
    why: str = ""

    def __str__(self) -> str:
        value = "absent" if self.value is None else show(self.value)
        why = f"; {self.why}" if self.why else ""
        return " ".join(f"{self.kind}: {self.field} {value} -> {self.becomes or 'nothing'}{why}".split())

"""Record of a run: its starts, its events and every loss.

``"record": FOLDER`` in the block has it written by the first rank, for ``python -m ds_vpipe replay FOLDER``::

    FOLDER/events.jsonl    an object per event: starts, checkpoints, emptied pipelines, layers that move
    FOLDER/losses.bin      8 bytes per update: its number, and the mean loss as it is in fp32

A run that is started again adds to both. What it trains anew, from an earlier checkpoint or from the beginning, takes
the place of what was recorded.
"""

from __future__ import annotations

import json
import math
import os
import platform
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ds_vpipe.errors import Refusal, VPipeConfigError

PACKAGES = ("ds_vpipe", "deepspeed", "torch", "transformers", "tokenizers", "numpy", "h5py", "safetensors")
_VARIABLES = (
    "OMP_",
    "MKL_",
    "KMP_",
    "DNNL_",
    "ATEN_",
    "TORCH",
    "PYTHON",
    "CUBLAS_",
    "DS_",
    "DEEPSPEED_",
    "ACCELERATE_",
)
"""Beginnings of the names of environment variables that numbers may depend on; others may be secrets."""
OF_LAUNCHERS = "TORCHELASTIC_"
"""Beginning of the names of variables that say who else is there, which is another one in a replay."""
_ROW = struct.Struct("<If")
_EVENTS, _LOSSES = "events.jsonl", "losses.bin"
_LEAST_BEFORE, _MOST_BEFORE = 4, 50  # losses that a jump is compared with


@dataclass(frozen=True)
class RunRecord:
    """A record as read, for the training that was done last."""

    starts: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]  # all others
    losses: dict[int, float]  # by update, from 1

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> RunRecord:
        """The record in a folder.

        Raises:
            VPipeConfigError: there is none.
        """
        path = Path(folder)
        try:
            lines = (path / _EVENTS).read_text(encoding="utf-8").splitlines()
            rows = (path / _LOSSES).read_bytes() if (path / _LOSSES).exists() else b""
        except OSError as error:
            allowed, remedy = "a folder that a run has recorded", 'add "record": FOLDER to the vpipe block of the run'
            raise Refusal("RUN", str(folder), allowed, remedy, f"{error.filename}: {error.strerror}").error() from None
        starts: list[dict[str, Any]] = []
        events: list[dict[str, Any]] = []
        for event in filter(None, map(_event, lines)):
            if event["event"] in ("start", "loaded"):
                starts = [one for one in starts if one["update"] <= event["update"]]
                later = {_name(one) for one in events if one["update"] > event["update"]} - {None}  # may be there still
                events = [one for one in events if one["update"] <= event["update"] and _name(one) not in later]
            (starts if event["event"] == "start" else events).append(event)
        losses: dict[int, float] = {}
        for update, loss in _ROW.iter_unpack(rows[: len(rows) // _ROW.size * _ROW.size]):
            while losses and next(reversed(losses)) >= update:
                losses.popitem()
            losses[update] = loss
        if not starts:
            raise VPipeConfigError(f"RUN: got {str(folder)!r}, where no update has been recorded; name another record")
        return cls(tuple(starts), tuple(events), losses)

    def at(self, kind: str, update: int) -> list[dict[str, Any]]:
        """Events of a kind after an update."""
        return [event for event in self.events if event["event"] == kind and event["update"] == update]

    def start_of(self, update: int) -> dict[str, Any]:
        """The start whose processes have made an update."""
        return next((one for one in reversed(self.starts) if one["update"] < update), self.starts[0])

    def has_saved_in(self, folder: str) -> bool:
        """Whether checkpoints of the run are in a folder."""
        return any(one["event"] == "saved" and one["folder"] == os.path.abspath(folder) for one in self.events)

    def checkpoint(self, latest: int, folder: str) -> str | None:
        """The name of the last usable checkpoint up to an update.

        One that is not there any more is none, and one that was saved while a layer was on its way, or was to go, does
        not hold what is to come of the move. Where data begin anew at a resume, the run has to have begun from it, too.
        """
        starts = [one["update"] for one in self.starts]
        moves = [event for event in self.events if event["event"] in ("moved", "move_layer")]
        later: set[str] = set()  # names of later checkpoints, which have replaced earlier ones
        for event in reversed(self.events):
            if event["event"] != "saved" or event["folder"] != os.path.abspath(folder) or event["tag"] in later:
                continue
            at = event["update"]
            later.add(event["tag"])
            if at > latest or (self.starts[0].get("data_begin_anew") and at not in starts):
                continue
            moving = any(one["update"] <= at < one.get("until", math.inf) for one in moves)
            if not moving and Path(event["folder"], event["tag"]).is_dir():
                return str(event["tag"])
        return None

    def difference(self, update: int, loss: float) -> str | None:
        """How the loss of an update that was done again differs from the recorded one; None if it does not."""
        known = self.losses.get(update)
        if known is None or same_bits(known, loss):
            return None
        line = (
            f"update {update}: loss {known:.9g} recorded, {loss:.9g} replayed: the script, its data or its environment "
            f"differ"
        )
        loads = [one["update"] for one in self.events if one["event"] == "loaded" and one["update"] < update]
        began = [one["update"] for one in self.starts if 0 < one["update"] < update]
        if began and self.starts[0].get("data_begin_anew"):
            line += f", or the data since update {max(began)}, which began anew there; replay from that checkpoint"
        if loads:
            loaded = f"it loaded the checkpoint of update {max(loads)} in mid-run"
            line += f", or the data since {loaded}, which a replay does not do"
        return line


def _name(event: Mapping[str, Any]) -> tuple[str, str] | None:
    """Folder and name of a checkpoint that was saved; None of other events."""
    return (event["folder"], event["tag"]) if event["event"] == "saved" else None


class RecordWriter:
    """Files of the record of a run that goes on.

    Raises:
        OSError: they cannot be written.
    """

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        # A killed run may have left a part of a row or of a line.
        self._losses = (path / _LOSSES).open("ab", buffering=0)
        self._losses.truncate(self._losses.tell() // _ROW.size * _ROW.size)
        self._events = (path / _EVENTS).open("ab", buffering=0)
        if self._events.tell():
            self._events.write(b"\n")

    def loss(self, update: int, loss: float) -> None:
        """Add the loss of an update."""
        self._losses.write(_ROW.pack(update, loss))

    def event(self, kind: str, update: int, **values: Any) -> None:
        """Add what has happened after an update."""
        self._events.write(json.dumps({"event": kind, "update": update, **values}).encode() + b"\n")


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:  # the run was killed while it wrote this
        return None
    return event if isinstance(event, dict) and {"event", "update"} <= event.keys() else None


def same_bits(one: float, other: float) -> bool:
    """Whether two losses are one number in fp32; all NaNs are."""
    return struct.pack("<f", one) == struct.pack("<f", other) or (math.isnan(one) and math.isnan(other))


def first_not_finite(losses: Mapping[int, float]) -> int | None:
    """The first update whose loss is NaN or infinite."""
    return next((update for update, loss in losses.items() if not math.isfinite(loss)), None)


def first_jump(losses: Mapping[int, float], factor: float) -> int | None:
    """The first update whose loss jumps, or is no number.

    A loss jumps if it is above the median of up to 50 before it by more than ``factor - 1`` times the median's size.
    """
    before: list[float] = []
    for update, loss in losses.items():
        if not math.isfinite(loss):
            return update
        if len(before) >= _LEAST_BEFORE:
            middle = median(before[-_MOST_BEFORE:])
            if loss > middle + (factor - 1) * abs(middle):
                return update
        before.append(loss)
    return None


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that numbers may depend on."""
    found = ((name, value) for name, value in sorted(variables.items()) if name.startswith(_VARIABLES))
    return {name: value for name, value in found if not name.startswith(OF_LAUNCHERS)}


def machine(device: str) -> dict[str, Any]:
    """Versions and whatever else results of a device may depend on in their last bits."""
    gpu: dict[str, Any] = {}
    if device == "cuda":
        gpu = {"GPU": torch.cuda.get_device_name(), "CUDA": torch.version.cuda}
        gpu |= {"cuDNN": torch.backends.cudnn.version(), "TF32": torch.backends.cuda.matmul.allow_tf32}
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        **gpu,
        "python": platform.python_version(),
        **{package: package_version(package) for package in PACKAGES},
    }


def differences(recorded: Mapping[str, Any], here: Mapping[str, Any], leave: Collection[str] = ()) -> Sequence[str]:
    """What is not as it was, in words."""
    names = [name for name in {**recorded, **here} if name not in leave and recorded.get(name) != here.get(name)]
    return [f"{name} {recorded.get(name)} recorded, {here.get(name)} here" for name in names]


def package_version(package: str) -> str:
    """Version of an installed package, or ``"absent"``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # such as a checkout that is not installed
        return "absent"

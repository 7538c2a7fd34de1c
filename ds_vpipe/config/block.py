"""The ``"vpipe"`` block of a DeepSpeed JSON: a strict model of it, and the pipeline that it asks for.

DeepSpeed accepts unknown keys in silence, so everything is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Literal

from pydantic import ValidationError, field_validator, model_validator
from typing_extensions import Self

from ds_vpipe.config.deepspeed_json import checked_block
from ds_vpipe.config.keys import Settings, checked_list, is_number, key, refusal_of, refuse
from ds_vpipe.config.partition_file import is_partition_file, merge_partition_file
from ds_vpipe.config.replan import Replan
from ds_vpipe.config.staleness import WORDS, Staleness
from ds_vpipe.errors import Refusal, raise_first
from ds_vpipe.partition import check_stage_count, checked_counts
from ds_vpipe.schedules.pipeline import Pipeline

PARTITION_METHODS = ("uniform", "parameters", "profile")

_LEFT_TO_PLANNER = {
    "partition": "profile",
    "recompute_ratio": "auto",
    "swap_ratio": "auto",
    "stage_to_depth_map": "auto",
}


class TimelineConfig(Settings):
    """The ``"timeline"`` object: recording of the actions of every rank."""

    enabled: bool = key(False, "true or false", "Record every rank's actions.", True)
    path: str = key(
        "timeline", "a path, as a string", "Folder of the recording, with one file per rank.", "timeline", min_length=1
    )


class Recovery(Settings):
    """The ``"recovery"`` object: states in host memory from which a run goes on after a rank has failed."""

    every: int = key(
        0,
        "an int >= 0",
        "Updates between two states of a rank that its supervisor keeps (`ds_vpipe.run --restarts N`); 0: none. "
        "`engine.recover()` resumes from the newest that all ranks have.",
        1,
        ge=0,
    )


class VPipeConfig(Settings):
    """The ``"vpipe"`` block. Build it with :meth:`parse`, which words errors for users; instances are immutable."""

    sync_mode: Literal["asp", "bsp"] = key(
        "asp",
        '"asp" or "bsp"',
        "Asynchronous, or synchronous as DeepSpeed is: with `bsp` the pipeline drains after every batch.",
        "asp",
    )
    schedule: Literal["1f1b", "gpipe", "interleaved"] = key(
        "1f1b",
        '"1f1b", or "gpipe" or "interleaved" with sync_mode "bsp"',
        "Order of the passes in bsp: 1F1B, all forward passes before all backward passes, or 1F1B over several virtual "
        "stages per rank, after Megatron-LM.",
        "1f1b",
    )
    virtual_stages: int = key(
        1,
        'an int >= 2 with schedule "interleaved", else 1',
        "Virtual stages on every rank: rank i of K holds virtual stages i, i+K, ... and `partition` has a count for "
        "each of them.",
        2,
        ge=1,
    )
    weight_sync: Literal["stash", "vertical", "none"] = key(
        "stash",
        '"stash", "vertical" or "none", with sync_mode "asp" only',
        "Weights of a backward pass: those of its forward pass (`stash`); the same, and the same version index at "
        "every stage (`vertical`); or the newest (`none`), which keeps no version and is "
        "[no gradient of any loss](semantics.md#order-and-versions).",
        "stash",
    )
    partition: tuple[int, ...] | str | None = key(
        None,
        'a list of layer counts > 0, one per stage, "uniform", "parameters", "type:REGEX", "profile", the path of a '
        ".json file, or null for the module's own",
        "Layers of every stage. `parameters` balances them by size, `type:REGEX` by the number of layers whose type "
        "matches, and `profile` leaves the choice to the planner. A module that was built with another split is split "
        "anew, and its weights move with their layers. A file holds what `python -m ds_vpipe plan` writes: "
        '`{"partition": [...], "recompute_ratio": [...]}`.',
        [12, 13, 13, 11],
        entry="an int > 0",
    )
    recompute_ratio: float | tuple[float, ...] | Literal["auto"] = key(
        0.0,
        'a number in [0, 1], a list of one such number per stage or per virtual stage, or "auto"',
        "Share of its n layers that a stage recomputes in the backward pass, under the stashed weights: the last "
        "int(ratio x n) of them. `auto` plans the smallest ratios that fit the memory.",
        0.5,
        entry="a number in [0, 1]",
    )
    swap_ratio: float | tuple[float, ...] | Literal["auto"] = key(
        0.0,
        'a number in [0, 1], a list of one such number per stage or per virtual stage, or "auto"',
        "Share of its n layers whose activations a stage keeps on the host until the backward pass: the first "
        "int(ratio x n) of them, without those that it recomputes. They are copied out after the forward pass and "
        "fetched while the backward pass is awaited; on the CPU the host is a file without a name in `TMPDIR`. A stage "
        "with one micro-batch in flight swaps nothing. `auto` plans the smallest ratios that fit the memory, "
        "and, if `recompute_ratio` is `auto` too, whichever of both costs less time. See "
        "[tuning](tuning.md#swapping-activations).",
        0.5,
        entry="a number in [0, 1]",
    )
    stage_to_depth_map: Literal["default", "auto"] | tuple[int, ...] = key(
        "default",
        '"default", "auto", or a list of one int >= 0 per stage that never rises and ends in 0, '
        'with sync_mode "asp" only',
        "Warm-up depth W_s of every stage s: forward passes that it runs ahead of its backward passes, by default "
        "K-1-s. More depth hides slow transfers, and costs memory and staleness. `auto` plans the smallest depths that "
        "hide all transfers. With `replan` depths also follow the times of passes while training runs, and need no "
        "`profile` at the start ([balancing](balancing.md#depths)).",
        [3, 2, 1, 0],
        entry="an int >= 0, not above the one before, and 0 at the last stage",
    )
    profile: str | None = key(
        None,
        'the path of a profile of the model\'s layers, for "profile" and "auto"',
        'Costs of every layer, for the planner: a file that "python -m ds_vpipe profile" writes, in the precision and '
        "with the micro-batches of this JSON. The plan with its predicted bytes is printed at start, and at the end "
        "every stage's measured peak beside it.",
        "profile.json",
        min_length=1,
    )
    memory_budget: int | tuple[int, ...] | None = key(
        None,
        "an int > 0, or a list of one per stage, in bytes per device",
        "Memory that a plan may use. Without it: nine tenths of the GPU's memory, and on the CPU no limit.",
        16_000_000_000,
        entry="an int > 0",
    )
    link_bandwidth: float | None = key(
        None,
        "a number > 0, bytes per second between two stages",
        "Bandwidth of one direction of a link, for the planner. Without it transfers take no time, and `auto` depths "
        "are refused.",
        10_000_000_000,
        gt=0,
        allow_inf_nan=False,
    )
    host_bandwidth: float | None = key(
        None,
        "a number > 0, bytes per second between device and host",
        "Bandwidth of one direction between a device and its host, for `auto` swap ratios, which are refused without "
        "it; on the CPU that of a file in `TMPDIR`.",
        20_000_000_000,
        gt=0,
        allow_inf_nan=False,
    )
    gradient_clipping_scope: Literal["stage", "delayed_global"] = key(
        "stage",
        '"stage", or "delayed_global" with sync_mode "asp"',
        "Norm that asp clips gradients by (DeepSpeed's `gradient_clipping`, 1.0 unless it is set): the stage's own, or "
        "that of all stages with the others' norms a fixed number of updates late. Neither waits for another stage. "
        "In bsp it is the norm of all stages. See [training](training.md#gradient-clipping).",
        "stage",
    )
    staleness: Staleness | None = key(
        None,
        '"auto", "off", or, with sync_mode "asp" only, an object with nadam, synchronous_updates or '
        "delay_warmup_updates",
        "Mitigations of gradients that are some updates old. `auto` chooses by delay, optimizer and length of the "
        "learning-rate schedule what the [experiments](convergence.md) support, and says so at the start. Without the "
        "key it does so only where a gradient is more than one update late. See [training](training.md#staleness).",
        {"nadam": True},
    )
    replan: Replan = key(
        Replan(),
        "an object with every, moves, threshold, max_staleness or dry_run",
        "Balance of the stages while training runs: measure layers, plan anew, move layers. See "
        "[balancing](balancing.md).",
        {"every": 50},
    )
    recovery: Recovery = key(
        Recovery(),
        "an object with every",
        "States in host memory from which training goes on after a rank has failed, as if nothing had happened. See "
        "[training](training.md#without-a-step-back).",
        {"every": 1},
    )
    link: Literal["auto", "shared", "ipc", "nccl", "host"] = key(
        "auto",
        '"auto", "shared", "ipc", "nccl" or "host"',
        "What carries tensors between two stages: shared memory (`shared`), for stages of one Linux host; memory of "
        "GPUs that both have (`ipc`), for stages of one Linux host; NCCL (`nccl`), from GPU to GPU, which needs "
        "`CUDA_DEVICE_MAX_CONNECTIONS=32` in every rank's environment; or gloo (`host`), for all. With `shared` and "
        "`host` tensors of a GPU go through page-locked memory. `auto` takes `shared` where it works, else `host`; "
        "never `nccl`, which has not been tried between two GPUs, or `ipc`, which has not been tried on any.",
        "host",
    )
    peer_timeout_s: float = key(
        300.0,
        "a number of seconds, 0.001 to 1e9",
        "Longest wait for another stage. Then every rank ends with a line that names who waited for what.",
        300,
        ge=0.001,  # gloo rounds down to milliseconds, and waits for ever with none
        le=1e9,  # it counts nanoseconds from the start of the machine, and hangs where they overflow
        allow_inf_nan=False,
    )
    timeline: TimelineConfig = key(
        TimelineConfig(),
        'an object {"enabled": true, "path": "..."}',
        "Recording of what every rank does, for `python -m ds_vpipe show`, `trace` and `report`.",
        {"enabled": True},
    )

    record: str | None = key(
        None,
        "the path of a folder, as a string, or null",
        "Record of the run, from which `python -m ds_vpipe replay` does any update again: see [replay](replay.md).",
        "record",
        min_length=1,
    )

    @field_validator("partition", mode="before")
    @classmethod
    def _check_partition(cls, value: object) -> tuple[int, ...] | str | None:
        if value is None or (isinstance(value, str) and value in PARTITION_METHODS):
            return value
        if isinstance(value, str) and value.startswith("type:"):
            try:
                re.compile(value.removeprefix("type:"))
            except (re.error, OverflowError, RecursionError) as error:
                refuse(value, reason=f"REGEX does not compile: {error}", remedy="correct the regular expression")
            if value == "type:":
                refuse(value, reason="REGEX is empty", remedy='name a layer type, such as "type:Block"')
            return value
        return checked_list(value, lambda count: type(count) is int and count > 0)

    @field_validator("recompute_ratio", "swap_ratio", mode="before")
    @classmethod
    def _check_ratio(cls, value: object) -> float | tuple[float, ...] | str:
        if value == "auto":
            return "auto"
        if isinstance(value, (list, tuple)):
            return tuple(map(float, checked_list(value, _is_ratio)))
        return float(value) if _is_ratio(value) else refuse(value)  # type: ignore[arg-type]

    @field_validator("stage_to_depth_map", mode="before")
    @classmethod
    def _check_depth(cls, value: object) -> str | tuple[int, ...]:
        if isinstance(value, str) and value in ("default", "auto"):
            return value
        depths = checked_list(value, lambda depth: type(depth) is int and depth >= 0)
        for index in range(1, len(depths)):
            if depths[index] > depths[index - 1]:
                refuse(depths[index], index, reason=f"it rises from {depths[index - 1]} at stage {index - 1}")
        if depths[-1] != 0:
            refuse(depths[-1], len(depths) - 1, reason=f"the last of {len(depths)} stages has nothing to run ahead of")
        return depths

    @field_validator("staleness", mode="before")
    @classmethod
    def _read_word(cls, value: object) -> object:
        return WORDS.get(value, value) if isinstance(value, str) else value

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _check_memory_budget(cls, value: object) -> object:
        if value is None or (type(value) is int and value > 0):
            return value
        return checked_list(value, lambda size: type(size) is int and size > 0)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        for name, wrong, why, remedy in self._rules():
            if wrong:
                value = reduce(getattr, name.split("."), self)
                given = value.model_dump(exclude_unset=True) if isinstance(value, Settings) else value
                refuse(given, key=name, reason=why, remedy=remedy)
        return self

    def _rules(self) -> Iterator[tuple[str, object, str, str]]:
        """Rules for several keys: the one that is refused, whether it is, why, and a remedy if not its example."""
        moves, given, parts = self.replan.every > 0, self.replan.model_fields_set, self.virtual_stages > 1
        why = "virtual_stages is above 1, and layers move between stages with one part each"
        yield "replan.every", moves and parts, why, "write 0, or another schedule"
        why, swaps = "swap_ratio is above 0, and swapped layers do not move", self.swaps and self.swap_ratio != "auto"
        yield "replan.every", moves and swaps, why, "write 0, or remove swap_ratio"
        for name in ("moves", "threshold", "dry_run"):
            why, fix = "replan has no every, without which nothing happens", 'write "every", or remove replan'
            yield f"replan.{name}", name in given and "every" not in given, why, fix
        why, fix = "depths do not follow", 'write "stage_to_depth_map": "auto" and "every", or remove the key'
        yield "replan.max_staleness", self.replan.max_staleness is not None and not self.follows_depths, why, fix
        asp, interleaved = self.sync_mode == "asp", self.schedule == "interleaved"
        why = 'sync_mode is "asp", which has no bubble to make smaller'
        yield "virtual_stages", asp and parts, why, "remove the key"
        why, fix = 'sync_mode is "asp", which has an order of its own', 'add "sync_mode": "bsp", or remove the key'
        yield "schedule", asp and self.schedule != "1f1b", why, fix
        why, fix = f'schedule is "{self.schedule}"', "write 2" if interleaved else "remove the key"
        yield "virtual_stages", not asp and interleaved != parts, why, fix
        for name, there in (
            ("weight_sync", "weight_sync" in self.model_fields_set),
            ("stage_to_depth_map", self.stage_to_depth_map != "default"),
            ("gradient_clipping_scope", self.gradient_clipping_scope != "stage"),
            ("staleness", self.staleness is not None and not self.staleness.word),
        ):
            yield name, not asp and there, 'sync_mode is "bsp"', "remove the key"
        global_norms = self.gradient_clipping_scope != "stage"
        for name, there, why in (
            ("replan", moves, "layers and depths are then not those of the JSON"),
            ("record", self.record is not None, "a replay cannot recover"),
            ("virtual_stages", parts, "states are those of stages with one part"),
            ("weight_sync", self.weight_sync == "none", "old weights, which passes would need again, are not kept"),
            ("gradient_clipping_scope", global_norms, "norms of other stages are not in the states"),
        ):
            yield "recovery.every", self.recovery.every and there, why, f"write 0, or remove {name}"
        left, fix = self._left_to_planner(), 'make one with "python -m ds_vpipe profile" and name it'
        for name in left:
            yield "profile", self.profile is None, f"{name} is {_LEFT_TO_PLANNER[name]!r}", fix
        why = "stage_to_depth_map is 'auto', which hides transfers"
        yield "link_bandwidth", "stage_to_depth_map" in left and self.link_bandwidth is None, why, ""
        why = "swap_ratio is 'auto', which weighs its time"
        yield "host_bandwidth", "swap_ratio" in left and self.host_bandwidth is None, why, ""

    @property
    def recomputes(self) -> bool:
        """True if any stage may recompute layers."""
        return _some(self.recompute_ratio)

    @property
    def swaps(self) -> bool:
        """True if any stage may swap layers."""
        return _some(self.swap_ratio)

    @property
    def leaves_to_planner(self) -> bool:
        """True if the planner is to choose something, by the costs in :attr:`profile`."""
        return bool(self._left_to_planner())

    @property
    def follows_depths(self) -> bool:
        """True if depths are to follow the times of passes while training runs."""
        return self.stage_to_depth_map == "auto" and self.replan.every > 0

    def partition_or_default(self, own_counts: Sequence[int] | None = None) -> str | Sequence[int]:
        """:attr:`partition`, or what counts without one.

        That is ``own_counts``, layers per stage as the module was built, or even parameters, as DeepSpeed has them.
        Virtual stages, which no module was built with, get layers evenly.
        """
        return self.partition or ("uniform" if self.virtual_stages > 1 else own_counts or "parameters")

    def _left_to_planner(self) -> list[str]:
        """Keys that the planner is to fill in at the start; depths that follow need no profile to begin with."""
        left = [name for name, word in _LEFT_TO_PLANNER.items() if getattr(self, name) == word]
        return [name for name in left if name != "stage_to_depth_map" or self.profile or not self.follows_depths]

    @classmethod
    def parse(cls, block: object, origin: Mapping[str, str] | None = None) -> VPipeConfig:
        """The checked block. A partition file that it names is read.

        Args:
            block: the value; other objects than a dict are refused.
            origin: files that keys come from, for those that do.

        Raises:
            VPipeConfigError: something is wrong. One line names the first key, the value given, what is
                allowed and what to do, and how many more keys are wrong.
        """
        block = checked_block(block)
        if is_partition_file(block.get("partition")):
            block, origin = merge_partition_file(block)
        try:
            return cls.model_validate(block)
        except ValidationError as error:
            raise_first([refusal_of(detail, cls, origin or {}) for detail in error.errors(include_url=False)])
            raise  # not reached: a ValidationError has at least one detail

    def settled(self, pipeline: Pipeline) -> VPipeConfig:
        """The block with a plan's numbers for ``"profile"`` and ``"auto"``."""
        numbers = {name: getattr(pipeline, name) for name in ("partition", "recompute_ratio", "swap_ratio")}
        return self.model_copy(update={**numbers, "stage_to_depth_map": pipeline.depth_map or "default"})

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that were given, as JSON types. :meth:`parse` of it gives an equal config."""
        return self.model_dump(mode="json", exclude_unset=True)

    def check_sizes(self, num_stages: int, num_layers: int | None = None) -> None:
        """Check lengths of lists and the sum of ``partition`` for ``num_stages`` stages and ``num_layers`` layers.

        Raises:
            VPipeConfigError: they do not fit, or there are fewer layers than stages, or parts of a single one.
        """
        refusals: list[Refusal] = []
        parts = num_stages * self.virtual_stages
        stage = "stage" if self.virtual_stages == 1 else "virtual stage"
        if num_stages == 1 and self.virtual_stages > 1:
            fix, why = "take another schedule, or more stages", "there is nothing to interleave"
            refusals.append(Refusal("vpipe.virtual_stages", self.virtual_stages, "1 with one stage", fix, why))
        for name, lengths in (
            ("partition", (parts,)),
            ("recompute_ratio", (num_stages, parts)),
            ("swap_ratio", (num_stages, parts)),
            ("stage_to_depth_map", (num_stages,)),
            ("memory_budget", (num_stages,)),
        ):
            values = getattr(self, name)
            if isinstance(values, tuple) and len(values) not in lengths:
                one = stage if name == "partition" else "stage"
                allowed = f"one entry per {one}, {lengths[0]} for {num_stages} stages"
                fix = f"give {lengths[0]} or change the number of stages"
                refusals.append(Refusal(f"vpipe.{name}", values, allowed, fix, f"it has {len(values)} entries"))
        raise_first(refusals)
        if num_layers is not None:
            if isinstance(self.partition, tuple):
                checked_counts(self.partition, num_layers, parts)
            check_stage_count(num_layers, parts)

    def pipeline(self, num_stages: int, micro_batches: int) -> Pipeline:
        """The pipeline that the block asks for. None in it where the planner is to choose, or the module's own split.

        Raises:
            VPipeConfigError: a list does not have one entry per stage.
        """
        self.check_sizes(num_stages)
        parts, depths = num_stages * self.virtual_stages, self.stage_to_depth_map
        return Pipeline(
            schedule="asp" if self.sync_mode == "asp" else self.schedule,
            num_stages=num_stages,
            micro_batches=micro_batches,
            depth_map=depths if isinstance(depths, tuple) else None,
            virtual_stages=self.virtual_stages,
            weight_sync=self.weight_sync,
            partition=self.partition if isinstance(self.partition, tuple) else None,
            recompute_ratio=None if self.recompute_ratio == "auto" else spread(self.recompute_ratio, parts),
            swap_ratio=None if self.swap_ratio == "auto" else spread(self.swap_ratio, parts),
        )


def spread(ratio: float | tuple[float, ...], parts: int) -> tuple[float, ...]:
    """Ratio of every virtual stage. Given is one for all, one for each, or one for each rank."""
    given = ratio if isinstance(ratio, tuple) else (ratio,)
    return given * (parts // len(given))


def _some(ratio: float | tuple[float, ...] | Literal["auto"]) -> bool:
    return any(ratio) if isinstance(ratio, tuple) else ratio == "auto" or ratio > 0


def _is_ratio(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1  # type: ignore[operator]

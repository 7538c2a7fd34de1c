"""The two JSON files beside a vPipe YAML: the split of the layers, and which rank holds which stage."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ds_vpipe.errors import Refusal, did_you_mean

_MAPS = ("module_to_stage_map", "stage_to_rank_map", "stage_to_depth_map")


@dataclass(frozen=True)
class Split:
    """vPipe's partition file: layers of every stage, and the share of them that is recomputed, or None."""

    partition: tuple[int, ...]
    recompute_ratio: tuple[float, ...] | None


@dataclass(frozen=True)
class StageMaps:
    """``mp_conf.json``.

    Attributes:
        modules: modules of every stage; the last module of the file, the criterion, is not counted.
        ranks: ranks of every stage.
        depth: warm-up depth of every stage, or None for the usual one.
        unknown: other keys.
    """

    modules: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    depth: tuple[int, ...] | None
    unknown: dict[str, Any]

    @property
    def replicas(self) -> int:
        """Ranks per stage."""
        return len(self.ranks[0])


def read_split(path: Path) -> Split:
    """Read ``{"partition": [counts], "recompute_ratio": [ratios]}``; the ratios may be absent.

    Raises:
        VPipeConfigError: the file or a value in it is wrong.
    """
    content = _read(path)
    for key in content:
        if key not in ("partition", "recompute_ratio"):
            reason = "unknown key" + did_you_mean(key, ("partition", "recompute_ratio"))
            raise Refusal(f"{path}: {key}", content[key], "partition, recompute_ratio", "rename it", reason).error()
    counts: Any = content.get("partition")
    if not _is_list(counts, int) or min(counts) < 1:
        remedy = "give one count per stage, such as [12, 13, 13, 11]"
        raise Refusal(f"{path}: partition", counts, "a list of layer counts >= 1", remedy).error()
    ratios: Any = content.get("recompute_ratio")
    if ratios is None:
        return Split(tuple(counts), None)
    if not _is_list(ratios, (int, float)) or not all(0 <= ratio <= 1 for ratio in ratios):
        remedy = "give one such number per stage, such as [0.3, 0, 0, 0]"
        raise Refusal(f"{path}: recompute_ratio", ratios, "a list of numbers in [0, 1]", remedy).error()
    if len(ratios) != len(counts):
        reason = f"partition has {len(counts)} entries and this has {len(ratios)}"
        remedy = f"give {len(counts)}"
        raise Refusal(f"{path}: recompute_ratio", ratios, "one number per stage", remedy, reason).error()
    return Split(tuple(counts), tuple(ratios))


def read_stage_maps(path: Path) -> StageMaps:
    """Read ``mp_conf.json``.

    Raises:
        VPipeConfigError: the file or a value in it is wrong, or stages are replicated unevenly.
    """
    content = _read(path)
    modules = _modules(path, content.get("module_to_stage_map"))
    ranks = _ranks(path, content.get("stage_to_rank_map"), len(modules))
    depth = _depth(path, content.get("stage_to_depth_map"), len(modules))
    return StageMaps(modules, ranks, depth, {key: value for key, value in content.items() if key not in _MAPS})


def _modules(path: Path, value: Any) -> tuple[int, ...]:
    name, allowed = f"{path}: module_to_stage_map", "the stage of every module, from 0, rising by 0 or 1"
    if not _is_list(value, int) or len(value) < 2:
        remedy = "give a list such as [0, 1, 2, 3, 3], the last entry for the criterion"
        raise Refusal(name, value, allowed, remedy).error()
    if value[0]:
        raise Refusal(name, value, allowed, "number the stages from 0").error()
    for before, stage in pairwise(value):
        if stage - before not in (0, 1):
            raise Refusal(name, value, allowed, "order the modules by stage", f"{stage} follows {before}").error()
    *layers, criterion = value
    if layers[-1] != criterion:
        remedy = "put the criterion on the stage of the last module"
        raise Refusal(name, value, allowed, remedy, "the criterion has a stage of its own").error()
    return tuple(layers.count(stage) for stage in range(criterion + 1))


def _ranks(path: Path, value: Any, stages: int) -> tuple[tuple[int, ...], ...]:
    name, allowed = f"{path}: stage_to_rank_map", 'the ranks of every stage, such as {"0": [0], "1": [1]}'
    by_stage = _by_stage(name, value, allowed, stages)
    if not all(_is_list(ranks, int) for ranks in by_stage):
        raise Refusal(name, value, allowed, "give a list of ranks per stage").error()
    everyone = sorted(rank for ranks in by_stage for rank in ranks)
    if everyone != list(range(len(everyone))):
        reason = "the ranks are not 0, 1, 2, ... once each"
        raise Refusal(name, value, allowed, "number the ranks so", reason).error()
    sizes = [len(ranks) for ranks in by_stage]
    if len(set(sizes)) > 1:
        reason = (
            f"stages have {', '.join(str(size) for size in sizes)} ranks, and uneven replication has no counterpart"
        )
        remedy = f"give every stage {max(sizes)} ranks, or one, and move layers instead: python -m ds_vpipe plan --help"
        raise Refusal(name, value, "the same number of ranks at every stage", remedy, reason).error()
    return tuple(tuple(ranks) for ranks in by_stage)


def _depth(path: Path, value: Any, stages: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    name, allowed = f"{path}: stage_to_depth_map", "a depth per stage, falling to 0 at the last stage"
    depth = _by_stage(name, value, allowed, stages)
    if not _is_list(depth, int) or min(depth) < 0:
        raise Refusal(name, value, allowed, "give whole numbers >= 0").error()
    if depth[-1] or sorted(depth, reverse=True) != depth:
        reason = "stage 0 runs furthest ahead"
        usual = json.dumps({str(stage): stages - 1 - stage for stage in range(stages)})
        raise Refusal(name, value, allowed, f"write {usual}, or remove the key", reason).error()
    return tuple(depth)


def _by_stage(name: str, value: Any, allowed: str, stages: int) -> list[Any]:
    if not isinstance(value, dict) or sorted(value) != sorted(str(stage) for stage in range(stages)):
        reason = f"module_to_stage_map has {stages} stages"
        raise Refusal(name, value, allowed, f'give the keys "0" to "{stages - 1}"', reason).error()
    return [value[str(stage)] for stage in range(stages)]


def _read(path: Path) -> dict[str, Any]:
    allowed, remedy = "a file with a JSON object", "correct the file"
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise Refusal("file", str(path), allowed, remedy, error.strerror or str(error)).error() from None
    except (ValueError, RecursionError) as error:
        raise Refusal("file", str(path), allowed, remedy, f"it is not JSON: {error}").error() from None
    if not isinstance(content, dict):
        raise Refusal("file", str(path), allowed, remedy, "it holds no object").error()
    return content


def _is_list(value: Any, of: type | tuple[type, ...]) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(item, of) and not isinstance(item, bool) for item in value)
    )

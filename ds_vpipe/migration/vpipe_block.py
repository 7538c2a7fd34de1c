"""How vPipe's modes and maps become micro-batches per update and the ``"vpipe"`` block."""

from __future__ import annotations

from typing import Any

from ds_vpipe.migration.remark import Remark
from ds_vpipe.migration.stage_files import Split, StageMaps
from ds_vpipe.migration.vpipe_file import VPipeFile

BSP_MICRO_BATCHES = 32
MACROBATCH_VERSIONS = 2


def micro_batches(file: VPipeFile, ahead: int, remarks: list[Remark]) -> int:
    """Micro-batches per update, ``gradient_accumulation_steps``; what to say about it is added to ``remarks``.

    Args:
        file: the YAML.
        ahead: depth of the first stage.
        remarks: grows.
    """
    key = "gradient_accumulation_steps"
    if file.sync_mode == "bsp":
        why = "vPipe flushes and updates after so many"
        if file.model_type == "bert":
            why += "; its gradients were 4 times the mean, which LAMB notices only in clipping"
        batches, kind = BSP_MICRO_BATCHES, "changed" if file.model_type == "bert" else "kept"
        remarks.append(Remark("kept", "sync_mode", "bsp", 'vpipe.sync_mode "bsp"', "1F1B with a flush, as vPipe's"))
        remarks.append(Remark(kind, "sync_mode", "bsp", f"{key} {batches}", why))  # type: ignore[arg-type]
        if file.macrobatch:
            remarks.append(Remark("dropped", "macrobatch", True, "", "bsp keeps one version of the weights anyway"))
        if file.no_input_pipelining:
            why = "a batch gives the same update in any order of its micro-batches"
            remarks.append(Remark("dropped", "no_input_pipelining", True, "", why))
        return batches
    if file.no_input_pipelining:
        why = "one micro-batch at a time is a synchronous pipeline with batches of one"
        remarks.append(Remark("changed", "no_input_pipelining", True, f'vpipe.sync_mode "bsp", {key} 1', why))
        return 1
    why = "" if file.dialect == "vpipe" else "PipeDream knows no other"
    value = file.given.get("sync_mode")
    remarks.append(Remark("kept", "sync_mode", value, 'vpipe.sync_mode "asp", weight_sync "stash"', why))
    if not file.macrobatch:
        remarks.append(Remark("kept", "sync_mode", value, f"{key} 1", "an update after every micro-batch"))
        return 1
    batches = min(MACROBATCH_VERSIONS, ahead + 1)
    copies = 1 + -(-ahead // batches)
    why = "an update after every two micro-batches, at the last stage too, which vPipe updated after every one"
    if copies > MACROBATCH_VERSIONS:
        why += (
            f"; stage 0 keeps {copies} versions, because vPipe's two are not those that micro-batches in flight used:"
            f" write {ahead} for two exact versions and a batch that is larger"
        )
    remarks.append(Remark("changed", "macrobatch", True, f"{key} {batches}", why))
    return batches


def vpipe_block(
    file: VPipeFile, split: Split | None, maps: StageMaps | None, num_stages: int, remarks: list[Remark]
) -> dict[str, Any]:
    """The ``"vpipe"`` block: mode, partition, recompute ratios, depths.

    Args:
        file: the YAML.
        split: its partition file, if it names one.
        maps: its mp_conf.json, if it names one.
        num_stages: K.
        remarks: gets a line for every field that went into the block or did not.
    """
    synchronous = file.sync_mode == "bsp" or file.no_input_pipelining
    block: dict[str, Any] = {"sync_mode": "bsp"} if synchronous else {"sync_mode": "asp", "weight_sync": "stash"}
    if split is not None:
        block["partition"] = list(split.partition)
        remarks.append(Remark("kept", "partition", file.partition, f"vpipe.partition {list(split.partition)}"))
    elif maps is not None and max(maps.modules) > 1:
        block["partition"] = list(maps.modules)
        why = f"taken for layers; the model has to have {sum(maps.modules)}"
        remarks.append(
            Remark("changed", "module_to_stage_map", list(maps.modules), f"vpipe.partition {list(maps.modules)}", why)
        )
    else:
        block["partition"] = "parameters"
        why = (
            "the modules are whole stages, so how many layers each has is not known; python -m ds_vpipe plan finds out"
        )
        remarks.append(Remark("changed", "module_to_stage_map", None, 'vpipe.partition "parameters"', why))
    ratios = _ratios(file, split, num_stages, remarks)
    if any(ratios):
        block["recompute_ratio"] = ratios
    if maps is not None and maps.depth is not None:
        if synchronous:
            why = "a pipeline that drains after every batch has no depth to choose"
            remarks.append(Remark("dropped", "stage_to_depth_map", list(maps.depth), "", why))
        else:
            block["stage_to_depth_map"] = list(maps.depth)
            remarks.append(Remark("kept", "stage_to_depth_map", list(maps.depth), "vpipe.stage_to_depth_map"))
    return block


def _ratios(file: VPipeFile, split: Split | None, num_stages: int, remarks: list[Remark]) -> list[float]:
    ratios = [0.0] * num_stages if split is None or split.recompute_ratio is None else list(split.recompute_ratio)
    if split is not None and split.recompute_ratio is not None:
        why = "a share of layers here, of lines of code in vPipe" if any(0 < ratio < 1 for ratio in ratios) else ""
        shown = f"vpipe.recompute_ratio {_tidy(ratios)}" if any(ratios) else "vpipe.recompute_ratio 0, its default"
        name = f"recompute_ratio in {file.partition}"
        remarks.append(Remark("changed" if why else "kept", name, list(split.recompute_ratio), shown, why))
    if file.recompute:
        ratios = [1.0] * (num_stages - 1) + [ratios[-1]]
        shown, why = f"vpipe.recompute_ratio {_tidy(ratios)}", "every stage but the last, whole"
        remarks.append(Remark("kept", "recompute", True, shown, why))
    return _tidy(ratios)


def _tidy(ratios: list[float]) -> list[float]:
    return [int(ratio) if ratio == int(ratio) else ratio for ratio in ratios]

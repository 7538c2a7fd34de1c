"""DeepSpeed settings that do not work together with a ``"vpipe"`` block.

Most of them would not fail by themselves: they would dead-lock, be ignored, or train something else. Key names
and defaults are those of ``deepspeed/runtime/config.py`` and ``deepspeed/runtime/zero/config.py`` of DeepSpeed
0.19. Values that DeepSpeed itself refuses, such as an ``"auto"`` that nobody filled in, are left to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ds_vpipe.deepspeed_json import DeepSpeedJson
from ds_vpipe.errors import Refusal, raise_first

if TYPE_CHECKING:
    from ds_vpipe.config import VPipeConfig

BLOCK = "vpipe"
_HALF = {"bfloat16": "bf16", "float16": "fp16"}
_NAMES = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16", "half")}


def block_of(ds_config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``"vpipe"`` block of a DeepSpeed JSON, or None if there is none.

    Raises:
        VPipeConfigError: The block is not an object, or its key is spelled otherwise (``"vPipe"``), which
            DeepSpeed would ignore in silence.
    """
    for key in ds_config:
        if key != BLOCK and key.lower().replace("-", "").replace("_", "") == BLOCK:
            reason = f'unknown key, did you mean "{BLOCK}"?'
            raise Refusal(key, ds_config[key], f'the block under the key "{BLOCK}"', "rename the key", reason).error()
    if BLOCK not in ds_config:
        return None
    block = ds_config[BLOCK]
    if not isinstance(block, dict):
        remedy = f'write "{BLOCK}": {{}} for the defaults, or remove the key for the stock engine'
        raise Refusal(BLOCK, block, "an object of settings", remedy).error()
    return block


def refuse_unsupported(ds_config: Mapping[str, Any], block: VPipeConfig, num_stages: int) -> None:
    """Refuse settings of the DeepSpeed JSON that do not work with ``block`` on ``num_stages`` stages.

    Raises:
        VPipeConfigError: At least one such setting is there. One line names the first key, its value and what
            to put instead, and how many more there are.
    """
    asp, config = block.sync_mode == "asp", DeepSpeedJson(ds_config)
    raise_first(
        [
            *_zero(config, asp),
            *_precision(config, block),
            *_clipping(config, block),
            *_profiling(config, num_stages),
            *_pipeline(config, block),
            *_features(config, asp),
            *_checkpoints(config, num_stages),
        ]
    )


def _zero(config: DeepSpeedJson, asp: bool) -> Iterator[Refusal]:
    stage = config.zero_stage
    if stage is not None and stage > 1:
        why = "ZeRO-2 and ZeRO-3 split gradients or weights across steps that pipeline stages take at different times"
        yield Refusal("zero_optimization.stage", stage, "0 or 1", "use stage 1", why)
    # An offload with device "none" is off; DeepSpeed also reads the two deprecated flags.
    offload: list[tuple[str, str]] = [("offload_param", "cpu_offload_param")]
    if asp:
        offload.append(("offload_optimizer", "cpu_offload"))
    for key, flag in offload:
        device = config.get(f"zero_optimization.{key}.device")
        if device not in (None, "none"):
            yield Refusal(f"zero_optimization.{key}.device", device, '"none"', f"remove {key}", "not supported")
        if config.on(f"zero_optimization.{flag}"):
            yield Refusal(f"zero_optimization.{flag}", True, "false", "remove the key", "not supported")
    zenflow = config.get("zero_optimization.zenflow")
    if zenflow is not None:
        why = "ZenFlow updates weights outside of the optimizer step"
        yield Refusal("zero_optimization.zenflow", zenflow, "no such key", "remove the key", why)


def _precision(config: DeepSpeedJson, block: VPipeConfig) -> Iterator[Refusal]:
    half = _HALF.get(config.dtype)
    accumulation = config.get("data_types.grad_accum_dtype")
    in_fp32 = half == "bf16" and accumulation in ("fp32", "float32")
    if in_fp32 and (config.zero_stage != 1 or config.on("zero_optimization.cpu_offload")):
        why = "DeepSpeed adds gradients in fp32 only with ZeRO-1"
        fix = 'add "zero_optimization": {"stage": 1}, or remove the key'
        yield Refusal("data_types.grad_accum_dtype", accumulation, '"bf16", or "fp32" with ZeRO-1', fix, why)
    elif in_fp32 and config.get("zero_optimization.offload_optimizer.device") not in (None, "none"):
        why = "DeepSpeed adds gradients in fp32 only without offload"
        yield Refusal("data_types.grad_accum_dtype", accumulation, '"bf16"', "remove one of the two", why)
    elif in_fp32 and block.gradient_clipping_scope == "delayed_global":
        why = "DeepSpeed's optimizer for it clips by the norm that it has computed itself"
        fix = 'write "stage" for vpipe.gradient_clipping_scope, or remove the key'
        yield Refusal("data_types.grad_accum_dtype", accumulation, '"bf16" next to delayed_global', fix, why)
    elif half is not None and not in_fp32 and accumulation not in (None, *_NAMES[half]):
        allowed = '"bf16" or, with ZeRO-1, "fp32"' if half == "bf16" else '"fp16"'
        yield Refusal("data_types.grad_accum_dtype", accumulation, allowed, "remove the key", "not supported")
    if config.on("amp.enabled"):
        fix = 'remove amp and use "bf16": {"enabled": true} with "zero_optimization": {"stage": 1}'
        yield Refusal("amp.enabled", True, "no such key", fix, "apex amp caches casts of weights across versions")
    if config.on("compile.deepcompile"):
        yield Refusal("compile.deepcompile", True, "false", "write false or remove the key", "not supported yet")
    dtype = config.get("torch_autocast.dtype")
    if config.on("torch_autocast.enabled") and str(dtype).removeprefix("torch.") not in _NAMES["bf16"]:
        why = "with other types every stage would have a loss scale of its own"
        fix = 'write "bfloat16", or use "fp16": {"enabled": true} in place of torch_autocast'
        yield Refusal("torch_autocast.dtype", dtype, '"bfloat16"', fix, why)


def _clipping(config: DeepSpeedJson, block: VPipeConfig) -> Iterator[Refusal]:
    if block.gradient_clipping_scope == "delayed_global" and config.get("zero_optimization.compute_grad_norm") is False:
        why = 'vpipe.gradient_clipping_scope is "delayed_global", which clips by norms'
        yield Refusal("zero_optimization.compute_grad_norm", False, "true", "remove the key", why)


def _profiling(config: DeepSpeedJson, num_stages: int) -> Iterator[Refusal]:
    if config.on("wall_clock_breakdown") and config.get("steps_per_print") is None:
        why = "wall_clock_breakdown prints every so many steps"
        fix = "add the key, or write false for wall_clock_breakdown"
        yield Refusal("steps_per_print", None, "a positive integer next to wall_clock_breakdown", fix, why)
    contiguous = "activation_checkpointing.contiguous_memory_optimization"
    if num_stages > 1 and config.on(contiguous):
        why = "its buffers hold the checkpoints of one micro-batch and the pipeline keeps several in flight"
        yield Refusal(contiguous, True, "false, or one stage", "write false or remove the key", why)


def _pipeline(config: DeepSpeedJson, block: VPipeConfig) -> Iterator[Refusal]:
    for key in ("pipe_partitioned", "grad_partitioned"):
        if config.on(f"pipeline.{key}"):
            why = "activations are sent whole"
            yield Refusal(f"pipeline.{key}", True, "false", "write false or remove the key", why)
    ratio = block.recompute_ratio
    recomputes = any(ratio) if isinstance(ratio, tuple) else ratio == "auto" or ratio > 0
    interval = config.whole("pipeline.activation_checkpoint_interval")
    if interval is not None and interval > 0 and block.virtual_stages > 1:
        why = "vpipe.virtual_stages runs layers part by part"
        fix = "write 0 here and use vpipe.recompute_ratio"
        yield Refusal("pipeline.activation_checkpoint_interval", interval, "0 next to virtual_stages", fix, why)
    elif interval is not None and interval > 0 and recomputes:
        why = "vpipe.recompute_ratio recomputes the same layers"
        fix = "write 0 here, or remove vpipe.recompute_ratio"
        yield Refusal("pipeline.activation_checkpoint_interval", interval, "0 next to recompute_ratio", fix, why)


def _features(config: DeepSpeedJson, asp: bool) -> Iterator[Refusal]:
    for name in ("elasticity", "autotuning", "hybrid_engine"):
        if config.on(f"{name}.enabled"):
            yield Refusal(f"{name}.enabled", True, "false", f"remove {name}", "not supported")
    by_step = (
        "data_efficiency",
        "data_efficiency.data_sampling.curriculum_learning",
        "data_efficiency.data_routing.random_ltd",
        "curriculum_learning",
    )
    for name in by_step:
        if asp and config.on(f"{name}.enabled"):
            why = "what changes with the step would be asked for ahead of the step that it is for"
            fix = f'remove {name.rpartition(".")[2]}, or write "bsp" for vpipe.sync_mode'
            yield Refusal(f"{name}.enabled", True, 'false in "asp"', fix, why)
    if asp and config.on("expert_parallel.enabled"):
        why = "experts are reduced over ranks of several stages"
        fix = 'remove expert_parallel, or write "bsp" for vpipe.sync_mode'
        yield Refusal("expert_parallel.enabled", True, 'false in "asp"', fix, why)
    for key in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
        size = config.whole(key)
        if size is not None and size > 1:
            why = "stages are parallel over layers and data only"
            yield Refusal(key, size, "1", "remove the key and use more stages or replicas", why)
    managed = config.get("managed_gradient_accumulation")
    if managed is False:
        why = "the schedule decides when a stage updates"
        yield Refusal("managed_gradient_accumulation", managed, "true", "write true or remove the key", why)


def _checkpoints(config: DeepSpeedJson, num_stages: int) -> Iterator[Refusal]:
    why = "a folder is renamed when it is complete, and such a writer goes on afterwards"
    if config.on("checkpoint.writer.decoupled"):
        yield Refusal("checkpoint.writer.decoupled", True, "false", "write false or remove checkpoint.writer", why)
    datastates = config.content.get("datastates_ckpt", False)
    if datastates is not False:
        yield Refusal("datastates_ckpt", datastates, "no such key", "remove the key", why)
    if config.on("zero_optimization.elastic_checkpoint"):
        why = "DeepSpeed's optimizer writes checkpoints with it that it cannot load"
        fix = "remove the key; checkpoints load with other numbers of replicas without it"
        yield Refusal("zero_optimization.elastic_checkpoint", True, "false", fix, why)
    if num_stages > 1 and config.on("checkpoint.use_node_local_storage"):
        why = "one rank per machine would write the states of all stages on it"
        yield Refusal("checkpoint.use_node_local_storage", True, "false", "write false or remove the key", why)

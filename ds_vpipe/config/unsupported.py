"""DeepSpeed settings that are refused next to a ``"vpipe"`` block.

Most of them would not fail by themselves: they would dead-lock, be ignored, or train something else. Key names
and defaults are those of ``deepspeed/runtime/config.py`` and ``deepspeed/runtime/zero/config.py`` of DeepSpeed
0.19. Values that DeepSpeed itself refuses, such as an ``"auto"`` that nobody filled in, are left to it.
"""

from collections.abc import Iterator

from ds_vpipe.config.block import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.errors import Refusal, raise_first

_NO = "not supported"
_GONE = "DeepSpeed 0.19.8 no longer has it"
_OFF = "write false or remove the key"
_BY_STEP = "what changes with the step would be asked for ahead of the step that it is for"
_RENAMED = "a folder is renamed when it is complete, and such a writer goes on afterwards"
_WHOLE = "activations are sent whole"
_STAGES = "stages are parallel over layers and data only"

Row = tuple[str, bool, str, str, str]
"""A setting: its key, whether it is refused here, the values that work, why the others do not, and a remedy."""


def refuse_unsupported(json: DeepSpeedJson, block: VPipeConfig, num_stages: int) -> None:
    """Refuse settings of the DeepSpeed JSON that do not work with ``block`` on ``num_stages`` stages.

    Raises:
        VPipeConfigError: there is such a setting. One line names the first key, its value, what to put instead, and how
            many more there are.
    """
    rows = [*_zero(json, block), *_precision(json, block), *_features(json, block), *_pipeline(json, block, num_stages)]
    found: dict[str, Refusal] = {}  # one for each path
    for path, refused, allowed, reason, remedy in rows:
        if refused:
            found.setdefault(path, Refusal(path, json.get(path), allowed, remedy, reason))
    raise_first([*found.values()])


def _zero(json: DeepSpeedJson, block: VPipeConfig) -> Iterator[Row]:
    zero = "zero_optimization"
    # DeepSpeed's hooks drop what other replicas keep; it refuses pipelines with them for every number of micro-batches.
    why = "ZeRO-2 reduces gradients inside of a backward pass, before those of micro-batches and tied weights are added"
    yield f"{zero}.stage", json.zero_stage == 2, "0 or 1", why, "use stage 1"
    why = "ZeRO-3 splits weights, of which micro-batches in flight use older versions"
    yield f"{zero}.stage", (json.zero_stage or 0) > 2, "0 or 1", why, "use stage 1"
    why = "ZeRO hands optimizers one flat vector, and SOAP rotates matrices"
    rotates = json.zero_stage == 1 and (json.optimizer or "").lower() == "soap"
    yield f"{zero}.stage", rotates, '0 next to optimizer.type "SOAP"', why, "use stage 0, or another optimizer"
    path = f"{zero}.offload_param.device"
    yield path, json.get(path) not in (None, "none", "auto"), '"none"', _NO, "remove offload_param"
    path = f"{zero}.cpu_offload_param"  # a deprecated flag, which DeepSpeed reads too
    yield path, json.on(path), "false", _NO, "remove the key"
    offload, fix = json.optimizer_offload, 'write "stage": 1 beside it, or remove the key'
    why = "it is ZeRO that offloads, and the weights would stay on the device"
    yield offload or "", offload is not None and json.zero_stage == 0, "an offload with ZeRO-1", why, fix
    path, why = f"{zero}.offload_optimizer.device", "DeepSpeed keeps it in host memory all the same"
    yield path, json.get(path) not in (None, "none", "auto", "cpu"), '"cpu" or "none"', why, 'write "cpu"'
    why = "ZenFlow updates weights outside of the optimizer step"
    yield f"{zero}.zenflow", json.get(f"{zero}.zenflow") is not None, "no such key", why, "remove the key"
    by_norms = block.gradient_clipping_scope == "delayed_global" and not json.on(f"{zero}.compute_grad_norm", True)
    why = 'vpipe.gradient_clipping_scope is "delayed_global", which clips by norms'
    yield f"{zero}.compute_grad_norm", by_norms, "true", why, "remove the key"
    why = "DeepSpeed's optimizer writes checkpoints with it that it cannot load"
    fix = "remove the key; checkpoints load with other numbers of replicas without it"
    yield f"{zero}.elastic_checkpoint", json.on(f"{zero}.elastic_checkpoint"), "false", why, fix


def _precision(json: DeepSpeedJson, block: VPipeConfig) -> Iterator[Row]:
    bf16, fp16 = json.dtype == "bfloat16", json.dtype == "float16"
    path = "data_types.grad_accum_dtype"
    given = json.get(path)
    in_fp32 = json.adds_bf16_in_fp32
    by_zero = json.zero_stage == 1
    why = "DeepSpeed adds gradients in fp32 only with ZeRO-1"
    fix = 'add "zero_optimization": {"stage": 1}, or remove the key'
    yield path, in_fp32 and not by_zero, '"bf16", or "fp32" with ZeRO-1', why, fix
    offloads = in_fp32 and by_zero and json.optimizer_offload is not None
    why = "DeepSpeed adds gradients in fp32 only without offload"
    yield path, offloads, '"bf16"', why, "remove one of the two"
    by_norms = in_fp32 and by_zero and block.gradient_clipping_scope == "delayed_global"
    why = "DeepSpeed's optimizer for it clips by the norm that it has computed itself"
    fix = 'write "stage" for vpipe.gradient_clipping_scope, or remove the key'
    yield path, by_norms and not offloads, '"bf16" next to delayed_global', why, fix
    other = bf16 and not in_fp32 and given not in (None, "bf16", "bfloat16")
    yield path, other, '"bf16" or, with ZeRO-1, "fp32"', _NO, "remove the key"
    yield path, fp16 and given not in (None, "fp16", "float16", "half"), '"fp16"', _NO, "remove the key"
    why = "a checkpoint would give its optimizer states back in 16 bits"
    path, states = "bf16.bf16_master_weights_and_grads", json.on("bf16.bf16_optimizer_states")
    yield path, json.on(path) and not states, 'false, or next to "bf16_optimizer_states": true', why, "remove the key"
    path = "fp16.fp16_master_weights_and_grads"
    yield path, json.on(path), "false", why, "remove the key"
    fix = 'remove amp and use "bf16": {"enabled": true} with "zero_optimization": {"stage": 1}'
    yield "amp.enabled", json.is_set("amp.enabled"), "no such key", _GONE, fix
    other = str(json.get("torch_autocast.dtype")).removeprefix("torch.") not in ("bf16", "bfloat16")
    why = "with other types every stage would have a loss scale of its own"
    fix = 'write "bfloat16", or use "fp16": {"enabled": true} in place of torch_autocast'
    yield "torch_autocast.dtype", json.is_set("torch_autocast.enabled") and other, '"bfloat16"', why, fix


def _features(json: DeepSpeedJson, block: VPipeConfig) -> Iterator[Row]:
    asp = block.sync_mode == "asp"
    yield "compile.deepcompile", json.on("compile.deepcompile"), "false", "not supported yet", _OFF
    path = "elasticity.enabled"
    yield path, json.is_set(path), "no such key", _GONE, "remove elasticity and write the batch sizes"
    yield "autotuning.enabled", json.is_set("autotuning.enabled"), "false", _NO, "remove autotuning"
    yield "hybrid_engine.enabled", json.on("hybrid_engine.enabled"), "false", _NO, "remove hybrid_engine"
    for name, why in (
        ("data_efficiency", _BY_STEP),
        ("expert_parallel", "experts are reduced over ranks of several stages"),
    ):
        fix = f'remove {name.rpartition(".")[2]}, or write "bsp" for vpipe.sync_mode'
        yield f"{name}.enabled", asp and json.is_set(f"{name}.enabled"), 'false in "asp"', why, fix
    path = "curriculum_learning.enabled"
    yield path, json.is_set(path), "no such key", _GONE, "remove curriculum_learning"
    params, adam = json.optimizer_params, (json.optimizer or "").lower() in ("adam", "adamw")
    refused = adam and bool(params.get("amsgrad")) and not params.get("torch_adam")
    why, fix = "DeepSpeed's own Adam does not have it", 'add "torch_adam": true'
    yield "optimizer.params.amsgrad", refused, 'false, or "torch_adam": true beside it', why, fix
    for path in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
        yield path, json.whole(path) > 1, "1", _STAGES, "remove the key and use more stages or replicas"
    managed = "managed_gradient_accumulation"
    why, fix = "the schedule decides when a stage updates", "write true or remove the key"
    yield managed, managed in json.content and not json.is_set(managed), "true", why, fix


def _pipeline(json: DeepSpeedJson, block: VPipeConfig, num_stages: int) -> Iterator[Row]:
    silent = json.on("wall_clock_breakdown") and json.get("steps_per_print") is None
    allowed = "a positive integer next to wall_clock_breakdown"
    fix = "add the key, or write false for wall_clock_breakdown"
    yield "steps_per_print", silent, allowed, "wall_clock_breakdown prints every steps_per_print steps", fix
    why, fix = f"the pipeline has {num_stages}", f"write {num_stages}, or give the pipeline as many stages"
    yield "pipeline.stages", json.stages not in (None, num_stages), str(num_stages), why, fix
    several = num_stages > 1
    late_muon = several and block.sync_mode == "asp" and (json.optimizer or "").lower() == "muon"
    why = "layers need not have the names by which it spares embeddings, and late gradients harm it"
    fix = 'write "SOAP" or "AdamW", or "bsp" for vpipe.sync_mode'
    yield "optimizer.type", late_muon, 'another one in "asp" with several stages', why, fix
    for path, why in (
        ("data_routing.random_ltd", "it counts layers of the whole model, of which a stage has some"),
        ("data_sampling.curriculum_learning", "its sampler takes rank 0 for one of every stage"),
    ):
        fix, path = f"remove {path.rpartition('.')[2]}", f"data_efficiency.{path}.enabled"
        refused = json.is_set(path) and (several or block.sync_mode == "asp")
        yield path, refused, 'false, or one stage in "bsp"', why if several else _BY_STEP, fix
    path = "activation_checkpointing.contiguous_memory_optimization"
    why = "its buffers hold the checkpoints of one micro-batch and the pipeline keeps several in flight"
    yield path, several and json.is_set(path), "false, or one stage", why, _OFF
    for path in ("pipeline.pipe_partitioned", "pipeline.grad_partitioned"):
        yield path, json.is_set(path), "false", _WHOLE, _OFF
    path = "pipeline.activation_checkpoint_interval"
    interval, by_ratio = json.whole(path) > 0, "write 0 here and use vpipe.recompute_ratio"
    virtual, why = block.virtual_stages > 1, "virtual stages run one by one"
    yield path, interval and virtual, "0 next to virtual_stages", why, by_ratio
    why, fix = "vpipe.recompute_ratio recomputes the same layers", "write 0 here, or remove vpipe.recompute_ratio"
    yield path, interval and block.recomputes, "0 next to recompute_ratio", why, fix
    why, fix = "vpipe.swap_ratio keeps what it would compute again", "write 0 here, or remove vpipe.swap_ratio"
    yield path, interval and block.swaps, "0 next to swap_ratio", why, fix
    planned, why = block.leaves_to_planner, "the planner does not know what it computes again"
    yield path, interval and planned, "0 where vpipe leaves something to the planner", why, by_ratio
    # What engine.repartition() refuses too, and a script's settings besides.
    moves, by_zero = several and block.replan.every > 0, json.zero_stage == 1
    why = "next to vpipe.replan layers move, which such stages cannot give away"
    yield path, interval and moves, "0 next to replan", why, by_ratio
    path, fix = "torch_autocast.enabled", "use bf16 in its place, or remove vpipe.replan"
    yield path, moves and by_zero and json.is_set(path), "false next to replan and ZeRO-1", why, fix
    adagrad, fix = (json.optimizer or "").lower() == "adagrad", "use stage 0, or remove vpipe.replan"
    path = "zero_optimization.stage"
    yield path, moves and by_zero and adagrad, '0 next to replan and optimizer.type "Adagrad"', why, fix
    offload, fix = json.optimizer_offload, "remove one of the two"
    yield offload or "", moves and by_zero and offload is not None, "no offload next to replan", why, fix
    path = "checkpoint.writer.decoupled"
    yield path, json.on(path), "false", _RENAMED, "write false or remove checkpoint.writer"
    path, why = "checkpoint.load_universal", "DeepSpeed loads universal checkpoints into the optimizers of ZeRO alone"
    fix = "use stage 1, or load an ordinary checkpoint"
    yield path, json.is_set(path) and json.zero_stage == 0, "false without zero_optimization.stage 1", why, fix
    path = "datastates_ckpt"
    yield path, json.content.get(path, False) is not False, "no such key", _RENAMED, "remove the key"
    path, why = "checkpoint.use_node_local_storage", "one rank per machine would write the states of all stages on it"
    fix = f"{_OFF}, or save_on_each_node, for which Trainer writes it"
    yield path, several and json.is_set(path), "false", why, fix

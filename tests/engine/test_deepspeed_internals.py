"""Private names of DeepSpeed and torch that the engine relies on: all of them are listed, and all of them exist."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import engine as runtime_engine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.pipe import engine as pipe_engine
from deepspeed.runtime.pipe import module as pipe_module
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.distributed import distributed_c10d

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.engine import VPipeEngine
from ds_vpipe.engine.loop.engine import VPipeLoopEngine
from ds_vpipe.engine.modules.interleaved import InterleavedMixin
from ds_vpipe.engine.modules.partitioned import VPipeModule
from ds_vpipe.engine.modules.piece_module import PieceModule
from ds_vpipe.engine.modules.split_module import SplitModule

ROOT = Path(__file__).parents[2]
SUBCLASSES = {
    "PatchedPipelineEngine",
    "VPipeEngine",
    "VPipeLoopEngine",
    "VPipeModule",
    "PieceModule",
    "SplitModule",
    "InterleavedMixin",
}


def own(node: ast.AST) -> str:
    """Name of an attribute of ``self``, if it is private."""
    of_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if of_self and node.attr.startswith("_") and not node.attr.startswith("__") else ""  # type: ignore[attr-defined]


def stored(module: Any) -> set[str]:
    """Private attributes that a module's classes give their objects."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    return {own(node) for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store)} - {""}


OF_OBJECTS = stored(runtime_engine) | stored(pipe_engine) | stored(pipe_module)
"""What DeepSpeed's engines and pipeline modules have from when they are made on."""

# Methods of DeepSpeed's engine and pipeline module that ours replace, and why. Read in DeepSpeed 0.19.8.
HOOKS = {
    "_aggregate_total_loss": "the loss has come with the gradients, not by a collective",
    "_backward_prologue_per_tensor": "received gradients have been divided by M already",
    "_bcast_pipe_scalar": "results of evaluations go from stage to stage, with a time limit",
    "_cast_inputs_half": "inputs of the script are cast, and not what stages hand on",
    "_broadcast_model": "tensors without dimensions cannot be sent as bytes",
    "_build": "layers are built one by one, with their numbers, or are pieces",
    "_build_data_iter": "looping scripts iterate over the data themselves",
    "_common_checkpoint_state": "a checkpoint names the parameters of its states",
    "_configure_basic_optimizer": "apex's optimizers, and LAMB without a GPU",
    "_configure_fp16_optimizer": "no update with zero gradients at the start",
    "_configure_optimizer": "stages without trained parameters; optimizers of the whole model, or after initialize()",
    "_consolidated_16bit_state_dict": "the weights of all stages",
    "_copy_recovery_script": "DeepSpeed's script knows no checkpoints of pipelines",
    "_count_layer_params": "of the pieces of a plain module",
    "_do_optimizer_sanity_check": "the bf16 wrapper that can load its own checkpoints",
    "_exec_schedule": "runs our actions in the place of DeepSpeed's instructions",
    "_get_all_ckpt_names": "brackets in a folder's name are taken for a pattern",
    "_index_tied_modules": "parameters of pieces are tied by themselves",
    "_is_supported_optimizer": "apex's optimizers",
    "_partition_layers": "counts of layers",
    "_reduce_outputs": "outputs of any form",
    "_save_checkpoint": "a failure is kept until all ranks are past DeepSpeed's own waiting",
    "_save_zero_checkpoint": "likewise",
    "_synchronize_tied_weights": "not while they have no values",
    "_take_model_step": "versions, loss scale and tied weights around the step",
}

# Private names that the engine uses, where they are, and why.
USED: dict[str, tuple[Any, str]] = {
    "_C": (torch, "the type that switches __torch_function__ off, and gloo's own classes"),
    "_cdata": (torch.UntypedStorage, "which storage this is, whatever memory it has"),
    "_compiled_call_impl": (torch.nn.Module, "whether a script has compiled its whole model"),
    "_compute_loss": (OF_OBJECTS, "set by PipelineEngine.train_batch() and eval_batch(), read by the forward action"),
    "_curr_ckpt_path": (OF_OBJECTS, "set by DeepSpeedEngine.load_checkpoint(), read when layers are loaded"),
    "_device_types": (torch.distributed.ProcessGroup, "backends of a group that is broken off"),
    "_exec_optimizer_step": (PipelineEngine, "the step with DeepSpeed's timers and events"),
    "_exec_reduce_grads": (PipelineEngine, "reduction over replicas"),
    "_exec_reduce_tied_grads": (PipelineEngine, "reduction of tied weights in bsp"),
    "_foreach_copy_": (torch, "one call for many tensors"),
    "_foreach_mul_": (torch, "likewise"),
    "_foreach_norm": (torch, "likewise"),
    "_global_grad_norm": (OF_OBJECTS, "DeepSpeedEngine: what get_global_grad_norm() returns"),
    "_grid": (OF_OBJECTS, "PipelineModule: the process grid"),
    "_INSTRUCTION_MAP": (PipelineEngine, "a script's own methods for DeepSpeed's instructions are refused"),
    "_get_backend": (torch.distributed.ProcessGroup, "as _device_types"),
    "_get_default_store": (distributed_c10d, "groups are built from the store, never by new_group"),
    "_config": (OF_OBJECTS, "DeepSpeedEngine: has the JSON"),
    "_layer_specs": (OF_OBJECTS, "PipelineModule: layers of other stages"),
    "_local_start": (OF_OBJECTS, "PipelineModule: bounds of this stage's layers"),
    "_local_stop": (OF_OBJECTS, "likewise"),
    "_num_layers": (OF_OBJECTS, "PipelineModule: layers of all stages"),
    "_Options": (torch._C._distributed_c10d.ProcessGroupGloo, "options of a gloo group, without a public name"),
    "_opt_called": (None, "mark of an optimizer that has made a step, for which schedulers of torch look"),
    "_optimizer_step_post_hooks": (None, "torch.optim.Optimizer: a late update would call them once more"),
    "_optimizer_step_pre_hooks": (None, "likewise"),
    "_param_dict": (None, "DeepSpeedConfig: the JSON, where a script builds the engine itself"),
    "_post_accumulate_grad_hooks": (torch.Tensor, "a layer that moves would lose them"),
    "_precompute_checkpointable_values": (PipelineModule, "called again after layers have moved"),
    "_recursive_getattr": (PipelineModule, "attributes of tied layers"),
    "_release_ipc_counter": (torch.UntypedStorage, "memory that was shared to see whether it can be is given back"),
    "_running_engine_backward": (OF_OBJECTS, "DeepSpeedEngine: its hooks take a backward pass for its own"),
    "_new_shared_cuda": (torch.UntypedStorage, "memory of another process's GPU"),
    "_share_cuda_": (torch.UntypedStorage, "likewise"),
    "_set_bounds": (PipelineModule, "layers move to other stages"),
    "_threads": (None, "gloo's options and NCCL's"),
    "_timeout": (None, "gloo's options and NCCL's"),
    "_backward_post_hook": (PipelineEngine, "a new ZeRO optimizer after layers have moved calls it"),
    "_support_torch_style_backward": (OF_OBJECTS, "DeepSpeedEngine: whether it registers that hook"),
    "_swap_data_ptr_": (None, "UntypedStorage, from torch 2.12 on: weights of a version are exchanged"),
    "_is_zerotensor": (torch.Tensor, "zeros of forward-mode differentiation, which have no values in memory"),
    "_autograd": (torch._C, "has the functions below"),
    "_top_saved_tensors_default_hooks": (torch._C._autograd, "those of checkpointing, which count no changes"),
    "_unsafe_set_version_counter": (torch._C._autograd, "a fork makes sure that saved tensors stay"),
    "_update_scale": (FP16_Optimizer, "the loss scale stands still within an update"),
    "_backward_hooks": (torch.nn.Identity(), "a layer with hooks does not move: they would stay behind"),
    "_backward_pre_hooks": (torch.nn.Identity(), "likewise"),
    "_forward_hooks": (torch.nn.Identity(), "likewise"),
    "_forward_pre_hooks": (torch.nn.Identity(), "likewise"),
    "_backward_cls": (None, "autograd node of a torch.autograd.Function"),
    "_disabled_torch_function_impl": (torch._C, "losses of scripts compute ordinary tensors"),
}


def private_names() -> set[str]:
    """Private attributes that the engine reads or writes and no product module defines."""
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("engine", "ds_vpipe")
        for path in (ROOT / folder).rglob("*.py")
    }
    defined, theirs = set[str](), set[str]()  # of subclasses, what DeepSpeed's objects have
    used: defaultdict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in SUBCLASSES:
                theirs |= {own(found) for found in ast.walk(node)} & OF_OBJECTS
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                if own(node) and isinstance(node.ctx, ast.Store):
                    defined.add(node.attr)
                elif path.is_relative_to(ROOT / "engine"):
                    used[node.attr].add(path)
    return (set(used) - defined) | theirs


def test_every_private_name_is_listed_and_exists() -> None:
    assert private_names() == set(USED)
    for name, (owner, _) in USED.items():
        assert owner is None or (name in owner if owner is OF_OBJECTS else hasattr(owner, name)), name


def test_every_replaced_method_is_listed_and_exists() -> None:
    engines, modules = (
        (PatchedPipelineEngine, VPipeEngine, VPipeLoopEngine),
        (VPipeModule, PieceModule, SplitModule, InterleavedMixin),
    )
    assert {kind.__name__ for kind in (*engines, *modules)} == SUBCLASSES
    ours = {
        name
        for kinds, base in ((engines, PipelineEngine), (modules, PipelineModule))
        for kind in kinds
        for name in vars(kind)
        if name.startswith("_") and not name.startswith("__") and name in dir(base) and name not in dir(torch.nn.Module)
    }
    assert ours == set(HOOKS)


def test_the_engine_is_composed_and_not_inherited() -> None:
    names = [kind.__name__ for kind in VPipeEngine.__mro__]
    ours, theirs = names[: names.index("PipelineEngine")], [kind.__name__ for kind in PipelineEngine.__mro__]
    assert (ours, names[len(ours) :]) == (["VPipeEngine", "PatchedPipelineEngine"], theirs)
    assert VPipeLoopEngine.__mro__[1] is VPipeEngine


def test_what_objects_have_only_when_made_exists() -> None:
    from torch._C._distributed_c10d import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    assert hasattr(options, "_threads")
    assert hasattr(options, "_timeout")
    assert DeepSpeedConfig({"train_batch_size": 1})._param_dict == {"train_batch_size": 1}


def test_scripts_beside_a_checkpoint_say_what_reads_it(tmp_path: Path) -> None:
    """DeepSpeed writes two of its own there, which know no pipelines."""
    PatchedPipelineEngine._copy_recovery_script(None, str(tmp_path))  # type: ignore[arg-type]
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        ended = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 1
        assert ended.stderr.startswith(f"{name}: this is a checkpoint of a pipeline; run python -m ds_vpipe.export ")

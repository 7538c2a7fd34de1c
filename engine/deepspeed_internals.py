"""DeepSpeed's pipeline engine, patched and made callable pass by pass; read in DeepSpeed 0.19.8 and torch 2.13.

Everything here relies on private names of DeepSpeed, or mends what is wrong in it for a pipeline whose stages update at
different times. Each entry says why it is there; ``tests/engine/test_deepspeed_internals.py`` lists them.
"""

import glob
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_, itemgetter, methodcaller
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.constants import BFLOAT16, DDP_BFLOAT16
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import nn

from ds_vpipe.checkpoints.stage_layout import PLACEHOLDER
from ds_vpipe.engine.updates.optimizers import OWN_OPTIMIZERS, as_spelled, own_optimizer
from ds_vpipe.engine.updates.parameter_groups import fill, has_trained, listed, trainable
from ds_vpipe.errors import Refusal, VPipeConfigError, VPipeError
from ds_vpipe.staleness.soap import SOAP

_PARAMS, _VALUES = itemgetter("params"), methodcaller("values")
_END = (object(),)  # of a list, so that a longer one differs from it
_TRAIN = nn.Module.train
_PLAIN = (bool, int, float, type(None), torch.Tensor)  # by type: a parameter is none of them
_BUILDING = threading.Lock()  # what _without_handshake() replaces belongs to the process


_RECOVERY_SCRIPT = """\
import sys

sys.exit(f"{sys.argv[0]}: this is a checkpoint of a pipeline; run python -m ds_vpipe.export CHECKPOINT_DIR weights.pt")
"""


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient, also that of an embedding with ``sparse=True``, as links carry it and dense ones are added to it."""
    return gradient.to_dense() if gradient.is_sparse else gradient


class PatchedPipelineEngine(PipelineEngine):
    """DeepSpeed's engine of one stage, with each pass and the update as a call of its own."""

    stage_parameters: tuple[nn.Parameter, ...]  # all parameters of this stage, each once
    trains: bool  # whether the optimizer has a weight to train, on any stage
    lr_kwargs: dict[str, Any] | None = None  # for the learning-rate scheduler of the next update

    def __init__(self, *args: Any, optimizer_grid: Any, left_out: Sequence[torch.Tensor] = (), **kwargs: Any) -> None:
        self._optimizer_grid = optimizer_grid  # which DeepSpeed's constructor needs
        self._left_out = tuple(left_out)  # of the parameters that the script's optimizer was to train
        with _without_handshake():
            super().__init__(*args, **kwargs)
        if self.steps_per_print() is None:
            # The flops profiler has turned it on, and DeepSpeed would ask in every update whether to print the times.
            self._config.wall_clock_breakdown = False
        self.layers_changed()

    # Passes and updates

    def run_forward(self, inputs: Any) -> Any:
        """Forward pass of the stage's module; ``PipelineEngine.forward()`` refuses to be called."""
        if isinstance(self.optimizer, ZeROOptimizer):  # whose hooks on outputs notice a backward pass
            return DeepSpeedEngine.forward(self, inputs)
        with autocast_if_enabled(self):
            return self.module(inputs)

    def as_sent(self, output: Any) -> Any:
        """A stage's output as the next one gets it: its last tensor as bools, if the script has announced a mask."""
        if not (self.has_attention_mask or self.has_bool_tensors) or not isinstance(output, (tuple, list)):
            return output
        return (*output[:-1], output[-1].bool()) if isinstance(output[-1], torch.Tensor) else output

    def run_backward(self, loss: torch.Tensor) -> None:
        """Backward pass from the loss, on the last stage."""
        DeepSpeedEngine.backward(self, loss)

    def run_backward_from(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Backward pass from received gradients, None for outputs that were not used; DeepSpeed has no such method."""
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
        self._running_engine_backward = True  # DeepSpeed's hooks take it for engine.backward()
        if self.using_bf16_optimizer:
            self.optimizer.clear_lp_grads()  # it adds them up in fp32, and on the last stage does this by itself
        try:
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        finally:
            self._running_engine_backward = False
        if self.using_bf16_optimizer:
            self.optimizer.update_hp_grads()

    def reduce_gradients(self, *, together: bool) -> None:
        """Average gradients over replicas, and add those of tied weights over stages that update ``together``."""
        present = chain(*map(_PARAMS, self.basic_optimizer.param_groups), _END)
        if not all(map(is_, present, self._trained)):  # without a line of Python for each: there may be hundreds
            self._look_for_added()
        if any(parameter.grad is not None for parameter in self._left_out):
            self._refuse_left_out()
        if together and self.module.tied_comms:
            for weight, _ in self.module.get_tied_weights_and_groups():
                if weight.grad is None and not self.using_bf16_optimizer:
                    weight.grad = torch.zeros_like(weight)  # DeepSpeed would leave it out, and the other stages wait
            self._exec_reduce_tied_grads()
        # Zeros where there is no gradient: ZeRO-1 leaves such weights out, and replicas would add those of others.
        for parameter in () if self.using_bf16_optimizer else self.stage_parameters:
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        if getattr(self.optimizer, "cpu_offload", False):
            self._drop_offloaded_gradients()
        if self.is_data_parallel or self.zero_optimization():
            self._exec_reduce_grads()

    def _drop_offloaded_gradients(self) -> None:
        """Drop the last gradients that frozen weights had, by which DeepSpeed would go on to update them."""
        partitions = self.optimizer.single_partition_of_fp32_groups
        for weights, partition in zip(self.optimizer.bit16_groups, partitions, strict=True):
            if not all(weight.requires_grad for weight in weights):
                partition.grad.zero_()

    def take_gradient(self, weight: nn.Parameter) -> torch.Tensor | None:
        """Remove and return a weight's gradient of this batch: another stage updates the weight."""
        if self.using_bf16_optimizer:
            added = self._added_in_fp32(weight)
            gradient = added.clone()  # it is still being sent when the next one is added
            added.zero_()
            return gradient
        found, weight.grad = weight.grad, None
        return found if found is None else _dense(found)

    def add_gradient(self, weight: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add another stage's gradient to a weight's of this batch."""
        if self.using_bf16_optimizer:
            self._added_in_fp32(weight).add_(gradient)
        else:
            weight.grad = gradient.clone() if weight.grad is None else _dense(weight.grad).add_(gradient)

    def _added_in_fp32(self, weight: nn.Parameter) -> torch.Tensor:
        optimizer = self.optimizer
        members = [(i, j, member) for i, group in enumerate(optimizer.bf16_groups) for j, member in enumerate(group)]
        group, index = next((i, j) for i, j, member in members if member is weight)
        optimizer.fp32_groups_has_gradients[group][index] = True
        gradient: torch.Tensor = optimizer.fp32_groups_gradients[group][index].view_as(weight)
        return gradient

    def run_update(self) -> None:
        """Optimizer step with DeepSpeed's timers and events; calls :meth:`_take_model_step`."""
        self._exec_optimizer_step(self.lr_kwargs)

    # Parameters, groups and files

    def layers_changed(self) -> None:
        """Record the parameters of the present layers.

        To look for them takes longer than everything else that an engine does in a batch with hundreds of them.
        """
        self.stage_parameters = tuple(self.module.parameters())
        self._note_places()
        self.note_parameters()

    def _note_places(self) -> None:
        places = [part._parameters for part in self.module.modules() if part._parameters]
        self._views = [place.values() for place in places if isinstance(place, dict)]  # which show what is there later
        self._scripted = [place for place in places if not isinstance(place, dict)]  # of torch.jit: lists of the moment
        self._placed = tuple(chain(*self._views, *map(_VALUES, self._scripted), _END))

    def refuse_replaced(self) -> None:
        """Refuse what a script has put in the place of parameters: the optimizer would go on with those."""
        present = chain(chain.from_iterable(self._views), *map(_VALUES, self._scripted), _END)
        if not all(map(is_, present, self._placed)):  # without a line of Python for each
            self._look_for_replaced()

    def _look_for_replaced(self) -> None:
        there = set(map(id, self.module.parameters()))
        for parameter in self.stage_parameters:
            if parameter.requires_grad and id(parameter) not in there:
                name, reason = self.param_names.get(parameter, "a parameter"), "nothing would train it"
                allowed, remedy = "the one of initialize()", "write into that, as load_state_dict() does without assign"
                raise Refusal(
                    "engine.module", f"another parameter, or none, for {name}", allowed, remedy, reason
                ).error()
        self._note_places()  # as with a parametrization, which has put them elsewhere

    def note_parameters(self) -> None:
        """Take the optimizer's and the stage's present parameters for those that it may train."""
        groups = () if self.basic_optimizer is None else self.basic_optimizer.param_groups
        members = chain(() if self._is_wrapped else self.stage_parameters, *(group["params"] for group in groups))
        self._known_parameters = {id(parameter): parameter for parameter in members}
        self._trained = tuple(chain(*map(_PARAMS, groups), _END))

    @property
    def _is_wrapped(self) -> bool:
        """Whether the optimizer trains copies, of those weights alone that it was made with."""
        return self.optimizer is not self.basic_optimizer

    def _look_for_added(self) -> None:
        """Refuse what has come into the optimizer: it has no versions, and its gradients would add up."""
        present = tuple(chain(*map(_PARAMS, self.basic_optimizer.param_groups), _END))
        added = next((one for one in present[:-1] if id(one) not in self._known_parameters), None)
        if added is None:  # they are in another order, or fewer
            self._trained = present
            return
        name = next((name for name, parameter in self.module.named_parameters() if parameter is added), None)
        allowed = "those that the stage's layers had after initialize()"
        remedy = "let the layer have it before, with requires_grad=False if it is to be trained later"
        if self._is_wrapped:
            allowed = "those that it had after initialize(), next to ZeRO, bf16 and fp16"
            remedy = "let it have the parameter before, or train in fp32 without ZeRO"
        given = name or f"a parameter of shape {list(added.shape)}"
        raise Refusal("optimizer.param_groups", given, allowed, remedy, "it has come since").error()

    def _refuse_left_out(self) -> None:
        """Refuse gradients of parameters that are in no layer here, such as one that a function among them uses.

        They have neither versions nor a name in checkpoints. A layer may have come here meanwhile, with its own.
        """
        mine = set(map(id, self.stage_parameters))
        others = (p for p in self._left_out if p.grad is not None and id(p) not in mine)
        if (other := next(others, None)) is not None:
            given = f"a parameter of shape {list(other.shape)} that has a gradient and is in no layer of this stage"
            raise Refusal("optimizer", given, "parameters of layers", "register it in the layer that uses it").error()

    def name_parameters(self) -> None:
        """Give the optimizer the names of its parameters, if it has names."""
        for group in self.basic_optimizer.param_groups:
            if "param_names" in group:
                group["param_names"] = [self.param_names[parameter] for parameter in group["params"]]

    def __setattr__(self, name: str, value: Any) -> None:
        # An engine is a module, whose attributes are looked through for parameters; a count or a loss is none.
        if type(value) in _PLAIN and name in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.stage_parameters:
            parameter.grad = None

    def destroy(self) -> None:
        """As DeepSpeed's, also where a script has added groups of parameters to the optimizer."""
        base = getattr(self, "basic_optimizer", None)
        if base is None or "_known_parameters" not in self.__dict__:  # building it has failed
            super().destroy()
            return
        known = [group for group in base.param_groups if any(id(p) in self._known_parameters for p in group["params"])]
        with patch.object(base, "param_groups", known):  # ZeRO's has a vector for each of those that it was made with
            super().destroy()

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> Any:
        """Files of ranks in any folder, such as ``lr=[0.1]``; DeepSpeed reads its name as a glob pattern."""
        return super()._get_all_ckpt_names(glob.escape(checkpoints_path), glob.escape(tag))

    def _copy_recovery_script(self, save_path: str) -> None:
        # DeepSpeed's own know no checkpoints of pipelines, and end in an AttributeError.
        for name in ("zero_to_fp32.py", "zero_to_torch.py"):
            Path(save_path, name).write_text(_RECOVERY_SCRIPT, encoding="utf-8")

    def fill_groups(self) -> None:
        """Zero gradients for groups of an fp16 optimizer without any; stages sum norms by group, and would wait."""
        if isinstance(self.optimizer, FP16_UnfusedOptimizer):
            for group in self.optimizer.fp16_groups:
                if all(parameter.grad is None for parameter in group):
                    group[0].grad = torch.zeros_like(group[0])

    def train_others(self, groups: Sequence[list[nn.Parameter]]) -> None:
        """Let the optimizer train other parameters, frozen ones among them; its groups stay, one for each list.

        The base optimizer stays the same object, which a learning-rate scheduler or the script may refer to.
        """
        self.param_names = {parameter: name for name, parameter in self.module.named_parameters()}
        base = self.basic_optimizer
        if hasattr(self.optimizer, "destroy"):
            self.optimizer.destroy()  # a wrapper with hooks on parameters
        base.state.clear()
        for group, members in zip(base.param_groups, groups, strict=True):
            group["params"] = list(members) or [self.placeholder()]
        self.name_parameters()
        # Wrappers leave out what is frozen when they are made; a script may unfreeze it later.
        frozen = [parameter for members in groups for parameter in members if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        trains = self.trains
        PatchedPipelineEngine._configure_optimizer(self, base, [])
        self.trains = trains  # of all stages: this one may have nothing to train now
        for parameter in frozen:
            parameter.requires_grad_(False)
        self.note_parameters()
        if self._support_torch_style_backward:
            self.optimizer.register_grad_acc_post_hook(self._backward_post_hook)

    # What DeepSpeed's own code asks of its methods

    def _backward_prologue_per_tensor(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        # DeepSpeed would divide a gradient that enters a graph by M; those that arrive here have been divided.
        return grad

    def _broadcast_model(self) -> None:
        # DeepSpeed sends parameters viewed as bytes. Those without dimensions or in another order have no such view,
        # and gloo sends those with gaps as if they had none.
        # Of the values, as a script may have put attributes on parameters: GPT-NeoX sets `stride` on its biases.
        given = [(parameter, parameter.data) for parameter in self.module.parameters()]
        others = [(p, data) for p, data in given if data.dim() == 0 or data.stride(-1) != 1 or not data.is_contiguous()]
        for parameter, values in others:
            parameter.data = values.reshape(-1)
        super()._broadcast_model()
        for parameter, values in others:
            values.copy_(parameter.data.view(values.shape))
            parameter.data = values

    def placeholder(self) -> nn.Parameter:
        """A parameter for an optimizer that would have none: a matrix, as torch's Muon takes nothing else."""
        found = nn.Parameter(torch.zeros(1, 1, dtype=self.get_data_types()[0], device=self.device))
        # A script's function that makes optimizers may read what it has put on parameters, such as names.
        first = vars(next(self.module.parameters(), found))
        vars(found).update({name: value for name, value in first.items() if isinstance(value, str)})
        vars(found)["use_muon"] = False  # DeepSpeed's Muon asks each; Adam updates this one
        self.param_names[found] = PLACEHOLDER
        return found

    def zero_ignore_unused_parameters(self) -> bool:
        # Only the norm of an offload asks, which would take frozen weights for unused ones. Those have zeros here.
        return True

    def _is_supported_optimizer(self, optimizer_name: str) -> bool:
        return as_spelled(optimizer_name) in OWN_OPTIMIZERS or bool(super()._is_supported_optimizer(optimizer_name))

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        # Wrappers take no group with nothing to train, and reduce their norms group by group; see fill_groups().
        wraps = self.get_data_types()[0] != torch.float32 or self.zero_optimization()
        given = client_optimizer.param_groups if isinstance(client_optimizer, torch.optim.Optimizer) else None
        self.trains = has_trained(listed(model_parameters) or [] if given is None else given, self.module.parameters())
        if isinstance(client_optimizer, torch.optim.Optimizer):
            fill(client_optimizer, self.placeholder, each_group=wraps)
        else:
            model_parameters = trainable(listed(model_parameters) or [], self.placeholder, each_group=wraps)
        with patch.object(self, "mpu", self._optimizer_grid):
            super()._configure_optimizer(client_optimizer, model_parameters)
        if isinstance(self.optimizer, BF16_Optimizer):
            self.optimizer.get_grads_for_norm = partial(self._normed, self.optimizer.get_grads_for_norm)

    def _normed(self, theirs: Callable[..., Any], for_clipping: bool = False) -> Any:
        """Tensors of a stage's norm, one at least, which torch needs: all may be frozen or tied copies."""
        found = theirs(for_clipping)
        tensors = found if for_clipping else found[0]
        if not tensors:
            tensors.append(torch.zeros(1, device=self.device))
        return found

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> torch.optim.Optimizer:
        params = dict(self.optimizer_params() or {})
        optimizer = own_optimizer(self.optimizer_name(), params, model_parameters, self.zero_use_cpu_optimizer())
        return super()._configure_basic_optimizer(model_parameters) if optimizer is None else optimizer

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        # Of the script; the JSON's has been refused.
        if isinstance(basic_optimizer, SOAP) and self.zero_optimization():
            raise VPipeConfigError(
                f"zero_optimization.stage: got {self.zero_optimization_stage()} with the script's SOAP, allowed is 0, "
                f"as ZeRO hands optimizers one flat vector and SOAP rotates matrices; use stage 0, or another optimizer"
            )
        wrapper = super()._do_optimizer_sanity_check(basic_optimizer)
        if wrapper == BFLOAT16 and not self.zero_optimization():
            # What DeepSpeed takes in pipelines cannot load its own checkpoints; this is what it takes elsewhere.
            return DDP_BFLOAT16
        return wrapper

    def _configure_fp16_optimizer(self, optimizer: torch.optim.Optimizer, low_precision_dtype: torch.dtype) -> Any:
        # DeepSpeed makes the optimizer's state by an update with zero gradients, which applies weight decay and
        # counts in Adam's bias correction. The state makes itself at the first real update.
        with patch.object(optimizer, "step", lambda *args, **kwargs: None):
            wrapped = super()._configure_fp16_optimizer(optimizer, low_precision_dtype)
        for name in ("fused_adam_legacy", "fused_lamb_legacy"):
            # These hand gradients to a kernel of DeepSpeed's: Adam's takes none any more, LAMB's none in bf16, and
            # whatever else looks at weights' gradients before an update, such as NAdam's direction, would find none.
            if hasattr(wrapped, name):
                setattr(wrapped, name, False)
        # States that an optimizer has from the start, as Adagrad, are of weights that have copies in fp32 now: they
        # are made anew, and those that are left could not be saved.
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in [one for one in optimizer.state if id(one) not in trained]:
            del optimizer.state[parameter]
        return wrapped


def refuse_own_instructions(engine: PipelineEngine) -> None:
    """Refuse what a script has put in the place of DeepSpeed's instructions, which the executor's actions replace.

    Instructions of the script's own are only in schedules of its own, which are refused too.
    """
    for instruction, method in engine._INSTRUCTION_MAP.items():
        # Not its __module__, which functools.wraps() takes from what it wraps.
        modules = instruction.__module__, getattr(method, "__globals__", {}).get("__name__", type(method).__module__)
        if modules[0] == ds_schedule.__name__ and modules[1] != PipelineEngine.__module__:
            raise VPipeConfigError(
                f"_INSTRUCTION_MAP[{instruction.__name__}]: got {getattr(method, '__qualname__', method)} of "
                f"{modules[1]}, allowed with a vpipe block is DeepSpeed's own method, as actions take the place of "
                f"instructions; leave the entry as it is, or remove the block"
            )


def own_schedule(schedule: ds_schedule.PipeSchedule, micro_batches: int) -> VPipeError:
    """The refusal of a schedule of the script's own, or of another number than ``micro_batches``."""
    kind = type(schedule)
    if kind is not ds_schedule.TrainSchedule:
        return VPipeConfigError(
            f"_exec_schedule(): got a {kind.__qualname__} of {kind.__module__}, allowed are DeepSpeed's own "
            f"TrainSchedule and InferenceSchedule, which stand for vpipe.schedule; leave the other one out, or remove "
            f"the vpipe block"
        )
    return VPipeError(
        f"engine.micro_batches: got {schedule.micro_batches} in training, allowed is {micro_batches} as at the start; "
        f"call engine.set_train_batch_size() to change it"
    )


class StageLocalGrid:
    """The process grid, for optimizers of an asynchronous pipeline.

    DeepSpeed's wrappers reduce overflow flags and gradient norms over the model-parallel group, which
    spans all stages of a pipeline. Stages reach an update at different times, so such a collective would
    make every stage wait for every other, or dead-lock. Here that group is the stage's tensor-parallel
    slice; everything else, rank and size of the model-parallel group among it (they name checkpoint
    files), is the grid's own.
    """

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        if name == "_grid":  # not there yet, while a copy is being made
            raise AttributeError(name)
        return getattr(self._grid, name)

    def get_model_parallel_group(self) -> Any:
        """The ranks that hold slices of this stage's tensors."""
        return self._grid.get_slice_parallel_group()


@contextmanager
def _without_handshake() -> Iterator[None]:
    """Let this thread build an engine that sends nothing to its neighbours; others send as ever.

    ``PipelineEngine`` sends a number to its neighbours when it is built, over the default group. Our engine has links
    of its own: the exchange would only make NCCL build communicators that nobody uses, and where stages compute on
    accelerators but the default group is gloo it fails.
    """
    me = threading.get_ident()

    def unless_building(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return None if threading.get_ident() == me else function(*args, **kwargs)

        return call

    with _BUILDING:
        kept = p2p.send, p2p.recv
        p2p.send, p2p.recv = map(unless_building, kept)
        try:
            yield
        finally:
            p2p.send, p2p.recv = kept


def end_workers(loader: Any) -> None:
    """Worker processes of DeepSpeed's data loader, ended as they end themselves.

    A generator in the loader's ``data``, with a curriculum its ``data_iterator`` (DeepSpeed 0.19.8), keeps them for as
    long as the engine, which is until the end of the interpreter, where they would be killed and leave sockets behind.
    """
    loader = getattr(loader, "loader", loader)  # a PipelineEngine's is a RepeatingLoader
    if isinstance(loader, DeepSpeedDataLoader):
        loader.data = loader.data_iterator = None


@contextmanager
def training_at_less_cost(module: nn.Module) -> Iterator[None]:
    """Inside, the next ``module.train()`` sets the mode of those modules only that have another one.

    Those that override ``train()`` are asked. Before and afterwards the module can be copied and pickled.
    """

    def train(mode: bool = True) -> nn.Module:
        vars(module).pop("train", None)
        left: list[Any] = [module]  # which grows meanwhile, also by what a script has added since the last batch
        for part in left:
            own = part.__dict__  # to ask the module itself takes longer; those of torch.jit have no mode in it
            if type(part).train is not _TRAIN or "train" in own or "training" not in own:
                part.train(mode)
                continue
            if own["training"] is not mode:
                part.training = mode
            if own["_modules"]:  # of most there is nothing to look through
                left += [child for child in own["_modules"].values() if child is not None]
        return module

    vars(module).setdefault("train", train)  # unless the script has put one there
    try:
        yield
    finally:
        if vars(module).get("train") is train:
            del vars(module)["train"]

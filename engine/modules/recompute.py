"""Recomputation of the last layers of a stage in the backward pass, by ratio.

The last ``int(ratio * n)`` of a stage's ``n`` layers form one checkpointed segment, whose activations are not kept
between forward and backward pass. Checkpointing is non-reentrant, which works with integer inputs and therefore on the
first stage too, and restores random states. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016);
the ratio per stage is vPipe's (TPDS 2021).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.utils import set_random_seed
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError, checkpoint

from ds_vpipe.engine.links.consensus import Consensus
from ds_vpipe.engine.links.message import map_tree
from ds_vpipe.engine.links.tensor_bytes import copied_to
from ds_vpipe.engine.modules.piece_module import TIMED, PieceModule
from ds_vpipe.engine.modules.random_states import RandomStates
from ds_vpipe.engine.modules.run_again import Anew, ModuleMemory, OutputCheck, changed_meanwhile
from ds_vpipe.engine.modules.saved_tensors import RecomputedCounts, allowing_hooks
from ds_vpipe.engine.modules.swap import Swap
from ds_vpipe.errors import Refusal, VPipeError
from ds_vpipe.splitting.checkpointed import followed
from ds_vpipe.splitting.parameter_slots import memory
from ds_vpipe.splitting.stage_model import Piece

_RUN = "_vpipe_run"
"""Name of a module's attribute: the function that runs its layers, in the place of DeepSpeed's forward."""


def recomputed_layers(ratio: float, num_layers: int) -> int:
    """Number of recomputed layers of a stage, which are its last ones."""
    return int(ratio * num_layers)


class Segment:
    """Part of the model, with recomputed last and swapped first layers.

    Of micro-batches 1, 2, 4, 8 and so on the outputs are compared with those of their recomputation: what torch cannot
    restore, such as unregistered random states, would give wrong gradients, and a script may begin with it at any time.
    Bit for bit on CPUs; on other devices, where sums may be taken in any order, up to a small part of the norm.

    Args:
        start: where the part begins in ``forward_funcs``.
        stop: where it ends.
        ratio: of its layers that are recomputed.
        random_states: besides torch's.
        swap_ratio: of its layers that are swapped, as far as they are not recomputed.
        swap: moves what they save, if any.
        stashed: whether layers run again with the weights of their forward pass; if not, only the first micro-batch is
            compared, which no update comes between.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        ratio: float,
        random_states: RandomStates,
        swap_ratio: float = 0.0,
        swap: Swap | None = None,
        stashed: bool = True,
    ) -> None:
        self.start, self.first, self.stop = start, stop - recomputed_layers(ratio, stop - start), stop
        self.swapped = min(start + int(swap_ratio * (stop - start)), self.first)
        self._swap = swap
        self._random_states = random_states
        self._passes, self._due = 0, 1.0  # micro-batches in training mode, and which of them is compared next
        self._stashed = stashed
        self._check: weakref.ref[OutputCheck] | None = None
        self._memory: ModuleMemory | None = None
        self._knows_modules = True  # else there may be some that other pieces of a plain model run, and change

    def run_part(self, module: PipelineModule, inputs: Any, seed_offset: int) -> Any:
        """Run all layers of the part, which ``module`` has."""
        swapped, recomputed = (self.start, self.swapped), (self.first, self.stop)
        portions = [run for run in (swapped, (self.swapped, self.first), recomputed) if run[0] < run[1]]
        value = inputs
        for number in module.in_portions(portions) if isinstance(module, PieceModule) else range(len(portions)):
            start, stop = portions[number]
            if start == self.first and torch.is_grad_enabled():
                value = self._run_recomputed(module, value, seed_offset)
            elif start < self.swapped and self._swap is not None:
                value = self._swap.run(partial(_run, module, start, stop, seed_offset), value)
            else:
                value = _run(module, start, stop, seed_offset, value)
        return value

    def _run_recomputed(self, module: PipelineModule, inputs: Any, seed_offset: int) -> Any:
        if self._memory is None:
            numbers = module.stage_model.numbers if isinstance(module, PieceModule) else None
            self._memory = ModuleMemory(self._modules(module), numbers=numbers)
            self._knows_modules = numbers is None
        states, remembered = self._random_states.read(), self._memory.read()
        remembering = partial(self._memory.as_remembered, remembered, self._knows_modules)
        check = self._due_check(module)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            counts = RecomputedCounts()
            return counts.of_forward(), Anew(partial(self._as_before, states, remembering, counts))

        def checkpointed(function: Callable[[Any], Any], value: Any) -> Any:
            def run(value: Any) -> Any:  # the first layer may work in place, but not on the input that is kept
                own = alias_free(value)
                with _refuse_shared_writes(value, own):
                    return function(own)

            return checkpoint(
                run if check is None else partial(check.run, run),
                value,
                use_reentrant=False,
                preserve_rng_state=True,
                context_fn=contexts,
                # Else torch ends within the last operation that saves, before it has filled what it saves: the noise
                # of nn.RReLU. And there would be no output to compare.
                early_stop=False,
            )

        with allowing_hooks("vpipe.recompute_ratio"):
            if isinstance(module, PieceModule):
                outputs = module.run_several(self.first, self.stop, inputs, checkpointed)
            else:
                outputs = checkpointed(partial(_run, module, self.first, self.stop, seed_offset), inputs)
        self._memory.note_changes(remembered, module.training)
        return outputs

    @contextmanager
    def _as_before(
        self, states: Any, remembering: Callable[[], AbstractContextManager[None]], counts: RecomputedCounts
    ) -> Iterator[None]:
        with self._random_states.of(states), remembering(), counts.of_recomputation():
            yield

    def _modules(self, module: PipelineModule) -> list[torch.nn.Module]:
        if isinstance(module, PieceModule):
            return list(module.user_module.modules())
        layers = module.forward_funcs[self.first : self.stop]
        return [part for layer in layers if isinstance(layer, torch.nn.Module) for part in layer.modules()]

    def _due_check(self, module: PipelineModule) -> OutputCheck | None:
        """A check of this pass's output, if one is due in training mode and no other is under way."""
        self._passes += module.training
        if self._passes < self._due or not module.training or (self._check is not None and self._check() is not None):
            return None
        check = OutputCheck(partial(self._compare, module))
        self._check = weakref.ref(check)
        return check

    def _compare(self, module: PipelineModule, difference: float) -> None:
        """Refuse a recomputation whose outputs differ by this part of their norm."""
        self._due, self._check = 2 * self._due if self._stashed else math.inf, None
        if difference == 0.0:
            return
        numbers = layer_numbers(module)[self.first : self.stop]
        names = [layer_name(layer) for layer in module.forward_funcs[self.first : self.stop]]
        raise VPipeError(
            f"vpipe.recompute_ratio: got layers {numbers[0]} to {numbers[-1]} ({names[0]} to {names[-1]}) with another "
            f"output when they are run again in the backward pass ({difference:.1e} of its norm), allowed are layers "
            f"that compute the same twice; register random states that torch does not know with "
            f"engine.register_random_state(name, get, put), call engine.quiesce() before the script sets other threads "
            f"or kernels, or write 0 for this stage"
        )


def layer_name(layer: Any) -> str:
    """Name of a layer's class or function; a piece's kind."""
    return layer.kind if isinstance(layer, Piece) else str(getattr(layer, "__name__", type(layer).__name__))


@contextmanager
def backward_errors() -> Iterator[None]:
    """Errors of a backward pass, in one line each, as VPipeErrors."""
    try:
        yield
    except CheckpointError as error:
        raise _recomputed_differently(error) from error
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise VPipeError(changed_meanwhile(f"a tensor ({str(error).partition('. Hint')[0]})")) from error
        raise


def _recomputed_differently(error: CheckpointError) -> VPipeError:
    reason = str(error).splitlines()[0].removeprefix("torch.utils.checkpoint: ").rstrip(".")
    return VPipeError(
        f"vpipe.recompute_ratio: got layers that go another way when they are run again in the backward pass "
        f"({reason}), allowed are layers that compute the same twice; let no branch depend on what changes between "
        f"forward and backward pass, or write 0 for this stage"
    )


def apply_recompute(module: PipelineModule, segment: Segment) -> None:
    """Set up recomputation and swap of ``module`` by a segment of all its layers.

    With neither it only runs them, at less cost than DeepSpeed's forward. Once more for other layers or another ratio,
    while nothing is in flight: the forward stays, as the script may have put one of its own around it. One that the
    script had before stays alone.
    """
    idle = segment.first == segment.stop and not segment.swapped

    def run(module: PipelineModule, inputs: Any) -> Any:
        if module.activation_checkpoint_interval > 0:  # by set_checkpoint_interval(), as DeepSpeed has it
            return type(module).forward(module, inputs)
        module.micro_offset += 1
        if idle:  # then layers may come and go
            return _run(module, 0, len(module.forward_funcs), module.micro_offset + 1, inputs)
        return segment.run_part(module, inputs, module.micro_offset + 1)

    is_set_up = _RUN in vars(module)
    by_deepspeed = isinstance(module, PieceModule) or module.activation_checkpoint_interval > 0
    if has_own_forward(module) or (idle and by_deepspeed and not is_set_up):
        return
    vars(module)[_RUN] = run
    if not is_set_up:
        module.forward = MethodType(lambda module, inputs: vars(module)[_RUN](module, inputs), module)


def refuse_own_forward(module: PipelineModule, consensus: Consensus, given: Mapping[str, object]) -> None:
    """Refuse settings that run layers one by one, past a forward of the script's; all ranks call this."""
    found = consensus.any_has(has_own_forward(module), "all ranks to look for a forward of the script's")
    for key, value in given.items() if found else ():
        allowed = "PipelineModule's own forward, whose layers run one by one"
        remedy = "leave the key out, or let a layer do what the forward adds"
        reason = f"the model is a {type(module).__name__} with a forward of the script's"
        raise Refusal(key, value, allowed, remedy, reason).error()


def has_own_forward(module: PipelineModule) -> bool:
    """Whether the script has put a forward in the place of DeepSpeed's, of the class or of the module."""
    if isinstance(module, PieceModule) or _RUN in vars(module):  # which a later one of the script runs
        return False
    return "forward" in vars(module) or type(module).forward is not PipelineModule.forward


class _Copy(torch.autograd.Function):
    """Copy with the strides of the original. Last bits of results may depend on them."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        if value.is_nested or value.is_quantized or value.layout is not torch.strided:
            return value.clone()
        return copied_to(value, value.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def alias_free(value: Any) -> Any:
    """Tensors of a segment's input in memory of their own. One that is there twice stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _Copy.apply(tensor)
        return copies[id(tensor)]

    return map_tree(copy, value)


@contextmanager
def _refuse_shared_writes(value: Any, own: Any) -> Iterator[None]:
    """Context of a pass over ``own``, copies of a segment's inputs ``value``.

    Raises:
        VPipeError: it has changed a copy in place, and the input shares memory with another, which would have changed.
    """
    given, copies = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in (value, own))
    counts = [copy._version for copy in copies]
    yield
    changed = [a for a, b, count in zip(given, copies, counts, strict=True) if b._version != count]
    if any(one is not other and _overlap(one, other) for one in changed for other in given):
        raise VPipeError(
            "vpipe.recompute_ratio: got a first recomputed layer that changes one of two tensors in place which are "
            "views of the same memory, allowed is to compute a new tensor; clone one of them, or write 0 for this stage"
        )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have elements in the same memory."""
    (begin, end), (start, stop) = memory(one), memory(other)
    if max(begin, start) >= min(end, stop):
        return False
    low = min(begin, start)
    places = torch.zeros(max(end, stop) - low, dtype=torch.bool, device="cpu")

    def bytes_of(tensor: torch.Tensor, address: int) -> torch.Tensor:
        size, strides = tensor.element_size(), [tensor.element_size() * stride for stride in tensor.stride()]
        return places.as_strided((*tensor.shape, size), (*strides, 1), address - low)

    bytes_of(one, begin).fill_(True)
    return bool(bytes_of(other, start).any())


def _run(module: PipelineModule, start: int, stop: int, seed_offset: int, value: Any) -> Any:
    if isinstance(module, PieceModule) and start < stop:  # at less cost than one by one
        return module.run_several(start, stop, value)
    numbers, attributes = layer_numbers(module), vars(module)
    timed, layer = attributes.get(TIMED), None

    def of_layer(own_contexts: bool) -> AbstractContextManager[Iterable[torch.nn.Module]]:
        return nullcontext(layer.modules() if isinstance(layer, torch.nn.Module) else ())

    with followed(of_layer):
        for position in range(start, stop):
            attributes["curr_layer"] = numbers[position]  # a module looks through all it has for each attribute
            if module.seed_layers:
                (module.seed_fn or set_random_seed)(module.base_seed * seed_offset + module.curr_layer)
            layer = module.forward_funcs[position]
            value = layer(value) if timed is None else timed.layer(position, layer, value)
    return value


def layer_numbers(module: PipelineModule) -> Sequence[int]:
    """Numbers in the model of the layers in ``module.forward_funcs``."""
    several: Sequence[int] | None = vars(module).get("_vpipe_numbers")
    return range(module._local_start, module._local_start + len(module.forward_funcs)) if several is None else several


def layers_by_number(module: PipelineModule) -> dict[int, Any]:
    """Layers here, functions among them, by their numbers in the model."""
    return dict(zip(layer_numbers(module), module.forward_funcs, strict=True))

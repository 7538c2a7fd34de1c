"""Hooks on a model of which a rank has one stage: whole state dicts, and calls of the model itself."""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from ds_vpipe.splitting.meta_tensor import AccessLog, SplitError


class _OneStageHook:
    """Hook on a model of which a rank has one stage. Copies of the model have the same one."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise SplitError(
            "model: got a whole module to pickle, and this rank has only one stage of it; allowed is "
            "torch.save(model.state_dict(), PATH), with state_dict() on every rank"
        )


class StateHooks(_OneStageHook):
    """Hooks on all modules of a model, which make its state dicts whole.

    ``others`` knows the other stages, see :class:`~ds_vpipe.engine.checkpoint.whole_state.WholeModel`.
    """

    def __init__(self, model: nn.Module, others: Any) -> None:
        self._model, self._others = model, others
        self._originals = weakref.WeakSet(model.modules())
        self._parts = False
        # The module whose state dict is begun, its path here, and its parts now with their prefixes.
        self._outermost: tuple[nn.Module, str, set[tuple[nn.Module, str]]] | None = None
        for path, module in model.named_modules():
            # torch marks what it is given, and methods take no marks
            module.register_state_dict_pre_hook(partial(self._begin, path))
            module.register_state_dict_post_hook(partial(self._end, id(module)))
            module.register_load_state_dict_pre_hook(partial(self._load))
            if "modules_to_save" in getattr(module, "adapter_layer_names", ()):  # PEFT's
                module.adapter_state_dict = _saved_module
        if hasattr(model, "peft_config"):
            vars(model)["save_pretrained"] = partial(_save_adapters, model, model.save_pretrained)

    def own_state(self, read: Callable[[], Any]) -> Any:
        """What ``read`` makes of state dicts, which have this stage's part alone meanwhile."""
        before, self._parts = self._parts, True
        try:
            return read()
        finally:
            self._parts = before

    def _begin(self, path: str, module: nn.Module, prefix: str, _: bool) -> None:
        """A state dict of ``module`` is begun, by itself or as a part of another one."""
        if self._parts or (self._outermost is not None and (module, prefix) in self._outermost[2]):
            return
        named = module.named_modules(remove_duplicate=False)
        self._outermost = module, path, {(part, f"{prefix}{name}.") for name, part in named if name}

    def _end(self, original: int, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """A state dict of ``module`` is there. If it is not a part of another one, it becomes whole.

        All stages have all buffers. Where the names in a copy do not say whose are in use, others are left out.
        """
        if module not in self._originals:
            for key in module._buffers:
                if not self._others.uses_buffer(original, key):
                    state_dict.pop(prefix + key, None)
        if self._parts or self._outermost is None or self._outermost[0] is not module:
            return
        path, self._outermost = self._outermost[1], None
        own = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
        what = f"{type(module).__name__}.state_dict()"
        whole = self._others.complete(path, own, what, module not in self._originals)
        for name in own:
            del state_dict[prefix + name]
        for name in in_order(module, whole):
            state_dict[prefix + name] = whole[name]

    def _load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, facts: dict[str, Any], *_: Any) -> None:
        """``module`` loads its own entries: leave out what this stage has not."""
        if facts.get("assign_to_params_buffers") and module in self._originals:
            raise SplitError(
                "load_state_dict(): got assign=True, allowed is False after initialize(), as the optimizer has the "
                "parameters that are there; leave it out, and pass dict(STATE) of one that was loaded with it before"
            )
        if module is self._model and not self._parts:
            self._others.before_loading()
        for key, parameter in module._parameters.items():
            if parameter is None and key in module.__dict__:  # see parameter_slots
                state_dict.pop(prefix + key, None)


def _saved_module(adapter: str, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Entries that PEFT saves of a module trained whole. It begins a state dict of the module itself for names."""
    prefix = f"modules_to_save.{adapter}."
    return {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}


def _save_adapters(model: nn.Module, save: Any, *args: Any, **kwargs: Any) -> Any:
    """PEFT's ``save_pretrained()``. Without a state dict it asks for the whole one.

    It would write one of this stage's adapters alone as it is: scripts make such of ``named_parameters()``, as in a
    part of theirs for ZeRO-3 that many have in common.
    """
    absent = {
        f"{path}.{key}"
        for path, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is None and key in vars(module) and vars(module)[key].requires_grad  # see parameter_slots
    }
    if absent and absent.isdisjoint(kwargs.get("state_dict") or ()):
        kwargs.pop("state_dict", None)
    return save(*args, **kwargs)


def in_order(module: nn.Module, names: Iterable[str]) -> list[str]:
    """``names`` in the order of the whole ``module.state_dict()``. Others than that has come last."""
    position: dict[str, int] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for key in (*part._parameters, *part._buffers, _EXTRA_STATE_KEY_SUFFIX):
            position[f"{path}.{key}" if path else key] = len(position)
    return sorted(names, key=lambda name: position.get(name, len(position)))


class DirectCalls(_OneStageHook):
    """Forward hook for calls of a model outside its engine, while no pass of ``log`` is going on.

    In ``eval()`` mode or without gradients they are handed to the engine. Others are refused, and calls of copies of
    the model, which have weights of their own.
    """

    def __init__(self, model: nn.Module, log: AccessLog) -> None:
        self._name, self._model, self._log = type(model).__name__, weakref.ref(model), weakref.ref(log)
        self.engine: Callable[[], Callable[..., Any] | None] = lambda: None  # a weak reference, once there is one
        forward = model.forward

        @functools.wraps(forward)
        def run_or_evaluate(*args: Any, **kwargs: Any) -> Any:
            engine = self.engine()
            return forward(*args, **kwargs) if engine is None or self._in_engine() else engine(*args, **kwargs)

        model.forward = run_or_evaluate  # no hook can do so
        model.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, _: Any) -> None:
        here = module is self._model() and self.engine() is not None
        if not self._in_engine() and not (here and not (module.training and torch.is_grad_enabled())):
            raise SplitError(
                f"{self._name}(...): called itself, and this rank has only one stage of it; allowed is engine(...) on "
                f"every rank, with what initialize() returned; to evaluate, in eval() mode or under no_grad, also this"
            )

    def _in_engine(self) -> bool:
        return getattr(self._log(), "forward_pass", None) is not None

"""A call of the user's model on a rank that has only a part of it, where the engine should have been called."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from torch import nn

from ds_vpipe.splitting.absent import SplitError


class _RefuseCall:
    """A hook; copies of the model have the same one."""

    def __init__(self, model: nn.Module, runs: Any) -> None:
        self._name, self._runs = type(model).__name__, weakref.ref(runs)

    def __call__(self, _: nn.Module, __: Any) -> None:
        if not getattr(self._runs(), "running", False):
            raise SplitError(
                f"{self._name}(...): called itself, and this rank has only one stage of it; allowed is engine(...) on "
                f"every rank, with what initialize() returned; in eval() mode or under no_grad to evaluate"
            )

    def __deepcopy__(self, memo: Any) -> _RefuseCall:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise SplitError(
            f"{self._name}: got a whole module to pickle, and this rank has only one stage of it; allowed is "
            f"torch.save(model.state_dict(), PATH), with state_dict() on every rank"
        )


def refuse_calls(model: nn.Module, runs: Any) -> None:
    """Let ``model`` refuse calls from now on, but those during which ``runs.running`` is true.

    Args:
        model: the user's.
        runs: who runs it in pieces; not kept alive, and not copied with the model.
    """
    model.register_forward_pre_hook(_RefuseCall(model, runs))


def refuse_parts(model: nn.Module) -> None:
    """Refuse a model of which only one stage is left.

    Raises:
        SplitError: it is one.
    """
    if any(isinstance(hook, _RefuseCall) for hook in model._forward_pre_hooks.values()):
        raise SplitError(
            f"model: got a {type(model).__name__} of which an earlier initialize() has left one stage here, allowed is "
            f"a whole one; build the model again"
        )

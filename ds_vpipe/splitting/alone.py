"""A call of the user's model on a rank that has only a part of it, where the engine should have been called."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ds_vpipe.splitting.absent import SplitError


def refuse_calls(model: nn.Module, runs: Any) -> None:
    """Let ``model`` refuse calls from now on, but those during which ``runs.running`` is true.

    Args:
        model: the user's.
        runs: who runs it in pieces; not kept alive, and not copied with the model.

    Raises:
        SplitError: by the call.
    """
    who, name = weakref.ref(runs), type(model).__name__

    def refuse(_: nn.Module, __: Any) -> None:
        if not getattr(who(), "running", False):
            raise SplitError(
                f"{name}(...): called itself, and this rank has only one stage of it; allowed is engine(...) on every "
                f"rank, with what initialize() returned; in eval() mode or under no_grad to evaluate"
            )

    model.register_forward_pre_hook(refuse)

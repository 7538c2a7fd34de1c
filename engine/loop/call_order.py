"""The order in which a training script calls its engine: forward, ``backward()``, ``step()``, and again."""

from typing import Any, Literal

import torch

from ds_vpipe.errors import CallOrderError

Call = Literal["engine(...)", "backward()", "step()"]

_NEXT: dict[Call, Call] = {"engine(...)": "backward()", "backward()": "step()", "step()": "engine(...)"}
_REMEDY = (
    "call engine(...), engine.backward(loss) and engine.step() in turn, once for every micro-batch, of which "
    "gradient_accumulation_steps in the DeepSpeed JSON make an update"
)


class CallOrder:
    """Which call is due. Nothing has been done when a wrong one is refused, so that the right one may follow."""

    def __init__(self) -> None:
        self.due: Call = "engine(...)"

    @property
    def between_rounds(self) -> bool:
        """Whether everything handed in has had its backward pass and its step."""
        return self.due == "engine(...)"

    def expect(self, call: Call) -> None:
        """Refuse ``call`` if it is not due."""
        if call == self.due:
            return
        given = "called twice in a row" if self.due == _NEXT[call] else f"called where {self.due} is due"
        note = "; evaluate in eval() mode or under torch.no_grad()" if call == "engine(...)" else ""
        raise CallOrderError(f"{call}: {given}; {_REMEDY}{note}")

    def done(self, call: Call) -> None:
        """``call`` is done; the next one is due."""
        self.due = _NEXT[call]

    def expect_between(self, what: str) -> None:
        """Refuse ``what``, which brings the pipeline to rest, in the middle of a round."""
        if not self.between_rounds:
            raise CallOrderError(f"{what}: called where {self.due} is due; call it after engine.step()")


def check_loss(loss: Any) -> None:
    """Refuse what ``backward()`` cannot start from, as DeepSpeed does."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CallOrderError(
            f"backward(loss): got {given}, allowed is a scalar; pass the loss that engine(...) returned"
        )
    if loss.grad_fn is None:
        raise CallOrderError(
            "backward(loss): got a tensor without a graph, allowed is what engine(...) returned in training; do not "
            "detach it, and call engine.train() before if the engine or the model was in eval() mode"
        )

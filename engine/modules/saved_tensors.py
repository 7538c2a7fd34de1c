"""Hooks for saved tensors: layers that allow none, and changes in place, for which autograd does not look by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from ds_vpipe.errors import VPipeError


def changed_in_place(tensor: torch.Tensor, shape: Sequence[int], saved_at: int) -> RuntimeError:
    """Autograd's error of a saved tensor whose values have changed since."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(shape)}] is at version {tensor._version}; expected version {saved_at} instead"
    )


@contextmanager
def allowing_hooks(key: str) -> Iterator[None]:
    """Context of layers that the block's ``key`` runs under hooks for saved tensors.

    Raises:
        VPipeError: torch does not run them so.
    """
    try:
        yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise VPipeError(
            f"{key}: got layers that torch does not run under hooks for saved tensors ({str(error).splitlines()[0]}), "
            f"allowed are layers without torch.func's grad, vjp, jacrev and hessian; write 0 for this stage"
        ) from error


class RecomputedCounts:
    """Counts of changes in place of what a recomputation saves.

    Checkpointing hands the backward pass what the recomputation has saved, which later layers of the segment may have
    changed in place: autograd's error without checkpointing, and wrong gradients with it. Here it is that error too.
    """

    def __init__(self) -> None:
        self._counts: list[int] = []  # in the order of saving, which is the same in both passes

    @contextmanager
    def of_forward(self) -> Iterator[None]:
        """Context of the forward pass, within the hooks of checkpointing."""
        hooks = _hooks()
        if hooks is None:  # nothing is saved, or autograd looks by itself
            yield
            return
        numbers, (pack, unpack) = count(), hooks

        def unpacked(saved: tuple[int, Any]) -> torch.Tensor:
            number, packed = saved
            tensor: torch.Tensor = unpack(packed)
            if number < len(self._counts) and tensor._version != self._counts[number]:
                raise changed_in_place(tensor, tensor.shape, self._counts[number])
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (next(numbers), pack(tensor)), unpacked):
            yield

    @contextmanager
    def of_recomputation(self) -> Iterator[None]:
        """Context of the recomputation, within the hooks of checkpointing."""
        hooks = _hooks()
        if hooks is None:
            yield
            return
        counts: list[int] = []
        self._counts, (pack, unpack) = counts, hooks

        def counted(tensor: torch.Tensor) -> Any:
            counts.append(tensor._version)
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(counted, unpack):
            yield


def _hooks() -> Any:
    """The innermost pair of hooks for saved tensors, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)

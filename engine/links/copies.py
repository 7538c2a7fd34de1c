"""Values of any form on their way to another rank, and a digest by which ranks compare theirs."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch

from ds_vpipe.engine.links.message import Tree, leaves


def as_bytes(value: Any) -> torch.Tensor:
    """``value``, which may hold tensors, pickled; on the CPU."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def from_bytes(pickled: torch.Tensor, device: torch.device) -> Any:
    """The value that :func:`as_bytes` has pickled; tensors of another rank's device are on ``device``."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(pickled.cpu().numpy().tobytes()), map_location=place, weights_only=False)


def digest(tree: Tree) -> torch.Tensor:
    """32 bytes that follow from types, shapes and values of the tensors in a tree; on the CPU."""
    found = hashlib.sha256()
    for leaf in leaves(tree):
        found.update(repr(None if leaf is None else (leaf.dtype, leaf.shape)).encode())
        if leaf is not None and leaf.numel():
            found.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)

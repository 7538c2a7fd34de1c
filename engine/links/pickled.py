"""Objects as bytes for other ranks, with the tensors in them."""

import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch

from ds_vpipe.engine.links.tensor_bytes import Stored, copied_to

_CPU = torch.device("cpu")


class _Pickler(pickle.Pickler):
    """Pickles tensors without the rest of their memory, such as a message's, in which there are other types, too."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.requires_grad:
            return NotImplemented
        own = Stored.of(value.shape, value.stride()).size(value.dtype)
        if own == value.untyped_storage().nbytes():
            return NotImplemented
        return copied_to(value, value.device).__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def as_bytes(value: Any) -> torch.Tensor:
    """A pickled value, which may hold tensors; on the CPU."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_Pickler))
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def from_bytes(pickled: torch.Tensor, device: torch.device = _CPU) -> Any:
    """The value of :func:`as_bytes`. Tensors of another rank's device are on ``device``."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(pickled.cpu().numpy().tobytes()), map_location=place, weights_only=False)

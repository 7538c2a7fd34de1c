"""Examples of a call of a model's forward, to try out how it can be split."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from ds_vpipe.splitting.call import Call

_SAMPLES, _LENGTH, _MOST, _IMAGE = 2, 8, 8, 224


def as_call(batch: Any) -> Call:
    """A batch as scripts hand it to a model: a dict by keywords, a tuple or list by position, anything else alone."""
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def from_data(data: Any, collate: Callable[[list[Any]], Any] | None = None) -> Call | None:
    """A call with the first samples of a data set; None if it has no samples by index.

    Args:
        data: what ``initialize(training_data=...)`` was given.
        collate: makes a batch of samples; by default as a data loader does.
    """
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or not len(data):
        return None
    samples = [data[index % len(data)] for index in range(_SAMPLES)]
    return as_call((collate or default_collate)(samples))


def own_example(model: nn.Module) -> Call | None:
    """A call with the model's ``dummy_inputs``, as Hugging Face's have them; None if its forward does not take them.

    A class that derives from one of theirs inherits it, whatever its own forward takes.
    """
    inputs = getattr(model, "dummy_inputs", None)
    if not isinstance(inputs, (Mapping, Sequence)) or not len(inputs):
        return None
    call = as_call(inputs)
    return call if takes(model, call) else None


def takes(model: nn.Module, call: Call) -> bool:
    """Whether the signature of the model's forward allows a call; its types are not looked at."""
    try:
        inspect.signature(model.forward).bind(*call[0], **call[1])
    except TypeError:
        return False
    return True


def guesses(model: nn.Module) -> Iterator[Call]:
    """Calls with token indices, int64 zeros [2, 8], for every argument that has to be given.

    If that is one, it may also be a batch of several tensors. Forwards with the names that Hugging Face's models give
    to their inputs may want those by keyword, as encoders with a decoder do, and models of images.
    """
    parameters = inspect.signature(model.forward).parameters
    required = [
        p
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]

    def indices() -> torch.Tensor:
        return torch.zeros(_SAMPLES, _LENGTH, dtype=torch.int64)

    named = {name: indices() for name in ("input_ids", "decoder_input_ids") if name in parameters}
    if "pixel_values" in parameters:
        named["pixel_values"] = _images(getattr(model, "config", None))
    if named and all(p.name in named for p in required):
        yield (), named
    yield tuple(indices() for _ in required), {}
    if len(required) == 1:
        for count in range(2, _MOST + 1):
            yield (tuple(indices() for _ in range(count)),), {}


def _images(config: Any) -> torch.Tensor:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", _IMAGE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.zeros(_SAMPLES, getattr(config, "num_channels", 3), height, width)

"""Random states of a process besides torch's generators, and a stage's own random numbers.

A tracker keeps generator states of its own and lends them to torch for a block of code, so that torch's states do not
include them. DeepSpeed has one; Megatron's is found if it has been imported. Others can be registered.
"""

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing

from ds_vpipe.errors import VPipeError

_MEGATRON = ("megatron.core.tensor_parallel.random", "megatron.mpu.random")
_GLOBAL: Any = np.random  # whose stubs leave out what exchanges its generator
_NUMPY = np.random.MT19937()  # put in the place of the script's: to read and set that one's state takes longer


class RandomStates:
    """The random states besides torch's, by name."""

    def __init__(self) -> None:
        self._registered: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def register(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Add one, as :meth:`.VPipeEngine.register_random_state` describes it. Refused if the name is taken."""
        if name in self._sources():
            raise VPipeError(f"register_random_state({name!r}): got a name that is taken, allowed is another one")
        self._registered[name] = get, put

    def read(self) -> dict[str, Any]:
        """All states."""
        return {name: get() for name, (get, _) in self._sources().items()}

    def put_back(self, states: dict[str, Any]) -> None:
        """Make ``states``, as :meth:`read` returned them, the current ones. What is not in them stays."""
        for name, (_, put) in self._sources().items():
            if states.get(name) is not None:
                put(states[name])

    @contextmanager
    def of(self, states: dict[str, Any]) -> Iterator[None]:
        """Inside, ``states`` are the current ones."""
        now = self.read()
        self.put_back(states)
        try:
            yield
        finally:
            self.put_back(now)

    @contextmanager
    def kept(self, device: torch.device) -> Iterator[None]:
        """Put all states back at the end, torch's of the CPU and of ``device`` too."""
        devices = [device] if device.type == "cuda" else []
        with self.of(self.read()), torch.random.fork_rng(devices=devices, device_type="cuda"):
            yield

    def _sources(self) -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
        return {
            "python": (random.getstate, random.setstate),
            "numpy": (np.random.get_state, np.random.set_state),
            **{name: _of_tracker(tracker) for name, tracker in _trackers().items()},
            **self._registered,
        }


def _trackers() -> dict[str, Any]:
    found: dict[str, Any] = {"tracker": ds_checkpointing.get_cuda_rng_tracker()}
    for name in _MEGATRON:
        tracker_of = getattr(sys.modules.get(name), "get_cuda_rng_tracker", None)
        if tracker_of is not None and all(tracker is not tracker_of() for tracker in found.values()):
            found[name] = tracker_of()
    return found


def _of_tracker(tracker: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    # Trackers may return and take over their own dict; the tensors in it are replaced and not written into.
    return lambda: dict(tracker.get_states()), lambda states: tracker.set_states(dict(states))


@contextmanager
def own_random_numbers(device: torch.device, *place: int | str) -> Iterator[None]:
    """Context in which torch, Python and NumPy draw numbers of their own.

    Those of torch and NumPy follow from torch's state now and from ``place``, Python's from Python's state and from it:
    of a script that seeds torch alone, Python's state is another in every run. Afterwards all states are as before.

    Scripts seed all ranks alike, so that they shuffle alike; stages that drew from that state would have the same
    dropout masks, and would leave it behind in different places. So a stage's passes and updates draw numbers that
    follow from the script's state, the stage, and the samples so far. A checkpoint has to hold no more than the
    script's state, and a script that seeds again, or restores a state, has the numbers that belong to it.
    """
    devices = [device] if device.type == "cuda" else []
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    python, numpy = random.getstate(), _GLOBAL.get_bit_generator()
    found = hashlib.blake2b(repr(place).encode(), digest_size=8)
    for state in states:
        found.update(state.numpy().data)
    seed = int.from_bytes(found.digest(), "little")
    try:
        torch.default_generator.manual_seed(seed)
        for gpu in devices:
            torch.cuda.default_generators[gpu.index].manual_seed(seed)
        random.seed(repr((hash(python[1]), place)))
        _GLOBAL.set_bit_generator(_NUMPY)
        np.random.seed(seed % 2**32)
        yield
    finally:
        torch.set_rng_state(states[0])
        for gpu, state in zip(devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, gpu)
        random.setstate(python)
        _GLOBAL.set_bit_generator(numpy)

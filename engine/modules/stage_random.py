"""Random numbers of a stage's own, apart from the script's.

Scripts seed all ranks alike, so that they shuffle alike; stages that drew from that state would have the same dropout
masks, and would leave it behind in different places. So a stage's passes and updates draw numbers that follow from the
script's state, the stage, and how much has been handed in, and leave the script's state as it was. It is all that a
checkpoint has to hold, and a script that seeds again, or restores a state, has the numbers that belong to it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_GLOBAL: Any = np.random  # whose stubs leave out what exchanges its generator
_NUMPY = np.random.MT19937()  # put in the place of the script's: to read and set that one's state takes longer


@contextmanager
def own_random_numbers(device: torch.device, *place: int | str) -> Iterator[None]:
    """Let torch, on the CPU and on ``device``, Python and NumPy draw numbers of their own.

    They follow from the states of torch and Python now and from ``place``. Afterwards all states are as before.
    """
    devices = [device] if device.type == "cuda" else []
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    python, numpy = random.getstate(), _GLOBAL.get_bit_generator()
    found = hashlib.blake2b(repr((hash(python[1]), place)).encode(), digest_size=8)
    for state in states:
        found.update(state.numpy().data)
    seed = int.from_bytes(found.digest(), "little")
    try:
        torch.default_generator.manual_seed(seed)
        for gpu in devices:
            torch.cuda.default_generators[gpu.index].manual_seed(seed)
        random.seed(seed)
        _GLOBAL.set_bit_generator(_NUMPY)
        np.random.seed(seed % 2**32)
        yield
    finally:
        torch.set_rng_state(states[0])
        for gpu, state in zip(devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, gpu)
        random.setstate(python)
        _GLOBAL.set_bit_generator(numpy)

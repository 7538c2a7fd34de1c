"""Fixtures and hooks shared by all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from forked import Forked
from hypothesis import settings
from worlds import Worlds

# Without a deadline: a loaded machine is no defect.
settings.register_profile("untimed", deadline=None, max_examples=int(os.environ.get("DS_VPIPE_FUZZ_CASES", "100")))
settings.load_profile("untimed")

# torch's store looks up the name of every address that connects, and a query that gets lost takes 5 s otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")

# Long files, the longest first: at the end, one of them would run while other cores have nothing to do.
LONG = [
    "repository", "splitting", "zoo", "test_matrix.py", "test_recovery.py", "test_exactness.py", "test_live_moves.py",
    "test_chaos.py", "test_restarts.py", "test_layer_moves.py", "test_swap_exactness.py", "test_gpt2.py",
    "test_bert_runs.py", "test_converted_runs.py", "test_run.py",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first; skip tests marked ``cuda`` where there is no GPU (only those make this import torch)."""
    items.sort(key=lambda item: min((LONG.index(name) for name in item.path.parts if name in LONG), default=len(LONG)))
    marked = [item for item in items if item.get_closest_marker("cuda") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are imported, and then none of what they import: a million objects to look at."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Tests share few cores with each other and with the ranks they start: one thread for each process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Worker processes that multi-process tests share."""
    pool = Worlds()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Programs that begin with everything imported."""
    made = Forked()
    yield made
    made.close()


@pytest.fixture
def doomed() -> Iterator[Worlds]:
    """Processes of their own, for tests that leave none fit for use."""
    pool = Worlds()
    yield pool
    pool.close()

"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Worker processes that are started once and reused by every multi-process test."""
    pool = Worlds()
    yield pool
    pool.close()

"""Calls after a class has made an object."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def after_init(kind: type[Any], then: Callable[[Any], object]) -> Iterator[None]:
    """Context in which ``then`` is called with every object of a class that is made."""
    init = kind.__init__

    @functools.wraps(init)
    def both(made: Any, *args: Any, **kwargs: Any) -> None:
        init(made, *args, **kwargs)
        then(made)

    with patch.object(kind, "__init__", both):
        yield

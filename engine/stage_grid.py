"""A view of DeepSpeed's process grid in which a model-parallel group ends at the stage's border."""

from __future__ import annotations

from typing import Any


class StageLocalGrid:
    """The grid for optimizers of an asynchronous pipeline.

    DeepSpeed's wrappers reduce overflow flags and gradient norms over the model-parallel group, which
    spans all stages of a pipeline. Stages reach an update at different times, so such a collective would
    make every stage wait for every other, or dead-lock. Here that group is the stage's tensor-parallel
    slice; everything else, rank and size of the model-parallel group among it (they name checkpoint
    files), is the grid's own.
    """

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        if name == "_grid":  # not there yet, while a copy is being made
            raise AttributeError(name)
        return getattr(self._grid, name)

    def get_model_parallel_group(self) -> Any:
        """The ranks that hold slices of this stage's tensors."""
        return self._grid.get_slice_parallel_group()

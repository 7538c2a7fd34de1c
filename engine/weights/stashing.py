"""Weight stashing around an optimizer.

A micro-batch in flight keeps the weights of its forward pass. The wrapper works with any optimizer that
changes its parameters in place, DeepSpeed's wrappers included, and records the version that each
micro-batch uses. The gradient of an old version is applied to the newest weights, as in PipeDream
(Narayanan et al., SOSP 2019, section 3.3).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import torch

from ds_vpipe.engine.weights.moved_layers import MovedLayer
from ds_vpipe.engine.weights.versions import WeightVersions
from ds_vpipe.errors import VPipeError

_COUNT = attrgetter("_version")


class Stepper(Protocol):
    """Anything with an in-place ``step()``."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Update the parameters in place."""

    def zero_grad(self) -> None:
        """Drop all gradients."""


class WeightStashingOptimizer:
    """Versions of a stage's weights around a base optimizer.

    Args:
        base_optimizer: the optimizer that updates ``parameters`` in place.
        parameters: all parameters of the stage. Frozen ones may be unfrozen later, while nothing is in flight.
        stash: keep the weights of micro-batches in flight. Without it (``weight_sync: "none"``)
            every backward pass sees the newest weights, and there is one version.
        version: updates that the weights have had already.

    ``load_old_params()`` and ``load_new_params()`` have PipeDream's names: they exchange memory and copy nothing.

    Attributes:
        versions: the storages of all versions.
        moved: layers that have come from other stages since the pipeline was empty.
    """

    def __init__(
        self,
        base_optimizer: Stepper,
        parameters: Iterable[torch.nn.Parameter],
        *,
        stash: bool = True,
        version: int = 0,
    ) -> None:
        self.base_optimizer = base_optimizer
        self._stash = stash
        self._parameters = list(parameters)
        self.moved: list[MovedLayer] = []
        self._begin(version)

    def restart(self, version: int) -> None:
        """Go on with one version, the newest weights; only while nothing is in flight."""
        self.load_new_params()
        self._begin(version)

    def take_over(self, base_optimizer: Stepper, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Go on with one version of other parameters; only while nothing is in flight."""
        self.load_new_params()
        self.base_optimizer, self._parameters = base_optimizer, list(parameters)
        self._begin(self.latest_version)

    def _begin(self, version: int) -> None:
        self.moved.clear()
        self.versions = WeightVersions(self._parameters, version)
        # Without versions; one that a script unfreezes has to get them (_take_in).
        self._frozen = [parameter for parameter in self._parameters if not parameter.requires_grad]
        self._checked: int | None = None  # version at the latest check
        # Weights, and the counts of changes in place that autograd is to see of them.
        self._counts: tuple[tuple[torch.Tensor, ...], tuple[int, ...]] = (), ()

    @property
    def latest_version(self) -> int:
        """Updates applied to the newest weights."""
        return self.versions.latest

    @property
    def num_versions(self) -> int:
        """Versions alive, the newest included."""
        return len(self.versions.alive)

    def version_of(self, micro_batch: Hashable) -> int:
        """Version that the forward pass of ``micro_batch`` used."""
        return self.versions.in_flight[micro_batch]

    @contextmanager
    def forward(self, micro_batch: Hashable, version: int | None = None) -> Iterator[None]:
        """Run the forward pass of ``micro_batch`` with ``version``, by default the newest, and keep that version.

        Raises:
            KeyError: the version is no longer alive.
            VPipeError: parameters have been unfrozen, or put on other memory, while micro-batches are in flight that
                have used them.
        """
        self.check()
        version = self.versions.latest if version is None else version
        self.versions.point_to(version)
        for layer in self.moved:
            layer.begin_forward(version)
        try:
            yield
        finally:
            self.versions.point_to_newest()
            for layer in self.moved:
                layer.end_forward(micro_batch)
        self.versions.in_flight[micro_batch] = version

    def check(self, anew: bool = False) -> None:
        """Take in what a script has changed about parameters, or refuse it; by default once per update."""
        if any(parameter.requires_grad for parameter in self._frozen):
            self._take_in("requires_grad: got parameters that were unfrozen")
        if anew or self._checked != self.latest_version:  # not for every pass: there may be hundreds of parameters
            if not self.has_memory():
                self._take_in("p.data = values: got parameters that were put on other memory")
            self._frozen = [parameter for parameter in self._parameters if not parameter.requires_grad]
            self._checked = self.latest_version

    def has_memory(self) -> bool:
        """Whether the parameters are still on the memory that has versions."""
        return all(versions.has_all() for versions in self._all_versions)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Context of forward passes of an evaluation, which may leave equal values on other memory.

        ``layer.to(torch.float32)`` and back does so. What a script has put there before is left to :meth:`check`.
        """
        here = self.has_memory()
        try:
            yield
        finally:
            if here and not self.has_memory():
                for versions in self._all_versions:
                    versions.put_back()

    def _take_in(self, given: str) -> None:
        """Include changed parameters in the versions; without, updates would change weights that are in use."""
        if self.versions.in_flight or self.num_versions > 1 or self.moved:
            raise VPipeError(
                f"{given} while micro-batches that have used them are in flight, allowed is to do so in an empty "
                f"pipeline; call engine.quiesce() before, or engine.drain() if the script calls engine(...), on every "
                f"rank"
            )
        self.restart(self.latest_version)

    def load_old_params(self, micro_batch: Hashable) -> None:
        """Point to the weights that the forward pass of ``micro_batch`` used, until a pass or update needs others."""
        if self._stash:
            self.versions.point_to(self.versions.in_flight[micro_batch])
            for layer in self.moved:
                if micro_batch in layer.versions.in_flight:
                    layer.versions.point_to(layer.versions.in_flight[micro_batch])

    def load_new_params(self) -> None:
        """Point the parameters to the newest weights."""
        for versions in self._all_versions:
            versions.point_to_newest()

    @contextmanager
    def in_batch(self) -> Iterator[None]:
        """Context of a call of ``train_batch()``, before which a script may have written into the newest version.

        Raises:
            VPipeError: as in :meth:`forward`; a call may have backward passes alone.
        """
        self.check(anew=True)  # the call before may have met the end of the data, and have made no update
        # As before the script's writes: else autograd refuses backward passes in flight, whose versions it has not
        # written to.
        torch._C._autograd._unsafe_set_version_counter(*self._counts)
        try:
            yield
        finally:
            self.load_new_params()
            if self.moved:  # else the update has noted them, and nothing has written since
                self._counts = self._counted(self.versions, *(one.versions for one in self.moved if not one.apart))

    @property
    def trained(self) -> tuple[torch.Tensor, ...]:
        """All weights that have versions."""
        return tuple(chain.from_iterable(versions.trained for versions in self._all_versions))

    def written(self) -> set[int]:
        """Identities of weights that a script has changed in place since the last call, if anything is in flight."""
        counted = zip(*self._counts, strict=True) if self.versions.in_flight else ()
        return {id(weight) for weight, count in counted if weight._version != count}

    def _counted(self, *of: WeightVersions) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        trained = tuple(chain.from_iterable(versions.trained for versions in of)) if self.versions.in_flight else ()
        return trained, tuple(map(_COUNT, trained))

    @property
    def _all_versions(self) -> list[WeightVersions]:
        return [self.versions, *(layer.versions for layer in self.moved)]

    def unshared(self, tree: Any) -> Any:
        """``tree`` with copies of the tensors that share memory with a weight, now of the version pointed to."""
        for versions in self._all_versions:
            tree = versions.unshared(tree)
        return tree

    def add(self, parameters: Iterable[torch.nn.Parameter], version: int) -> MovedLayer:
        """Take in a layer that has had ``version`` updates elsewhere."""
        mine = list(parameters)
        self._parameters += mine
        self._frozen += [parameter for parameter in mine if not parameter.requires_grad]
        layer = MovedLayer(mine, WeightVersions(mine, version))
        layer.versions.keep_from = self.versions.keep_from
        self.moved.append(layer)
        return layer

    def remove(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give up a layer that nothing in flight uses any more."""
        gone = {id(parameter) for parameter in parameters}
        self._parameters = [parameter for parameter in self._parameters if id(parameter) not in gone]
        self._frozen = [parameter for parameter in self._frozen if id(parameter) not in gone]
        self.moved[:] = [layer for layer in self.moved if not gone & {id(p) for p in layer.parameters}]
        self.versions.remove(gone)

    def release(self, micro_batch: Hashable) -> None:
        """Give up the version of a micro-batch that is done or dropped."""
        del self.versions.in_flight[micro_batch]
        for layer in self.moved:
            layer.versions.in_flight.pop(micro_batch, None)
        for versions in self._all_versions:
            versions.recycle()

    def drop_gradients(self) -> None:
        """Drop the gradients of all parameters, also those that the base optimizer keeps."""
        self.base_optimizer.zero_grad()
        for parameter in self._parameters:
            parameter.grad = None

    def keep_from(self, version: int | None) -> None:
        """Keep ``version`` and newer ones for later forward passes; None: the newest alone."""
        for versions in self._all_versions:
            versions.keep_from = version
            versions.recycle()

    def keep_newest(self) -> None:
        """Drop all versions but the newest; only while nothing is in flight, so that scripts may change weights."""
        self._checked = None
        if self.versions.keep_from is not None:
            self.keep_from(self.latest_version)

    @contextmanager
    def update(self, layer: MovedLayer | None = None) -> Iterator[None]:
        """Context of an optimizer step, which makes the next version; that of ``layer`` alone if one is given.

        The weights change in place, after a copy of them if anything in flight uses them. Thanks to the copy no
        backward pass sees these changes, so autograd's counters of them are reset. Those of frozen weights and buffers,
        which have no copy, are not.
        """
        together = (self.versions, *(one.versions for one in self.moved if not one.apart))
        updated = together if layer is None else (layer.versions,)
        for versions in updated:
            versions.begin_update() if self._stash else versions.point_to_newest()
        self._counts = self._counted(*self._all_versions)
        try:
            yield
        finally:
            torch._C._autograd._unsafe_set_version_counter(*self._counts)
        for versions in updated:
            versions.end_update()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One update of the newest weights by the base optimizer, without an engine; returns what it returns."""
        with self.update():
            return self.base_optimizer.step(*args, **kwargs)

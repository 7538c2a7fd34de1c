"""Weight versions whose passes use predicted weights, while updates go to the true ones.

A version is then a set of predicted weights. Nothing in flight ever refers to the true weights, so that updates need
no fork, and the price is one more set of weights than stashing alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from ds_vpipe.engine.versions import Weights, WeightVersions


class Predictor(Protocol):
    """Anything that foresees weights."""

    def predict(self, parameters: Sequence[torch.Tensor], into: Sequence[torch.Tensor], version: int) -> None:
        """Write the weights that passes are to use, made from ``parameters``, into tensors of the same shapes.

        ``version`` is how many updates ``parameters`` have had.
        """


class PredictedVersions(WeightVersions):
    """As :class:`WeightVersions`; between passes the parameters are the true weights.

    Args:
        parameters: the stage's parameters.
        holders: objects that may hold further references to the parameters' storages.
        version: number of updates that the parameters have had already.
        predictor: asked after every update, and now.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], holders: Iterable[object], version: int, predictor: Predictor
    ) -> None:
        super().__init__(parameters, holders, version)
        self._predictor = predictor
        self._true = self._alive.pop(version)
        self._at_true = True
        self._alive[version] = self._predicted()

    @property
    def allocated(self) -> int:
        """Sets of storages in memory, the true weights' included."""
        return super().allocated + 1

    def point_to(self, version: int) -> None:
        """Make the parameters refer to the prediction that is ``version``.

        Raises:
            KeyError: the version is not alive.
        """
        if self._at_true or version != self._pointed:
            self._refer_to(self._alive[version])
            self._pointed, self._at_true = version, False

    def point_to_newest(self) -> None:
        """Make the parameters refer to the true weights."""
        if not self._at_true:
            self._refer_to(self._true)
            self._pointed, self._at_true = self._latest, True

    def fork(self) -> None:
        """Make the parameters refer to the true weights: what an update changes is in no pass."""
        self.point_to_newest()

    def advance(self) -> None:
        """Count an update of the true weights, and predict the next version from them."""
        self._latest += 1
        self._alive[self._latest] = self._predicted()
        self._pointed = self._latest

    def _predicted(self) -> Weights:
        """A prediction from the true weights, which the parameters must refer to."""
        target = self._spare.pop() if self._spare else self._allocate(self._true)
        self._predictor.predict(self.parameters, target.parameter_views, self._latest)
        return target

    def _refer_to(self, weights: Weights) -> None:
        for parameter, view in zip(self.parameters, weights.parameter_views, strict=True):
            parameter.data = view

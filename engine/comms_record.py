"""The pipeline's messages in DeepSpeed's communication log (``comms_logger``).

DeepSpeed logs what goes through ``deepspeed.comm``. The links between stages do not, but their traffic
is what a user of a pipeline looks for there. Sends are listed as ``isend``, since they only start, and
receives as ``recv``, with the time that the stage waited.
"""

from __future__ import annotations

import time

from deepspeed.comm import comm as ds_comm

from ds_vpipe.actions import Action, Kind
from ds_vpipe.engine.neighbours import Neighbours

_OPERATIONS = {Kind.SEND_ACT: "isend", Kind.SEND_GRAD: "isend", Kind.RECV_ACT: "recv", Kind.RECV_GRAD: "recv"}


class CommsRecord:
    """Observes the actions of one stage for DeepSpeed's communication log; nothing while that is off."""

    def __init__(self, links: Neighbours) -> None:
        self._links = links
        self._bytes = 0
        self._begin = 0.0

    def before(self, action: Action) -> None:
        """An action begins."""
        if _is_logged(action):
            self._bytes, self._begin = self._moved(action), time.perf_counter()

    def after(self, action: Action) -> None:
        """It has ended."""
        if not _is_logged(action):
            return
        operation, size = _OPERATIONS[action.kind], self._moved(action) - self._bytes
        if size:
            milliseconds = max(1e-6, 1e3 * (time.perf_counter() - self._begin))
            ds_comm.comms_logger.append(operation, operation, milliseconds, size)

    def _moved(self, action: Action) -> int:
        """Bytes so far on the link that ``action`` uses."""
        links = self._links
        if _OPERATIONS[action.kind] == "isend":
            sender = links.activations_out if action.kind is Kind.SEND_ACT else links.gradients_out
            return 0 if sender is None else sender.bytes_sent
        receiver = links.activations_in if action.kind is Kind.RECV_ACT else links.gradients_in
        return 0 if receiver is None else receiver.bytes_received


def _is_logged(action: Action) -> bool:
    logger, operation = ds_comm.comms_logger, _OPERATIONS.get(action.kind)
    return bool(operation and logger.enabled and (logger.prof_all or operation in logger.prof_ops))

"""The pipeline's messages in DeepSpeed's communication log (``comms_logger``).

DeepSpeed logs what goes through ``deepspeed.comm``. The links between stages do not, but their traffic
is what a user of a pipeline looks for there. Sends are listed as ``isend``, since they only start, and
receives as ``recv``, with the time that the stage waited.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from deepspeed.comm import comm as ds_comm

from ds_vpipe.engine.links.receiver import Receiver
from ds_vpipe.engine.links.sender import Sender
from ds_vpipe.schedules.actions import Action, Kind


class CommsRecord:
    """Observes the actions of one stage for DeepSpeed's communication log; nothing while that is off.

    Args:
        links: the links that actions of each kind use.
    """

    def __init__(self, links: Mapping[Kind, Sequence[Sender | Receiver]]) -> None:
        self._links = links
        self._bytes = 0
        self._begin = 0.0

    def before(self, action: Action) -> None:
        """An action begins."""
        if self._operation(action) is not None:
            self._bytes, self._begin = self._moved(action), time.perf_counter()

    def after(self, action: Action) -> None:
        """It has ended."""
        operation = self._operation(action)
        if operation is None:
            return
        size = self._moved(action) - self._bytes
        if size:
            milliseconds = max(1e-6, 1e3 * (time.perf_counter() - self._begin))
            ds_comm.comms_logger.append(operation, operation, milliseconds, size)

    def _operation(self, action: Action) -> str | None:
        """What the log calls ``action``; None if it is not to be logged."""
        logger = ds_comm.comms_logger
        if not logger.enabled or action.kind not in self._links:
            return None
        operation = "isend" if action.kind.value.startswith("SEND") else "recv"
        return operation if logger.prof_all or operation in logger.prof_ops else None

    def _moved(self, action: Action) -> int:
        """Bytes so far on the links that ``action`` uses."""
        return sum(
            link.bytes_sent if isinstance(link, Sender) else link.bytes_received for link in self._links[action.kind]
        )

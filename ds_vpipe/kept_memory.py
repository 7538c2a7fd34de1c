"""Memory that outlives a rank: files without a name, which the rank's supervisor keeps for the next attempt.

A rank writes a file in memory and hands it over when it is complete. The rank of the next attempt is a fork of the same
supervisor and finds the files open. They have no name in any file system: when supervisor and rank have ended, however
they end, their memory is free. Here is neither torch nor a thread, as in :mod:`ds_vpipe.restarts`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import BinaryIO

KEPT = "DS_VPIPE_KEPT"
"""Environment variable of a rank: its process, the socket to its supervisor, names and descriptors of kept files."""
HAND_OVER_S = 30.0  # in which a supervisor takes a file


class KeptMemory:
    """Files in memory of one rank, at its supervisor."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._mine: socket.socket | None = None
        self._its: socket.socket | None = None

    def connect(self) -> None:
        """Make the sockets between this process and a child that is about to be forked; only Linux has such files."""
        if not hasattr(os, "memfd_create"):
            return
        if self._mine is not None:  # what the child before has left running may still have the other end
            self._mine.close()
        self._mine, self._its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._mine.setblocking(False)

    def in_child(self, environment: MutableMapping[str, str]) -> None:
        """Leave the child's end and all files in its environment."""
        if self._mine is not None and self._its is not None:
            self._mine.close()
            files = (f"{name}={file}" for name, file in self._files.items())
            environment[KEPT] = ";".join([str(os.getpid()), str(self._its.detach()), *files])

    def in_parent(self) -> None:
        """Close the child's end."""
        if self._its is not None:
            self._its.close()

    def fileno(self) -> int:
        """Descriptor that becomes readable when the rank hands something over; -1 if there is none."""
        return -1 if self._mine is None else self._mine.fileno()

    def receive(self) -> None:
        """Take what the rank has handed over so far."""
        while self._mine is not None:
            try:
                words, files, *_ = socket.recv_fds(self._mine, 256, 1)
            except BlockingIOError:
                return
            except OSError:
                words, files = b"", []
            kind, _, name = words.decode().partition(" ")
            if not kind:  # the rank has ended
                self._mine.close()
                self._mine = None
                return
            if kind in ("drop", "keep"):  # without a file if there is no descriptor left
                with suppress(KeyError):
                    os.close(self._files.pop(name))
            for file in files:
                self._files[name] = file


class KeptFiles:
    """Files in memory that a rank hands to its supervisor, and those that it finds there.

    Args:
        connection: to the supervisor.
        files: descriptors by name, of the attempts before.
    """

    def __init__(self, connection: socket.socket, files: Mapping[str, int]) -> None:
        self._connection, self._files = connection, dict(files)
        self._kept = set(files)
        connection.settimeout(HAND_OVER_S)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> KeptFiles | None:
        """Those of this process; None if nobody keeps anything for it, as for one that a rank has started."""
        process, *rest = environment.get(KEPT, "").split(";")
        if process != str(os.getpid()):
            return None
        connection, *files = rest
        named = (file.rpartition("=") for file in files)
        return cls(socket.socket(fileno=os.dup(int(connection))), {name: int(number) for name, _, number in named})

    @property
    def found(self) -> set[str]:
        """Names of the files that attempts before this one have left, and this one has not dropped."""
        return set(self._files)

    def open(self, name: str) -> BinaryIO:
        """A file that was found, from its start.

        Raises:
            KeyError: there is none of this name.
        """
        file = os.fdopen(os.dup(self._files[name]), "rb")
        file.seek(0)
        return file

    def keep(self, name: str, write: Callable[[BinaryIO], object]) -> int:
        """Keep what ``write`` writes, in the place of a file of this name; returns its bytes.

        Raises:
            OSError: there is no memory left, or the supervisor is gone or did not take it in time.
        """
        with os.fdopen(os.memfd_create(f"ds_vpipe {name}"), "wb") as file:
            write(file)
            file.flush()
            size = file.tell()
            socket.send_fds(self._connection, [f"keep {name}".encode()], [file.fileno()])
        self._kept.add(name)
        self._forget(name)
        return size

    def drop(self, names: Callable[[str], bool]) -> None:
        """Give up the files for whose names ``names`` is true."""
        for name in [name for name in self._kept if names(name)]:
            self._connection.send(f"drop {name}".encode())
            self._kept.remove(name)
            self._forget(name)

    def _forget(self, name: str) -> None:
        if name in self._files:
            os.close(self._files.pop(name))

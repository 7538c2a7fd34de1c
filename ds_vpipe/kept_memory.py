"""Memory that outlives a rank: files without a name, which the rank's supervisor keeps for the next attempt.

A rank writes a file in memory and hands it over when it is complete. When the supervisor starts the rank of the next
attempt, it gives it all files. They have no name in any file system: when supervisor and rank have ended, however they
end, their memory is free. Here is neither torch nor a thread, as in :mod:`ds_vpipe.restarts`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import BinaryIO

KEPT = "DS_VPIPE_KEPT"
"""Environment variable of a rank: its process, the socket to its supervisor, names and descriptors of kept files."""
HAND_OVER_S = 30.0  # in which supervisor and rank take each other's files
_AVAILABLE = hasattr(os, "memfd_create")  # only Linux has such files


def connection() -> tuple[socket.socket, socket.socket]:
    """Sockets of a supervisor and of its next child.

    Files go both ways, and the order to start.
    """
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET if _AVAILABLE else socket.SOCK_DGRAM)
    mine.setblocking(False)
    return mine, its


def await_start(supervisor: socket.socket, environment: MutableMapping[str, str]) -> list[str]:
    """Wait for the order to start, and leave the files that come before it in the environment of this process.

    Returns:
        The words of the order; none if the supervisor has ended.
    """
    files: list[str] = []
    while True:
        message, descriptors, *_ = socket.recv_fds(supervisor, 256, 1)
        kind, _, text = message.decode().partition(" ")
        files += [f"{text}={descriptor}" for descriptor in descriptors]
        if kind != "keep":
            break
    if _AVAILABLE:
        environment[KEPT] = ";".join([str(os.getpid()), str(supervisor.detach()), *files])
    return text.split()


class KeptMemory:
    """Files in memory of one rank, at its supervisor."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def receive(self, rank: socket.socket) -> set[str]:
        """Take what a rank has handed over so far.

        Returns:
            What it has done: ``keep``, ``drop``, and nothing for its end.
        """
        done: set[str] = set()
        while "" not in done:
            try:
                words, files, *_ = socket.recv_fds(rank, 256, 1)
            except BlockingIOError:
                break
            except OSError:
                words, files = b"", []
            kind, _, name = words.decode().partition(" ")
            done.add(kind)
            if kind in ("drop", "keep"):  # without a file if there is no descriptor left
                with suppress(KeyError):
                    os.close(self._files.pop(name))
            for file in files:
                self._files[name] = file
        return done

    def start(self, rank: socket.socket, order: str) -> None:
        """Give all files to a rank, and order it to start.

        Raises:
            OSError: it has ended, or does not take them in time.
        """
        rank.settimeout(HAND_OVER_S)
        for name, file in self._files.items():
            socket.send_fds(rank, [f"keep {name}".encode()], [file])
        rank.send(f"start {order}".encode())
        rank.setblocking(False)

    def close(self) -> None:
        """Close all files, in a process that has inherited them."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class KeptFiles:
    """Files in memory that a rank hands to its supervisor, and those that it finds there."""

    def __init__(self, connection: socket.socket, files: Mapping[str, int]) -> None:
        self._connection, self._files = connection, dict(files)
        self._kept = set(files)
        connection.settimeout(HAND_OVER_S)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> KeptFiles | None:
        """Files kept for this process; None without a supervisor, or for a process that a rank has started."""
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

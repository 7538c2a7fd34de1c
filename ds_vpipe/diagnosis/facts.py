"""What was observed, as plain values. Checks know nothing else, so that tests can feed them anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class NodeFacts:
    """One machine; what :mod:`ds_vpipe.diagnosis.probe` prints there.

    Attributes:
        host: its own name.
        packages: versions of installed packages by name; None for those that are not.
        apex: the package of that name: none, NVIDIA's or the other one.
        environment: variables that matter, those that are set.
        shm_bytes: size of ``/dev/shm``; None where there is none.
        open_files: soft limit of open files.
        compiler: path of a C++ compiler, None if there is none; as ``ninja``.
        address: what its own name resolves to; None if it does not.
        build_locks: locks of extension builds: path, seconds since anything beside it has changed, who has it open.
        interfaces: names of network interfaces.
        gpus: lines of ``nvidia-smi``, one per GPU; None where there is no such command or it fails, for
            the reason ``gpu_error``.
    """

    host: str
    python: str
    packages: Mapping[str, str | None]
    apex: Literal["none", "nvidia", "other"] = "none"
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: int = 1
    shm_bytes: int | None = None
    open_files: int = 1024
    compiler: str | None = None
    ninja: str | None = None
    address: str | None = None
    build_locks: tuple[tuple[str, float, str], ...] = ()
    interfaces: tuple[str, ...] = ()
    gpus: tuple[str, ...] | None = None
    gpu_error: str = ""


@dataclass(frozen=True)
class RemoteFacts:
    """A host of the hostfile, seen from here.

    Attributes:
        error: why it could not be reached; empty if it was.
        node: what the probe said there, None if it did not run; then ``probe_error`` says why.
        skew_s: its clock minus ours, in seconds, half of the round trip subtracted; None if not measured.
        round_trip_s: of the shortest exchange; the skew is known to half of it.
    """

    error: str = ""
    node: NodeFacts | None = None
    probe_error: str = ""
    skew_s: float | None = None
    round_trip_s: float = 0.0


@dataclass(frozen=True)
class Facts:
    """Everything that was observed.

    Attributes:
        node: the machine on which the command runs.
        backends: communication backends of torch that are available, by name.
        cuda_devices: GPUs that torch sees.
        ports: ports that were tried, and whether they are free; the first is the one of the rendezvous.
        topology: the lines between GPUs in ``nvidia-smi topo -m``; empty where there is no GPU.
        hostfile: path and text of the hostfile; None if none was named.
        deepspeed_env: texts of the ``.deepspeed_env`` files that the launcher reads, by path.
        commands: paths of commands by name; None for those that are missing.
        remote: the hosts of the hostfile, by name.
    """

    node: NodeFacts
    backends: Mapping[str, bool] = field(default_factory=dict)
    cuda_devices: int = 0
    ports: Mapping[int, bool] = field(default_factory=dict)
    topology: tuple[str, ...] = ()
    hostfile: tuple[str, str] | None = None
    deepspeed_env: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str | None] = field(default_factory=dict)
    remote: Mapping[str, RemoteFacts] = field(default_factory=dict)

"""Checks of observed facts: pure functions, so that tests can feed them anything. Every finding has its remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from functools import partial
from typing import Literal

from packaging.version import InvalidVersion, Version
from pydantic.dataclasses import dataclass

from ds_vpipe.doctor.probe import BUILD_LIMIT_S, UNUSED

# Package: least version, version that is too new, tested version. Equal to constraints.txt and setup.py, which a test
# sees to: neither is there in an installation.
PACKAGES: dict[str, tuple[str, str | None, str]] = {
    "torch": ("2.6", None, "2.13.0"),
    "deepspeed": ("0.19", "0.20", "0.19.8"),
    "transformers": ("5", None, "5.23.0"),
}
PYTHON = "3.10"
LEAST_SHM = 1 << 30
LEAST_OPEN_FILES = 4096
LARGEST_SKEW_S = 0.5
_NAME = "correct the name in the hostfile, or add it to /etc/hosts or ~/.ssh/config"
_SSH_REMEDIES = {  # by what is in ssh's answer
    "host key": "accept its key once: ssh {host} true",
    "permission denied": "give it your key: ssh-copy-id {host}",
    "resolve": _NAME,
    "not known": _NAME,
    "": "see that it is up, that sshd runs there and that no firewall is between",
}
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


@dataclass(frozen=True)
class NodeFacts:
    """Facts about one machine; the JSON of :mod:`ds_vpipe.doctor.probe`.

    Attributes:
        host: its own name.
        packages: versions of installed packages by name; None for those that are not.
        environment: variables that matter, those that are set.
        shm_bytes: size of ``/dev/shm``; None where there is none.
        open_files: soft limit of open files.
        address: what its own name resolves to; None if it does not.
        build_locks: locks of extension builds: path, seconds since anything beside it has changed, who has it open.
        gpus: lines of ``nvidia-smi``, one per GPU; None where there is no such command or it fails, for the reason
            ``gpu_error``.
    """

    host: str
    python: str
    packages: dict[str, str | None]
    apex: Literal["none", "nvidia", "other"] = "none"
    environment: dict[str, str] = field(default_factory=dict)
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
    """Facts about a host of the hostfile, seen from here.

    Attributes:
        error: why it could not be reached; empty if it was.
        node: what the probe found there, None if it did not run; then ``probe_error`` says why.
        skew_s: its clock minus ours, half of the round trip subtracted; None if not measured.
        round_trip_s: of the command that asked for the clock; the skew is known to half of it.
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
        port: where ranks will meet.
        topology: the lines between GPUs in ``nvidia-smi topo -m``; empty where there is no GPU.
        hostfile: path and text of the hostfile; None if none was named.
        deepspeed_env: texts of the ``.deepspeed_env`` files that the launcher reads, by path.
        commands: paths of commands by name; None for those that are missing.
        remote: the hosts of the hostfile, by name.
    """

    node: NodeFacts
    backends: dict[str, bool] = field(default_factory=dict)
    cuda_devices: int = 0
    port: int = 0
    port_is_free: bool = True
    topology: tuple[str, ...] = ()
    hostfile: tuple[str, str] | None = None
    deepspeed_env: dict[str, str] = field(default_factory=dict)
    commands: dict[str, str | None] = field(default_factory=dict)
    remote: dict[str, RemoteFacts] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One finding, in one line.

    Attributes:
        level: ``error`` if training will not start or be wrong, ``warning`` if it may.
        check: what was looked at.
        text: what was found.
        remedy: what to do about it; empty if it is ok.
    """

    level: Literal["ok", "warning", "error"]
    check: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return " ".join(f"{self.level}: {self.check}: {self.text}{remedy}".split())


_ok, _warning, _error = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "error")


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, in the order in which things are needed."""
    nodes = {host: there.node for host, there in facts.remote.items() if there.node is not None}
    return [
        *check_versions(facts.node),
        *check_backends(facts),
        *check_gpus(facts),
        *check_node(facts.node),
        check_port(facts),
        *check_hosts(facts),
        *check_deepspeed_env(facts.deepspeed_env, nodes or {facts.node.host: facts.node}),
    ]


def check_versions(node: NodeFacts) -> list[Finding]:
    """Python and the packages on one machine."""
    findings = [_ok("python", node.python)]
    if Version(node.python) < Version(PYTHON):
        findings = [_error("python", f"{node.python} on {node.host}", f"install {PYTHON} or newer")]
    install = "pip install -c constraints.txt -e ."
    for name, (least, below, tested) in PACKAGES.items():
        found = node.packages.get(name)
        if found is None:
            findings.append(_error(name, f"not installed on {node.host}", install))
            continue
        try:
            version = Version(found)
        except InvalidVersion:
            findings.append(_warning(name, f"{found}, which is no version; tested with {tested}", install))
            continue
        if version < Version(least) or (below and version >= Version(below)):
            end = f", before {below}" if below else ""
            findings.append(_error(name, f"{found}; supported: {least} and newer{end}", install))
        elif version.release != Version(tested).release:
            findings.append(_warning(name, f"{found}; works by its number, tested with {tested}", install))
        else:
            findings.append(_ok(name, found))
    return findings


def check_backends(facts: Facts) -> list[Finding]:
    """Gloo carries what stages send each other; NCCL reduces over replicas on GPUs."""
    gloo, nccl = _ok("gloo", "available"), _ok("nccl", "available")
    if not facts.backends.get("gloo"):
        remedy = "install a build of torch that has it, such as those on pypi.org"
        gloo = _error("gloo", "torch has no Gloo, which carries what stages send", remedy)
    if not facts.backends.get("nccl"):
        nccl = _ok("nccl", "not available, and no GPU needs it")
        if facts.cuda_devices:
            text = "torch has no NCCL, which DeepSpeed takes on GPUs"
            nccl = _error("nccl", text, "install a CUDA build of torch")
    return [gloo, nccl]


def check_gpus(facts: Facts) -> list[Finding]:
    """GPUs that the driver and torch see, and what is between them."""
    node, gpus = facts.node, facts.node.gpus
    if node.gpu_error:
        return [_error("GPUs", node.gpu_error, "mend the driver: nvidia-smi has to answer")]
    if not gpus and facts.cuda_devices:
        text = f"torch sees {facts.cuda_devices}, nvidia-smi none"
        return [_warning("GPUs", text, "see that nvidia-smi is in PATH and works")]
    if not gpus:
        return [_ok("GPUs", "none: training runs on the CPU")]
    findings = [_ok("GPUs", f"{facts.cuda_devices} of {len(gpus)}: {gpus[0]}")]
    if facts.cuda_devices == 0:
        why, remedy = "its build or the driver does not fit", "install a CUDA build of torch that the driver supports"
        if "CUDA_VISIBLE_DEVICES" in node.environment:
            why, remedy = f"CUDA_VISIBLE_DEVICES is {node.environment['CUDA_VISIBLE_DEVICES']!r}", "unset it"
        findings = [_error("GPUs", f"nvidia-smi shows {len(gpus)} ({gpus[0]}), torch sees none: {why}", remedy)]
    kinds = sorted(set(gpus))
    if len(kinds) > 1:
        remedy = "give the slower ones fewer layers: vpipe.partition, or python -m ds_vpipe plan --help"
        findings.append(_warning("GPUs", f"{len(kinds)} different ones: {'; '.join(kinds)}", remedy))
    text = f"{len(facts.topology)} GPUs: {'; '.join(facts.topology)}"
    if any("SYS" in line.split() for line in facts.topology):
        remedy = "put neighbouring stages on GPUs with a shorter way between them: --include HOST:GPU,GPU,..."
        findings.append(_warning("interconnect", f"{text} (SYS crosses CPU sockets)", remedy))
    elif facts.topology:
        findings.append(_ok("interconnect", text))
    return findings


def check_node(node: NodeFacts) -> list[Finding]:
    """All checks that can be made on any machine, but for versions."""
    names = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in node.environment]
    return [
        check_apex(node),
        check_threads(node),
        check_shared_memory(node),
        check_open_files(node),
        check_compiler(node),
        *check_build_locks(node),
        *[interface_finding(name, node.environment[name], node) for name in names],
    ]


def check_apex(node: NodeFacts) -> Finding:
    """PyPI's package called apex is a web framework; NVIDIA's is the one with optimizers."""
    if node.apex == "other":
        text = f"the package apex on {node.host} is not NVIDIA's (it has no apex.optimizers)"
        return _error("apex", text, "pip uninstall apex; NVIDIA's is built from its source, and optional")
    return _ok("apex", "NVIDIA's" if node.apex == "nvidia" else "not installed, which is fine")


def check_threads(node: NodeFacts) -> Finding:
    """Without a number every rank takes all cores."""
    name, value = "OMP_NUM_THREADS", node.environment.get("OMP_NUM_THREADS")
    if value is not None and (not value.isdecimal() or int(value) < 1):
        return _error(name, f"{value!r} is no number >= 1", "export OMP_NUM_THREADS=1")
    text = ""
    if value is None:
        text = f"not set: every rank on {node.host} takes all {node.cpus} cores"
    elif int(value) > node.cpus:
        text = f"{value} threads per rank on {node.cpus} cores of {node.host}"
    remedy = "export OMP_NUM_THREADS=1, or cores over ranks per host"
    return _warning(name, text, remedy) if text else _ok(name, value or "")


def check_shared_memory(node: NodeFacts) -> Finding:
    """NCCL and data loaders put their buffers into ``/dev/shm``; containers start with 64 MiB."""
    if node.shm_bytes is None:
        return _warning("/dev/shm", f"not there on {node.host}", "mount a tmpfs of 1 GiB or more on it")
    text = f"{node.shm_bytes / (1 << 20):,.0f} MiB"
    if node.shm_bytes >= LEAST_SHM:
        return _ok("/dev/shm", text)
    remedy = "give 1 GiB or more: docker run --ipc=host or --shm-size=8g; Apptainer has the host's"
    return _warning("/dev/shm", f"{text} on {node.host}", remedy)


def check_open_files(node: NodeFacts) -> Finding:
    """Every neighbour and replica is a connection, every shard of data a file; -1 is no limit."""
    if 0 <= node.open_files < LEAST_OPEN_FILES:
        text = f"at most {node.open_files} on {node.host}"
        return _warning("open files", text, f"ulimit -n {LEAST_OPEN_FILES}, or raise nofile in limits.conf")
    return _ok("open files", "no limit" if node.open_files < 0 else str(node.open_files))


def check_compiler(node: NodeFacts) -> Finding:
    """DeepSpeed compiles FusedAdam when it is first used."""
    missing = [name for name, path in (("C++ compiler", node.compiler), ("ninja", node.ninja)) if path is None]
    if not missing:
        return _ok("compiler", f"{node.compiler}, {node.ninja}")
    text = f"no {' and no '.join(missing)} on {node.host}: DeepSpeed cannot build FusedAdam"
    return _warning("compiler", text, 'install g++ and ninja, or write "torch_adam": true into optimizer.params')


def check_build_locks(node: NodeFacts) -> list[Finding]:
    """Every start waits for a lock but for one that nobody has open, which the next start takes over."""
    findings = []
    for path, idle, state in node.build_locks:
        text = f"lock {path} on {node.host}, {state}, unchanged for {idle / 60:.1f} minutes"
        if state == UNUSED:
            findings.append(_warning("extension build", text, "nothing to do: the next start takes it over"))
            continue
        remedy = "delete it, unless a build is going on: every start waits until it is gone"
        findings.append((_error if idle > BUILD_LIMIT_S else _warning)("extension build", text, remedy))
    return findings


def interface_finding(variable: str, value: str, node: NodeFacts) -> Finding:
    """Check that a variable's value fits the interfaces of ``node``.

    Gloo takes names with commas between them. NCCL takes beginnings of names, after ``=`` whole names, after ``^``
    those that it must not use.
    """
    exact = variable.startswith("GLOO") or value.startswith("=")
    excluded = value.startswith("^") and not variable.startswith("GLOO")
    names = [name.strip() for name in value.lstrip("=^" if not variable.startswith("GLOO") else "").split(",")]
    for name in names:
        found = name in node.interfaces if exact else any(item.startswith(name) for item in node.interfaces)
        if not excluded and (not name or not found):
            text = f"{value!r}, and {node.host} has no interface {name!r}"
            remedy = f"name one of {', '.join(node.interfaces)}, or unset it"
            return _error(variable, text, remedy)
    return _ok(variable, f"{value} on {node.host}")


def check_port(facts: Facts) -> Finding:
    """The port of the rendezvous."""
    if facts.port_is_free:
        return _ok("port", f"{facts.port} is free for the rendezvous")
    text = f"{facts.port}, where ranks meet, is taken on {facts.node.host}"
    return _error("port", text, "deepspeed --master_port PORT with another, or end what has it")


def parse_hostfile(path: str, text: str) -> tuple[dict[str, int], list[Finding]]:
    """Hosts with their slots, and what is wrong with the file; lines as DeepSpeed's launcher reads them."""
    hosts: dict[str, int] = {}
    findings: list[Finding] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        where = f"{path} line {number}"
        if match is None or match[1].startswith("-"):  # which ssh would take for an option
            findings.append(_error("hostfile", f"{where}: {line!r}", "write HOST slots=N"))
        elif match[1] in hosts:
            findings.append(_error("hostfile", f"{where}: {match[1]} is there twice", "add up its slots"))
        elif int(match[2]) < 1:
            findings.append(_error("hostfile", f"{where}: {line!r}", "give at least one slot, or remove it"))
        else:
            hosts[match[1]] = int(match[2])
    if not hosts and not findings:
        findings.append(_error("hostfile", f"{path} names no host", "write a line HOST slots=N for each"))
    if not findings:
        text = f"{len(hosts)} host(s), {sum(hosts.values())} slots"
        findings.append(_ok("hostfile", text))
    return hosts, findings


def check_hosts(facts: Facts) -> list[Finding]:
    """The hostfile, the commands that it needs, and every host."""
    if facts.hostfile is None:
        return []
    hosts, findings = parse_hostfile(*facts.hostfile)
    if facts.commands.get("ssh") is None:
        remedy = "install an ssh client, or start every host by hand: deepspeed --no_ssh --node_rank R"
        findings.append(_error("ssh", "not installed", remedy))
    if len(hosts) > 1:
        findings += _check_several(facts, list(hosts))
    for host, slots in hosts.items():
        if host in facts.remote:
            findings += check_host(facts.node, host, slots, facts.remote[host])
    return findings


def _check_several(facts: Facts, hosts: list[str]) -> list[Finding]:
    """Needs of several hosts: pdsh, names that all know, variables that the launcher does not hand on."""
    findings = []
    if facts.commands.get("pdsh") is None:
        remedy = "install pdsh, or use deepspeed --launcher or --no_ssh"
        findings.append(_error("pdsh", f"not installed, and the hostfile has {len(hosts)} hosts", remedy))
    else:
        findings.append(_ok("pdsh", str(facts.commands["pdsh"])))
    for local in sorted({"localhost", "127.0.0.1"}.intersection(hosts))[:1]:
        text = f"{local} stands beside other hosts, which cannot reach it by that name"
        findings.append(_warning("hostfile", text, "write the name that the others know"))
    files = facts.deepspeed_env.values()
    brought = {line.partition("=")[0].strip() for text in files for line in text.splitlines()}
    for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        if name in facts.node.environment and name not in brought:
            value = facts.node.environment[name]
            text = f"{value} here, and the launcher does not hand it on to other hosts"
            findings.append(_warning(name, text, f"write {name}={value} into .deepspeed_env"))
    if "GLOO_SOCKET_IFNAME" not in brought:
        findings += [check_address(there.node) for there in facts.remote.values() if there.node is not None]
    return findings


def check_address(node: NodeFacts) -> Finding:
    """Gloo offers other hosts the address that the host's own name has there."""
    if node.address is None or node.address.startswith("127."):
        text = f"the name {node.host} is {node.address or 'unknown'} there, where other hosts do not reach it"
        names = " or ".join(name for name in node.interfaces if name != "lo") or "its interface"
        return _error("address", text, f"write GLOO_SOCKET_IFNAME={names} into .deepspeed_env")
    return _ok("address", f"{node.host} is {node.address}")


def check_host(here: NodeFacts, host: str, slots: int, there: RemoteFacts) -> list[Finding]:
    """One host: is it reached, does it have the same software, is its clock right, has it as many GPUs?"""
    if there.error:
        remedy = next(remedy for word, remedy in _SSH_REMEDIES.items() if word in there.error.lower())
        return [_error(f"ssh {host}", there.error, remedy.format(host=host))]
    findings = [_ok(f"ssh {host}", f"reached, round trip {there.round_trip_s * 1000:.0f} ms"), _clock(host, there)]
    node = there.node
    if node is None:
        remedy = "the launcher runs the same path there: install Python and the packages at it"
        return [*findings, _error(f"python {host}", there.probe_error or "no answer", remedy)]
    versions = [("python", node.python, here.python)]
    versions += [(name, _public(node.packages.get(name)), _public(here.packages.get(name))) for name in PACKAGES]
    differing = [f"{name} {found} (here {ours})" for name, found, ours in versions if found != ours]
    if differing:
        remedy = "install the same on all hosts: constraints.txt"
        findings.append(_error(f"versions {host}", ", ".join(differing), remedy))
    else:
        findings.append(_ok(f"versions {host}", "as here"))
    if node.gpus is not None and len(node.gpus) < slots:
        text = f"{slots} slots and {len(node.gpus)} GPUs"
        findings.append(_error(f"GPUs {host}", text, "correct slots= in the hostfile"))
    # The shell of ssh has not the environment of the run, which the launcher brings.
    return findings + [found for found in check_node(node) if found.level != "ok" and found.check != "OMP_NUM_THREADS"]


def _public(version: str | None) -> str:
    """A version without the name of its build."""
    return "missing" if version is None else version.partition("+")[0]


def _clock(host: str, there: RemoteFacts) -> Finding:
    if there.skew_s is None:
        return _warning(f"clock {host}", "not measured", "see that date +%s.%N works there")
    text = f"{there.skew_s:+.3f} s, known to {there.round_trip_s / 2:.3f} s"
    if abs(there.skew_s) - there.round_trip_s / 2 <= LARGEST_SKEW_S:
        return _ok(f"clock {host}", text)
    return _warning(
        f"clock {host}", text, "run chrony or ntpd on all hosts; logs and recordings are out of step until then"
    )


def check_deepspeed_env(files: Mapping[str, str], nodes: Mapping[str, NodeFacts]) -> list[Finding]:
    """``.deepspeed_env``: every line is ``KEY=VALUE``, which the launcher counts on, and interfaces exist.

    Args:
        files: texts by path.
        nodes: the machines on which the values will hold, by host.
    """
    findings = []
    remedy = "write KEY=VALUE in every line; the launcher takes neither comments nor empty lines"
    for path, text in files.items():
        lines = text.splitlines()
        wrong = [n for n, line in enumerate(lines) if not re.match(r"\s*[A-Za-z_]\w*\s*=", line)]
        findings += [_error(path, f"line {n + 1}: {lines[n]!r}", remedy) for n in wrong]
        for line in lines:
            key, _, value = line.partition("=")
            if key.strip().endswith("_SOCKET_IFNAME"):
                found = [interface_finding(key.strip(), value.strip(), node) for node in nodes.values()]
                findings += [item for item in found if item.level != "ok"]
        if not wrong:
            findings.append(_ok(path, f"{len(lines)} variable(s) for all hosts"))
    return findings

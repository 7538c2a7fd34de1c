"""Checks of observed facts: pure functions, so that tests can feed them anything. Every finding has its remedy."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import partial
from typing import Literal

from packaging.version import InvalidVersion, Version
from pydantic.dataclasses import dataclass

from ds_vpipe.doctor.probe import BUILD_LIMIT_S, HELD, LOCKED, UNUSED
from ds_vpipe.requirements import PACKAGES, PYTHON, fits

LEAST_SHM = 1 << 30
LEAST_OPEN_FILES = 4096
LARGEST_SKEW_S = 0.5
Level = Literal["ok", "warning", "error"]
_NAME = "correct the name in the hostfile, or add it to /etc/hosts or ~/.ssh/config"
_LOCAL = {"localhost", "127.0.0.1"}
_WITHOUT_HOSTFILE = "start without the hostfile: DeepSpeed asks for its first host over ssh, also for this one"
_SSH_REMEDIES = {  # by what is in ssh's answer
    "host key": "accept its key once: ssh {host} true",
    "permission denied": "give it your key: ssh-copy-id {host}",
    "resolve": _NAME,
    "not known": _NAME,
    "": "see that it is up, that sshd runs there and that no firewall is between",
}
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")
_LAST_PORT = 65535


@dataclass(frozen=True)
class NodeFacts:
    """Facts about one machine; the JSON of :mod:`ds_vpipe.doctor.probe`."""

    host: str  # its own name
    python: str
    packages: dict[str, str | None]  # versions by name; None if not installed
    apex: Literal["none", "nvidia", "other"] = "none"
    environment: dict[str, str] = field(default_factory=dict)  # variables that matter, those that are set
    cpus: int = 1
    shm_bytes: int | None = None  # size of /dev/shm; None where there is none
    open_files: int = 1024  # soft limit
    compiler: str | None = None
    ninja: str | None = None
    address: str | None = None  # of its own name; None if that does not resolve
    build_locks: tuple[tuple[str, float, str], ...] = ()  # path, seconds without a change beside it, who has it open
    interfaces: tuple[str, ...] = ()
    gpus: tuple[str, ...] | None = None  # lines of nvidia-smi, one per GPU; None where there is no such command
    gpu_error: str = ""  # why nvidia-smi fails


@dataclass(frozen=True)
class RemoteFacts:
    """Facts about a host of the hostfile, seen from here."""

    error: str = ""  # why it could not be reached
    node: NodeFacts | None = None  # None if the probe did not run
    probe_error: str = ""  # why it did not
    skew_s: float | None = None  # its clock minus ours, half of the round trip subtracted; None if not measured
    round_trip_s: float = 0.0  # of the command that asked for the clock; the skew is known to half of it


@dataclass(frozen=True)
class Facts:
    """Everything that was observed."""

    node: NodeFacts  # the machine on which the command runs
    backends: dict[str, bool] = field(default_factory=dict)  # whether torch has a communication backend, by name
    cuda_devices: int = 0  # GPUs that torch sees
    torch_error: str = ""  # why it cannot be imported; nothing is known of backends and GPUs then
    port: int = 0  # where ranks will meet
    port_is_free: bool = True
    topology: tuple[str, ...] = ()  # lines between GPUs in "nvidia-smi topo -m"
    hostfile: tuple[str, str] | None = None  # path and text
    deepspeed_env: dict[str, str] = field(default_factory=dict)  # texts of the launcher's .deepspeed_env files, by path
    commands: dict[str, str | None] = field(default_factory=dict)  # paths by name; None for those that are missing
    remote: dict[str, RemoteFacts] = field(default_factory=dict)  # hosts of the hostfile, by name


@dataclass(frozen=True)
class Finding:
    """One finding, in one line."""

    level: Level  # error if training will not start or be wrong, warning if it may
    check: str  # what was looked at
    text: str  # what was found
    remedy: str = ""  # empty if it is ok

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return " ".join(f"{self.level}: {self.check}: {self.text}{remedy}".split())


_ok, _warning, _error = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "error")


def _finding(check: str, ok: str, *cases: tuple[object, Level, str, str]) -> Finding:
    """Finding of the first case that holds, from its level, text and remedy. Ok if none does."""
    found = next((case[1:] for case in cases if case[0]), None)
    return _ok(check, ok) if found is None else Finding(found[0], check, *found[1:])


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, in the order in which things are needed."""
    nodes = {host: there.node for host, there in facts.remote.items() if there.node is not None}
    taken = f"{facts.port}, where ranks meet, is taken on {facts.node.host}"
    remedy = "deepspeed --master_port PORT with another, or end what has it"
    mended = "mend the installation: import torch has to work"
    # Where it is not installed, that is a finding of its own.
    broken = [_error("torch", facts.torch_error, mended)] if facts.node.packages.get("torch") else []
    return [
        *check_versions(facts.node),
        *(broken if facts.torch_error else [*check_backends(facts), *check_gpus(facts)]),
        *check_node(facts.node),
        _finding(
            "port",
            f"{facts.port} is free for the rendezvous",
            (facts.port > _LAST_PORT, "error", f"{facts.port}, where ranks meet, is above {_LAST_PORT}", remedy),
            (not facts.port_is_free, "error", taken, remedy),
        ),
        *check_hosts(facts),
        *check_deepspeed_env(facts.deepspeed_env, nodes or {facts.node.host: facts.node}),
    ]


def check_versions(node: NodeFacts) -> Iterator[Finding]:
    """Python and the packages on one machine."""
    old, remedy = Version(node.python) < Version(PYTHON), f"install {PYTHON} or newer"
    yield _finding("python", node.python, (old, "error", f"{node.python} on {node.host}", remedy))
    install = "pip install -c constraints.txt -e ."
    for name, (wanted, tested) in PACKAGES.items():
        found = node.packages.get(name)
        try:
            version = Version(found or tested)
        except InvalidVersion:
            yield _warning(name, f"{found}, which is no version; tested with {tested}", install)
            continue
        differs = version.release != Version(tested).release
        yield _finding(
            name,
            found or "",
            (found is None, "error", f"not installed on {node.host}", install),
            (not fits(name, str(version)), "error", f"{found}; supported: {wanted}", install),
            (differs, "warning", f"{found}; works by its number, tested with {tested}", install),
        )


def check_backends(facts: Facts) -> Iterator[Finding]:
    """Gloo carries what stages send each other. NCCL reduces over replicas on GPUs."""
    remedy = "install a build of torch that has it, such as those on pypi.org"
    text = "torch has no Gloo, which carries what stages send"
    yield _finding("gloo", "available", (not facts.backends.get("gloo"), "error", text, remedy))
    there = facts.backends.get("nccl")
    text, remedy = "torch has no NCCL, which DeepSpeed takes on GPUs", "install a CUDA build of torch"
    ok = "available" if there else "not available, and no GPU needs it"
    yield _finding("nccl", ok, (not there and facts.cuda_devices, "error", text, remedy))


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """GPUs that the driver and torch see, and what is between them."""
    node, gpus = facts.node, facts.node.gpus or ()
    if node.environment.get("DS_ACCELERATOR") == "cpu":
        yield _ok("GPUs", "not used: DS_ACCELERATOR is cpu")
        return
    shown = f"nvidia-smi shows {len(gpus)} ({gpus[0] if gpus else ''}), torch sees none: "
    hidden = f"{shown}CUDA_VISIBLE_DEVICES is {node.environment.get('CUDA_VISIBLE_DEVICES')!r}"
    unseen, remedy = bool(gpus) and not facts.cuda_devices, "install a CUDA build of torch that the driver supports"
    look, answer = "see that nvidia-smi is in PATH and works", "mend the driver: nvidia-smi has to answer"
    yield _finding(
        "GPUs",
        f"{facts.cuda_devices} of {len(gpus)}: {gpus[0]}" if gpus else "none: training runs on the CPU",
        (node.gpu_error, "error", node.gpu_error, answer),
        (not gpus and facts.cuda_devices, "warning", f"torch sees {facts.cuda_devices}, nvidia-smi none", look),
        (unseen and "CUDA_VISIBLE_DEVICES" in node.environment, "error", hidden, "unset it"),
        (unseen, "error", f"{shown}its build or the driver does not fit", remedy),
    )
    if node.gpu_error or not gpus:
        return
    kinds = sorted(set(gpus))
    if len(kinds) > 1:
        remedy = "give the slower ones fewer layers: vpipe.partition, or python -m ds_vpipe plan --help"
        yield _warning("GPUs", f"{len(kinds)} different ones: {'; '.join(kinds)}", remedy)
    if facts.topology:
        text = f"{len(facts.topology)} GPUs: {'; '.join(facts.topology)}"
        remedy = "put neighbouring stages on GPUs with a shorter way between them: --include HOST:GPU,GPU,..."
        far = any("SYS" in line.split() for line in facts.topology)
        yield _finding("interconnect", text, (far, "warning", f"{text} (SYS crosses CPU sockets)", remedy))


def check_node(node: NodeFacts) -> Iterator[Finding]:
    """All checks that can be made on any machine, but for versions."""
    # PyPI's package called apex is a web framework; NVIDIA's is the one with optimizers.
    text = f"the package apex on {node.host} is not NVIDIA's (it has no apex.optimizers)"
    remedy = "pip uninstall apex; NVIDIA's is built from its source, and optional"
    ok = "NVIDIA's" if node.apex == "nvidia" else "not installed, which is fine"
    yield _finding("apex", ok, (node.apex == "other", "error", text, remedy))

    # Without a number every rank takes all cores.
    threads, here = node.environment.get("OMP_NUM_THREADS"), f"cores of {node.host}"
    first = (threads or "").partition(",")[0]  # of a list, the rest is for nested regions
    number = int(first) if first.isdecimal() else 0
    unset, remedy = f"not set: every rank on {node.host} takes all {node.cpus} cores", "export OMP_NUM_THREADS=1"
    share = f"{remedy}, or cores over ranks per host"
    yield _finding(
        "OMP_NUM_THREADS",
        threads or "",
        (threads is not None and number < 1, "error", f"{threads!r} is no number >= 1", remedy),
        (threads is None, "warning", unset, share),
        (number > node.cpus, "warning", f"{threads} threads per rank on {node.cpus} {here}", share),
    )

    # NCCL and data loaders put their buffers into /dev/shm; containers start with 64 MiB.
    text = f"{(node.shm_bytes or 0) / (1 << 20):,.0f} MiB"
    remedy = "give 1 GiB or more: docker run --ipc=host or --shm-size=8g; Apptainer has the host's"
    absent, mount = f"not there on {node.host}", "mount a tmpfs of 1 GiB or more on it"
    none, small, here = node.shm_bytes is None, (node.shm_bytes or 0) < LEAST_SHM, f"{text} on {node.host}"
    yield _finding("/dev/shm", text, (none, "warning", absent, mount), (small, "warning", here, remedy))

    # Every neighbour and replica is a connection, every shard of data a file; -1 is no limit.
    few, text = 0 <= node.open_files < LEAST_OPEN_FILES, f"at most {node.open_files} on {node.host}"
    remedy = f"ulimit -n {LEAST_OPEN_FILES}, or raise nofile in limits.conf"
    ok = "no limit" if node.open_files < 0 else str(node.open_files)
    yield _finding("open files", ok, (few, "warning", text, remedy))

    # DeepSpeed compiles FusedAdam when it is first used.
    missing = [name for name, path in (("C++ compiler", node.compiler), ("ninja", node.ninja)) if path is None]
    text = f"no {' and no '.join(missing)} on {node.host}: DeepSpeed cannot build FusedAdam"
    remedy = 'install g++ and ninja, or write "torch_adam": true into optimizer.params'
    yield _finding("compiler", f"{node.compiler}, {node.ninja}", (missing, "warning", text, remedy))

    # Every start waits for a lock but for one that nobody has open, which the next start takes over.
    remedy = "if no build is going on, end its process or delete the file: every start waits for it"
    for path, idle, state in node.build_locks:
        text = f"lock {path} on {node.host}, {state}, unchanged for {idle / 60:.1f} minutes"
        if state == UNUSED:
            yield _warning("extension build", text, "nothing to do: the next start takes it over")
        elif idle <= BUILD_LIMIT_S and state in (HELD, LOCKED):
            yield _warning("extension build", text, "nothing to do: every start waits for the build's end")
        else:
            yield Finding("error" if idle > BUILD_LIMIT_S else "warning", "extension build", text, remedy)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name in node.environment:
            yield interface_finding(name, node.environment[name], node)


def interface_finding(variable: str, value: str, node: NodeFacts) -> Finding:
    """Check that a variable's value fits the interfaces of ``node``.

    Gloo takes names with commas between them. NCCL takes beginnings of names, after ``=`` whole names, after ``^``
    those that it must not use.
    """
    gloo = variable.startswith("GLOO")
    exact, excluded = gloo or value.startswith("="), value.startswith("^") and not gloo
    for name in (name.strip() for name in value.lstrip("" if gloo else "=^").split(",")):
        found = name in node.interfaces if exact else any(item.startswith(name) for item in node.interfaces)
        if not excluded and (not name or not found):
            text = f"{value!r}, and {node.host} has no interface {name!r}"
            return _error(variable, text, f"name one of {', '.join(node.interfaces)}, or unset it")
    return _ok(variable, f"{value} on {node.host}")


def parse_hostfile(path: str, text: str) -> tuple[dict[str, int], list[Finding]]:
    """Hosts with their slots, and what is wrong with the file. Lines as DeepSpeed's launcher reads them."""
    hosts: dict[str, int] = {}
    findings: list[Finding] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match, where = _LINE.match(line), f"{path} line {number}"
        host, slots = (match[1], int(match[2])) if match else ("-", 0)
        found = _finding(
            "hostfile",
            "",
            # A name that begins so would be an option of ssh.
            (host.startswith("-"), "error", f"{where}: {line!r}", "write HOST slots=N"),
            (host in hosts, "error", f"{where}: {host} is there twice", "add up its slots"),
            (slots < 1, "error", f"{where}: {line!r}", "give at least one slot, or remove it"),
        )
        if found.level == "ok":
            hosts[host] = slots
        else:
            findings.append(found)
    if not hosts and not findings:
        findings = [_error("hostfile", f"{path} names no host", "write a line HOST slots=N for each")]
    return hosts, findings or [_ok("hostfile", f"{len(hosts)} host(s), {sum(hosts.values())} slots")]


def check_hosts(facts: Facts) -> Iterator[Finding]:
    """The hostfile, the commands that it needs, and every host."""
    if facts.hostfile is None:
        return
    hosts, findings = parse_hostfile(*facts.hostfile)
    yield from findings
    for found in _check_reached(facts, hosts):
        alone = found.level == "error" and found.check.startswith("ssh") and hosts.keys() <= _LOCAL
        yield replace(found, remedy=_WITHOUT_HOSTFILE) if alone else found


def _check_reached(facts: Facts, hosts: Mapping[str, int]) -> Iterator[Finding]:
    """Commands for the hosts, and the hosts."""
    if facts.commands.get("ssh") is None:
        remedy = "install an ssh client, or start every host by hand: deepspeed --no_ssh --node_rank R"
        yield _error("ssh", "not installed", remedy)
    if len(hosts) > 1:
        yield from _check_several(facts, list(hosts))
    for host, slots in hosts.items():
        if host in facts.remote:
            yield from check_host(facts.node, host, slots, facts.remote[host])


def _check_several(facts: Facts, hosts: list[str]) -> Iterator[Finding]:
    """Needs of several hosts: pdsh, names that all know, variables that the launcher does not hand on."""
    pdsh, text = facts.commands.get("pdsh"), f"not installed, and the hostfile has {len(hosts)} hosts"
    remedy = "install pdsh, or use deepspeed --launcher or --no_ssh"
    yield _finding("pdsh", str(pdsh), (pdsh is None, "error", text, remedy))
    for local in sorted(_LOCAL.intersection(hosts))[:1]:
        text = f"{local} stands beside other hosts, which cannot reach it by that name"
        yield _warning("hostfile", text, "write the name that the others know")
    files = facts.deepspeed_env.values()
    brought = {line.partition("=")[0].strip() for text in files for line in text.splitlines()}
    for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        if name in facts.node.environment and name not in brought:
            value = facts.node.environment[name]
            text = f"{value} here, and the launcher does not hand it on to other hosts"
            yield _warning(name, text, f"write {name}={value} into .deepspeed_env")
    for node in (there.node for there in facts.remote.values()):
        if node is None or "GLOO_SOCKET_IFNAME" in brought:
            continue
        # Gloo offers other hosts the address that the host's own name has there.
        text = f"the name {node.host} is {node.address or 'unknown'} there, where other hosts do not reach it"
        names = " or ".join(name for name in node.interfaces if name != "lo") or "its interface"
        unreached = node.address is None or node.address.startswith("127.")
        remedy = f"write GLOO_SOCKET_IFNAME={names} into .deepspeed_env"
        yield _finding("address", f"{node.host} is {node.address}", (unreached, "error", text, remedy))


def check_host(here: NodeFacts, host: str, slots: int, there: RemoteFacts) -> Iterator[Finding]:
    """One host: is it reached, does it have the same software, is its clock right, has it as many GPUs?"""
    if there.error:
        remedy = next(remedy for word, remedy in _SSH_REMEDIES.items() if word in there.error.lower())
        yield _error(f"ssh {host}", there.error, remedy.format(host=host))
        return
    yield _ok(f"ssh {host}", f"reached, round trip {there.round_trip_s * 1000:.0f} ms")
    skew, known = there.skew_s or 0.0, there.round_trip_s / 2
    text = f"{skew:+.3f} s, known to {known:.3f} s"
    remedy = "run chrony or ntpd on all hosts; logs and recordings are out of step until then"
    yield _finding(
        f"clock {host}",
        text,
        (there.skew_s is None, "warning", "not measured", "see that date +%s.%N works there"),
        (abs(skew) - known > LARGEST_SKEW_S, "warning", text, remedy),
    )
    node = there.node
    if node is None:
        remedy = "the launcher runs the same path there: install Python and the packages at it"
        yield _error(f"python {host}", there.probe_error or "no answer", remedy)
        return
    versions = [("python", node.python, here.python)]
    versions += [(name, _public(node.packages.get(name)), _public(here.packages.get(name))) for name in PACKAGES]
    text = ", ".join(f"{name} {found} (here {ours})" for name, found, ours in versions if found != ours)
    remedy = "install the same on all hosts: constraints.txt"
    yield _finding(f"versions {host}", "as here", (text, "error", text, remedy))
    if node.gpus is not None and len(node.gpus) < slots:
        text = f"{slots} slots and {len(node.gpus)} GPUs"
        yield _error(f"GPUs {host}", text, "correct slots= in the hostfile")
    # The shell of ssh has not the environment of the run, which the launcher brings.
    yield from (found for found in check_node(node) if found.level != "ok" and found.check != "OMP_NUM_THREADS")


def _public(version: str | None) -> str:
    """A version without the name of its build."""
    return "missing" if version is None else version.partition("+")[0]


def check_deepspeed_env(files: Mapping[str, str], nodes: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """``.deepspeed_env``: every line is ``KEY=VALUE``, which the launcher counts on, and interfaces exist."""
    remedy = "write KEY=VALUE in every line; the launcher takes neither comments nor empty lines"
    for path, text in files.items():
        lines = text.splitlines()
        wrong = [n for n, line in enumerate(lines) if not re.match(r"\s*[A-Za-z_]\w*\s*=", line)]
        yield from (_error(path, f"line {n + 1}: {lines[n]!r}", remedy) for n in wrong)
        for key, _, value in (line.partition("=") for line in lines):
            if key.strip().endswith("_SOCKET_IFNAME"):
                found = (interface_finding(key.strip(), value.strip(), node) for node in nodes.values())
                yield from (item for item in found if item.level != "ok")
        if not wrong:
            yield _ok(path, f"{len(lines)} variable(s) for all hosts")

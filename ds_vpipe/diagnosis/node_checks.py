"""Checks of one machine: libraries, limits, environment, GPUs."""

from __future__ import annotations

from ds_vpipe.diagnosis.facts import Facts, NodeFacts
from ds_vpipe.diagnosis.finding import Finding
from ds_vpipe.diagnosis.probe import BUILD_LIMIT_S, UNUSED

LEAST_SHM = 1 << 30
LEAST_OPEN_FILES = 4096
_IFNAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_node(node: NodeFacts) -> list[Finding]:
    """All checks that can be made on any machine, but for versions."""
    return [
        *check_apex(node),
        *check_threads(node),
        *check_shared_memory(node),
        *check_open_files(node),
        *check_compiler(node),
        *check_build_locks(node),
        *check_interfaces(node),
    ]


def check_apex(node: NodeFacts) -> list[Finding]:
    """PyPI's package called apex is a web framework; NVIDIA's is the one with optimizers."""
    if node.apex == "other":
        text = f"the package apex on {node.host} is not NVIDIA's (it has no apex.optimizers)"
        return [Finding("error", "apex", text, "pip uninstall apex; NVIDIA's is built from its source, and optional")]
    text = "NVIDIA's" if node.apex == "nvidia" else "not installed, which is fine"
    return [Finding("ok", "apex", text)]


def check_threads(node: NodeFacts) -> list[Finding]:
    """Without a number every rank takes all cores."""
    value = node.environment.get("OMP_NUM_THREADS")
    if value is None:
        text = f"not set: every rank on {node.host} takes all {node.cpus} cores"
        return [Finding("warning", "OMP_NUM_THREADS", text, "export OMP_NUM_THREADS=1, or cores over ranks per host")]
    if not value.isdecimal() or int(value) < 1:
        return [Finding("error", "OMP_NUM_THREADS", f"{value!r} is no number >= 1", "export OMP_NUM_THREADS=1")]
    if int(value) > node.cpus:
        text = f"{value} threads per rank on {node.cpus} cores of {node.host}"
        return [Finding("warning", "OMP_NUM_THREADS", text, "export OMP_NUM_THREADS=1, or cores over ranks per host")]
    return [Finding("ok", "OMP_NUM_THREADS", value)]


def check_shared_memory(node: NodeFacts) -> list[Finding]:
    """NCCL and data loaders put their buffers into ``/dev/shm``; containers start with 64 MiB."""
    if node.shm_bytes is None:
        return [Finding("warning", "/dev/shm", f"not there on {node.host}", "mount a tmpfs of 1 GiB or more on it")]
    text = f"{node.shm_bytes / (1 << 20):,.0f} MiB"
    if node.shm_bytes < LEAST_SHM:
        remedy = "give 1 GiB or more: docker run --ipc=host or --shm-size=8g; Apptainer has the host's"
        return [Finding("warning", "/dev/shm", f"{text} on {node.host}", remedy)]
    return [Finding("ok", "/dev/shm", text)]


def check_open_files(node: NodeFacts) -> list[Finding]:
    """Every neighbour and replica is a connection, every shard of data a file; -1 is no limit."""
    if 0 <= node.open_files < LEAST_OPEN_FILES:
        text = f"at most {node.open_files} on {node.host}"
        return [Finding("warning", "open files", text, f"ulimit -n {LEAST_OPEN_FILES}, or raise nofile in limits.conf")]
    return [Finding("ok", "open files", "no limit" if node.open_files < 0 else str(node.open_files))]


def check_compiler(node: NodeFacts) -> list[Finding]:
    """DeepSpeed compiles FusedAdam when it is first used."""
    missing = [name for name, path in (("C++ compiler", node.compiler), ("ninja", node.ninja)) if path is None]
    if missing:
        text = f"no {' and no '.join(missing)} on {node.host}: DeepSpeed cannot build FusedAdam"
        remedy = 'install g++ and ninja, or write "torch_adam": true into optimizer.params'
        return [Finding("warning", "compiler", text, remedy)]
    return [Finding("ok", "compiler", f"{node.compiler}, {node.ninja}")]


def check_build_locks(node: NodeFacts) -> list[Finding]:
    """Every start waits for a lock but for one that nobody has open, which the next start takes over."""
    return [
        Finding(
            "error" if idle > BUILD_LIMIT_S and state != UNUSED else "warning",
            "extension build",
            f"lock {path} on {node.host}, {state}, unchanged for {idle / 60:.1f} minutes",
            "delete it, unless a build is going on: every start waits until it is gone"
            if state != UNUSED
            else "nothing to do: the next start takes it over",
        )
        for path, idle, state in node.build_locks
    ]


def check_interfaces(node: NodeFacts) -> list[Finding]:
    """``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` name interfaces that are there."""
    return [
        finding
        for name in _IFNAMES
        if name in node.environment
        for finding in [interface_finding(name, node.environment[name], node)]
    ]


def interface_finding(variable: str, value: str, node: NodeFacts) -> Finding:
    """Whether ``value`` of ``variable`` fits the interfaces of ``node``.

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
            return Finding("error", variable, text, remedy)
    return Finding("ok", variable, f"{value} on {node.host}")


def check_backends(facts: Facts) -> list[Finding]:
    """Gloo carries what stages send each other; NCCL reduces over replicas on GPUs."""
    findings = []
    if facts.backends.get("gloo"):
        findings.append(Finding("ok", "gloo", "available"))
    else:
        remedy = "install a build of torch that has it, such as those on pypi.org"
        findings.append(Finding("error", "gloo", "torch has no Gloo, which carries what stages send", remedy))
    if facts.backends.get("nccl"):
        findings.append(Finding("ok", "nccl", "available"))
    elif facts.cuda_devices:
        text = "torch has no NCCL, which DeepSpeed takes on GPUs"
        findings.append(Finding("error", "nccl", text, "install a CUDA build of torch"))
    else:
        findings.append(Finding("ok", "nccl", "not available, and no GPU needs it"))
    return findings


def check_gpus(facts: Facts) -> list[Finding]:
    """GPUs that the driver and torch see, and what is between them."""
    gpus = facts.node.gpus
    if facts.node.gpu_error:
        return [Finding("error", "GPUs", facts.node.gpu_error, "mend the driver: nvidia-smi has to answer")]
    if not gpus:
        if facts.cuda_devices:
            text = f"torch sees {facts.cuda_devices}, nvidia-smi none"
            return [Finding("warning", "GPUs", text, "see that nvidia-smi is in PATH and works")]
        return [Finding("ok", "GPUs", "none: training runs on the CPU")]
    visible = facts.node.environment.get("CUDA_VISIBLE_DEVICES")
    findings = []
    if facts.cuda_devices == 0:
        text = f"nvidia-smi shows {len(gpus)} ({gpus[0]}), torch sees none"
        why = f"CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else "its build or the driver does not fit"
        remedy = "unset it" if visible is not None else "install a CUDA build of torch that the driver supports"
        findings.append(Finding("error", "GPUs", f"{text}: {why}", remedy))
    else:
        findings.append(Finding("ok", "GPUs", f"{facts.cuda_devices} of {len(gpus)}: {gpus[0]}"))
    if len(set(gpus)) > 1:
        text = f"{len(set(gpus))} different ones: {'; '.join(sorted(set(gpus)))}"
        remedy = "give the slower ones fewer layers: vpipe.partition, or python -m ds_vpipe plan --help"
        findings.append(Finding("warning", "GPUs", text, remedy))
    if facts.topology:
        text = f"{len(facts.topology)} GPUs: {'; '.join(facts.topology)}"
        if any("SYS" in line.split() for line in facts.topology):
            remedy = "put neighbouring stages on GPUs with a shorter way between them: --include HOST:GPU,GPU,..."
            findings.append(Finding("warning", "interconnect", f"{text} (SYS crosses CPU sockets)", remedy))
        else:
            findings.append(Finding("ok", "interconnect", text))
    return findings


def check_ports(facts: Facts) -> list[Finding]:
    """The port of the rendezvous, and some that the operating system chose for connections."""
    findings = []
    for index, (port, free) in enumerate(facts.ports.items()):
        if index == 0 and free:
            findings.append(Finding("ok", "port", f"{port} is free for the rendezvous"))
        elif index == 0:
            text = f"{port}, where ranks meet, is taken on {facts.node.host}"
            findings.append(
                Finding("error", "port", text, "deepspeed --master_port PORT with another, or end what has it")
            )
    others = list(facts.ports.values())[1:]
    if not others or not all(others):
        text = "the operating system gives no port to listen on"
        remedy = "look at net.ipv4.ip_local_port_range, the firewall and the number of open sockets"
        findings.append(Finding("error", "ports", text, remedy))
    else:
        findings.append(Finding("ok", "ports", f"{len(others)} at once can be listened on"))
    return findings

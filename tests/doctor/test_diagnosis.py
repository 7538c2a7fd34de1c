"""What ``doctor`` concludes from facts: every finding has a level, and a remedy where it is not ok."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_vpipe.doctor.checks import (
    Facts,
    Finding,
    NodeFacts,
    RemoteFacts,
    check_deepspeed_env,
    check_hosts,
    check_node,
    diagnose,
    interface_finding,
    parse_hostfile,
)
from ds_vpipe.doctor.probe import HELD, UNUSED
from ds_vpipe.requirements import PACKAGES, PYTHON, fits

ROOT = Path(__file__).parents[2]
NODE = NodeFacts(
    host="here",
    python="3.11.7",
    packages={name: tested for name, (_, tested) in PACKAGES.items()},
    environment={"OMP_NUM_THREADS": "1"},
    cpus=8,
    shm_bytes=8 << 30,
    open_files=20000,
    compiler="/usr/bin/g++",
    ninja="/usr/bin/ninja",
    address="10.0.0.1",
    interfaces=("lo", "eth0", "ib0"),
)
FACTS = Facts(NODE, {"gloo": True, "nccl": True}, port=29500)
THERE = RemoteFacts(node=replace(NODE, host="there"), skew_s=0.01, round_trip_s=0.02)
HOSTS = replace(
    FACTS,
    hostfile=("hostfile", "a slots=4\nb slots=4\n"),
    commands={"ssh": "/usr/bin/ssh", "pdsh": "/usr/bin/pdsh"},
    deepspeed_env={"./.deepspeed_env": "OMP_NUM_THREADS=1\n"},
    remote={"a": THERE, "b": THERE},
)


def problems(facts: Facts) -> list[str]:
    return [str(found) for found in diagnose(facts) if found.level != "ok"]


def with_node(**changes: Any) -> Facts:
    return replace(FACTS, node=replace(NODE, **changes))


def with_host(**changes: Any) -> Facts:
    return replace(HOSTS, remote={"a": THERE, "b": replace(THERE, **changes)})


def test_nothing_is_wrong_with_a_good_machine() -> None:
    assert problems(FACTS) == []
    assert problems(HOSTS) == []


def test_supported_versions_are_those_of_the_project() -> None:
    constraints = dict(re.findall(r"^(\w+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    setup = (ROOT / "setup.py").read_text()
    for name, (wanted, tested) in PACKAGES.items():
        assert constraints[name] == tested
        assert f'"{name}{wanted}"' in setup
        assert fits(name, tested)
    assert f'python_requires=">={PYTHON}"' in setup


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"python": "3.9.1"}, "error: python: 3.9.1 on here; install 3.10 or newer"),
        ({"packages": {**NODE.packages, "torch": None}}, "error: torch: not installed on here; pip install -c"),
        ({"packages": {**NODE.packages, "torch": "2.10.0"}}, "error: torch: 2.10.0; supported: >=2.11; pip"),
        ({"packages": {**NODE.packages, "deepspeed": "0.20.0"}}, "error: deepspeed: 0.20.0; supported: ==0.19.8"),
        ({"packages": {**NODE.packages, "torch": "2.12.0"}}, "warning: torch: 2.12.0; works by its number"),
        ({"packages": {**NODE.packages, "torch": "git"}}, "warning: torch: git, which is no version"),
        ({"apex": "other"}, "error: apex: the package apex on here is not NVIDIA's"),
        ({"environment": {}}, "warning: OMP_NUM_THREADS: not set: every rank on here takes all 8 cores; export"),
        ({"environment": {"OMP_NUM_THREADS": "9"}}, "warning: OMP_NUM_THREADS: 9 threads per rank on 8 cores"),
        ({"environment": {"OMP_NUM_THREADS": "9,2"}}, "warning: OMP_NUM_THREADS: 9,2 threads per rank on 8 cores"),
        ({"environment": {"OMP_NUM_THREADS": "many"}}, "error: OMP_NUM_THREADS: 'many' is no number >= 1"),
        ({"shm_bytes": 64 << 20}, "warning: /dev/shm: 64 MiB on here; give 1 GiB or more: docker run --ipc=host"),
        ({"shm_bytes": None}, "warning: /dev/shm: not there on here"),
        ({"open_files": 1024}, "warning: open files: at most 1024 on here; ulimit -n 4096"),
        ({"ninja": None}, "warning: compiler: no ninja on here: DeepSpeed cannot build"),
        ({"compiler": None, "ninja": None}, "warning: compiler: no C++ compiler and no ninja on here"),
        ({"gpu_error": "nvidia-smi gives no answer"}, "error: GPUs: nvidia-smi gives no answer; mend the driver"),
        ({"gpus": ("A100",)}, "error: GPUs: nvidia-smi shows 1 (A100), torch sees none: its build or the driver"),
    ],
)  # fmt: skip
def test_one_thing_wrong_with_a_machine(changes: dict[str, Any], expected: str) -> None:
    (line,) = problems(with_node(**changes))
    assert line.startswith(expected)


def test_builds_and_no_limit_are_fine() -> None:
    packages = {**NODE.packages, "torch": PACKAGES["torch"][1] + "+cpu"}
    assert problems(with_node(packages=packages, open_files=-1, apex="nvidia")) == []


def test_backends() -> None:
    assert problems(replace(FACTS, backends={"gloo": True})) == []
    assert problems(replace(FACTS, backends={}))[0].startswith("error: gloo: torch has no Gloo")
    gpus = replace(with_node(gpus=("A100",)), cuda_devices=1)
    assert problems(gpus) == []
    assert problems(replace(gpus, backends={"gloo": True}))[0].startswith("error: nccl: torch has no NCCL")


def test_gpus() -> None:
    hidden = with_node(gpus=("A100",), environment={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert problems(hidden)[0].endswith("CUDA_VISIBLE_DEVICES is ''; unset it")
    for of_node in ({"gpus": ("A100", "T4")}, {"gpu_error": "nvidia-smi: no devices"}):
        unused = with_node(**of_node, environment={**NODE.environment, "DS_ACCELERATOR": "cpu"})
        assert "ok: GPUs: not used: DS_ACCELERATOR is cpu" in map(str, diagnose(unused))
        assert problems(unused) == []
    mixed = replace(with_node(gpus=("A100", "T4")), cuda_devices=2)
    assert problems(mixed)[0].startswith("warning: GPUs: 2 different ones: A100; T4; give the slower ones fewer layers")
    pair = replace(with_node(gpus=("A100", "A100")), cuda_devices=2)
    assert problems(replace(pair, topology=("GPU0 X NV12", "GPU1 NV12 X"))) == []
    (line,) = problems(replace(pair, topology=("GPU0 X SYS", "GPU1 SYS X")))
    assert line.startswith("warning: interconnect: 2 GPUs: GPU0 X SYS; GPU1 SYS X (SYS crosses CPU sockets); put")
    assert "nvidia-smi none" in problems(replace(FACTS, cuda_devices=1))[0]


def test_port() -> None:
    (line,) = problems(replace(FACTS, port_is_free=False))
    assert line.startswith("error: port: 29500, where ranks meet, is taken on here; deepspeed --master_port PORT")
    (line,) = problems(replace(FACTS, port=99999, port_is_free=False))
    assert line.startswith("error: port: 99999, where ranks meet, is above 65535; deepspeed --master_port PORT")


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", "ok"),
        ("GLOO_SOCKET_IFNAME", "enp216s0", "error"),
        ("GLOO_SOCKET_IFNAME", "eth", "error"),
        ("GLOO_SOCKET_IFNAME", "=eth0", "error"),
        ("GLOO_SOCKET_IFNAME", "", "error"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "error"),
        ("NCCL_SOCKET_IFNAME", "=eth0", "ok"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok"),
        ("NCCL_SOCKET_IFNAME", "enp", "error"),
    ],
)
def test_interfaces(variable: str, value: str, level: str) -> None:
    found = interface_finding(variable, value, NODE)
    assert found.level == level
    environment = {"OMP_NUM_THREADS": "1", variable: value}
    assert len(problems(with_node(environment=environment))) == (level != "ok")
    if level != "ok":
        assert "name one of lo, eth0, ib0" in found.remedy


# Hosts


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "error: hostfile: h names no host; write a line HOST slots=N for each"),
        ("# a slots=1\n\na\n", "error: hostfile: h line 3: 'a'; write HOST slots=N"),
        ("a slots=1\na slots=2\n", "error: hostfile: h line 2: a is there twice; add up its slots"),
        ("-oX=y slots=1\n", "error: hostfile: h line 1: '-oX=y slots=1'; write HOST slots=N"),
        ("a slots=0\n", "error: hostfile: h line 1: 'a slots=0'; give at least one slot, or remove it"),
        ("a slots=4\n  b  slots=2 # two\n", "ok: hostfile: 2 host(s), 6 slots"),
    ],
)
def test_hostfiles(text: str, line: str) -> None:
    _, findings = parse_hostfile("h", text)
    assert [str(found) for found in findings] == [line]


@pytest.mark.parametrize("text", ["a slots=4\nb slots=2\n", "# c\n\n a slots=1 # d\n", "a slots=2 b\n"])
def test_hostfiles_are_read_as_deepspeed_reads_them(text: str) -> None:
    from deepspeed.launcher.runner import _parse_hostfile

    assert parse_hostfile("h", text)[0] == dict(_parse_hostfile(text.splitlines()))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"error": "Permission denied (key)."}, "error: ssh b: Permission denied (key).; give it your key"),
        ({"error": "Host key verification failed."}, "error: ssh b: Host key verification failed.; accept its key"),
        ({"error": "ssh: Could not resolve hostname b"}, "error: ssh b: ssh: Could not resolve hostname b; correct"),
        ({"error": "no answer within 5 s"}, "error: ssh b: no answer within 5 s; see that it is up"),
        ({"node": None, "probe_error": "python: not found"}, "error: python b: python: not found; the launcher"),
        ({"skew_s": None}, "warning: clock b: not measured"),
        ({"skew_s": -3.5}, "warning: clock b: -3.500 s, known to 0.010 s; run chrony or ntpd"),
        ({"node": replace(NODE, python="3.12.0")}, "error: versions b: python 3.12.0 (here 3.11.7); install the same"),
        ({"node": replace(NODE, packages={**NODE.packages, "torch": "2.12.0"})}, "error: versions b: torch 2.12.0"),
        ({"node": replace(NODE, packages={})}, "error: versions b: torch missing (here 2.13.0), deepspeed missing"),
        ({"node": replace(NODE, gpus=("A100",) * 2)}, "error: GPUs b: 4 slots and 2 GPUs; correct slots="),
        ({"node": replace(NODE, host="there", apex="other")}, "error: apex: the package apex on there is not NVIDIA's"),
    ],
)  # fmt: skip
def test_one_thing_wrong_with_a_host(changes: dict[str, Any], expected: str) -> None:
    (line,) = problems(with_host(**changes))
    assert line.startswith(expected)


def test_what_a_host_may_differ_in() -> None:
    packages = {**NODE.packages, "torch": PACKAGES["torch"][1] + "+cpu"}
    assert problems(with_host(node=replace(NODE, packages=packages, environment={}))) == []
    assert problems(with_host(skew_s=-3.5, round_trip_s=6.2)) == []  # not known well enough to complain


def test_commands_for_hosts() -> None:
    assert problems(replace(HOSTS, commands={"ssh": "ssh"}))[0].startswith(
        "error: pdsh: not installed, and the hostfile"
    )
    alone = replace(HOSTS, hostfile=("hostfile", "a slots=4\n"), commands={"ssh": "ssh"})
    assert problems(alone) == []
    assert problems(replace(alone, commands={}, remote={}))[0].startswith("error: ssh: not installed")
    here = replace(HOSTS, hostfile=("hostfile", "localhost slots=4\n"), commands={}, remote={})
    remedy = "start without the hostfile: DeepSpeed asks for its first host over ssh, also for this one"
    assert problems(here) == [f"error: ssh: not installed; {remedy}"]
    unreached = replace(here, commands=HOSTS.commands, remote={"localhost": RemoteFacts(error="Connection refused")})
    assert problems(unreached) == [f"error: ssh localhost: Connection refused; {remedy}"]
    local = replace(HOSTS, hostfile=("hostfile", "localhost slots=4\nb slots=4\n"))
    assert "localhost stands beside other hosts" in problems(local)[0]


def test_a_torch_that_is_not_there_is_one_finding() -> None:
    without = with_node(packages={**NODE.packages, "torch": None})
    (line,) = problems(replace(without, backends={}, torch_error="ModuleNotFoundError: No module named 'torch'"))
    assert line.startswith("error: torch: not installed on here; pip install")


def test_variables_that_the_launcher_keeps_to_itself() -> None:
    (line,) = problems(replace(HOSTS, deepspeed_env={}))
    assert line.startswith(
        "warning: OMP_NUM_THREADS: 1 here, and the launcher does not hand it on to other hosts; write"
    )
    assert problems(replace(HOSTS, deepspeed_env={}, hostfile=("hostfile", "a slots=4\n"))) == []


def test_deepspeed_env() -> None:
    def lines(text: str) -> list[str]:
        return [str(found) for found in check_deepspeed_env({"f": text}, {"b": NODE}) if found.level != "ok"]

    assert lines("OMP_NUM_THREADS=1\nGLOO_SOCKET_IFNAME=eth0\nX=a=b\n") == []
    assert lines("A=1\n\nB=2\n")[0].startswith(
        "error: f: line 2: ''; write KEY=VALUE in every line; the launcher takes"
    )
    assert lines("# why\nA=1\n")[0].startswith("error: f: line 1: '# why'")
    assert lines("export A=1\n")[0].startswith("error: f: line 1: 'export A=1'")
    assert lines("NCCL_SOCKET_IFNAME=enp\n")[0].startswith(
        "error: NCCL_SOCKET_IFNAME: 'enp', and here has no interface"
    )
    on_host = replace(HOSTS, deepspeed_env={"f": "OMP_NUM_THREADS=1\nGLOO_SOCKET_IFNAME=enp1\n"})
    assert len(problems(on_host)) == 2  # on each of the two hosts, and not here


def test_findings_are_lines() -> None:
    everything = replace(
        HOSTS,
        node=NodeFacts("here", "3.8.1", {}),
        backends={},
        port_is_free=False,
        remote={"a": RemoteFacts("timed\nout"), "b": RemoteFacts()},
        deepspeed_env={"f": "x"},
    )
    for found in diagnose(everything):
        assert "\n" not in str(found)
        assert (found.level == "ok") == (not found.remedy), found
    assert str(Finding("ok", "a", "b")) == "ok: a: b"


def test_locks_of_builds() -> None:
    locks = (("/e/adam/lock", 30.0, HELD), ("/e/shm/lock", 3600.0, HELD), ("/e/lion/lock", 3600.0, UNUSED))
    found = [finding for finding in check_node(replace(NODE, build_locks=locks)) if finding.check == "extension build"]
    assert [finding.level for finding in found] == ["warning", "error", "warning"]
    assert f"/e/shm/lock on here, {HELD}, unchanged for 60.0 minutes" in found[1].text
    assert found[0].remedy == "nothing to do: every start waits for the build's end"
    assert "if no build is going on, end its process or delete the file" in found[1].remedy
    assert "the next start takes it over" in found[2].remedy
    assert not [finding for finding in check_node(NODE) if finding.check == "extension build"]


def test_a_name_that_is_loopback_there() -> None:
    """Gloo gives 127.0.0.1 to the other hosts then, and they cannot connect."""
    hosts = {"a": RemoteFacts(node=NODE, round_trip_s=0.1), "b": RemoteFacts(node=replace(NODE, address="127.0.1.1"))}
    facts = replace(FACTS, hostfile=("f", "a slots=1\nb slots=1"), remote=hosts, commands={"ssh": "s", "pdsh": "p"})
    found = [finding for finding in check_hosts(facts) if finding.check == "address"]
    assert [finding.level for finding in found] == ["ok", "error"]
    assert "GLOO_SOCKET_IFNAME=eth0 or ib0 into .deepspeed_env" in found[1].remedy
    brought = replace(facts, deepspeed_env={".deepspeed_env": "GLOO_SOCKET_IFNAME=eth0"})
    assert not [finding for finding in check_hosts(brought) if finding.check == "address"]

"""How ``doctor`` observes: the probe, ssh with a stand-in, limits on time, and the command itself."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from ds_vpipe.__main__ import main
from ds_vpipe.doctor import probe
from ds_vpipe.doctor.checks import NodeFacts, diagnose
from ds_vpipe.doctor.gather import _topology, gather, remote_facts
from ds_vpipe.doctor.probe import run

# A stand-in for ssh: it runs the command here, or does what the name of the host says.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift 2; done
host=$1; shift
case $host in
    closed) echo "ssh: connect to host closed port 22: Connection refused" >&2; exit 255;;
    silent) exec sleep 60;;
    stuck) if [ "${1#date}" != "$1" ]; then exec sh -c "$1"; fi; exec sleep 60;;
    late) if [ "${1#date}" != "$1" ]; then exec date -d '+1 hour' +%s.%N; fi; exec sh -c "$*";;
    babble) echo hello; exit;;
    bare) if [ "${1#date}" != "$1" ]; then exec sh -c "$1"; fi; echo 'sh: python: not found' >&2; exit 127;;
    *) exec sh -c "$*";;
esac
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_probe_needs_no_package(tmp_path: Path) -> None:
    done, text = run([sys.executable, "-I", probe.__file__, "torch", "no-such-package"], 60)
    assert done, text
    found = NodeFacts(**json.loads(text))
    assert found.packages["torch"] is not None
    assert found.packages["no-such-package"] is None
    assert (found.host, found.python) == (socket.gethostname(), sys.version.split()[0])
    assert "lo" in found.interfaces
    assert found.cpus >= 1


@pytest.mark.parametrize(("module", "kind"), [(None, "other"), ("optimizers", "nvidia")])
def test_the_probe_tells_the_two_apex_apart(
    module: str | None, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apex" / (module or "pyramid")).mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert probe.observe([])["apex"] == kind


def test_a_gpu_command_that_hangs_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(probe, "LIMIT_S", 1)
    for script, expected in (
        ("echo 'A100, 81920 MiB, 550'", (["A100, 81920 MiB, 550"], None)),
        ("echo no devices; exit 9", (None, "nvidia-smi: no devices")),
        ("exec sleep 60", (None, "nvidia-smi: no answer within 1 s")),
    ):
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        found = probe.observe([])
        assert (found["gpus"], found.get("gpu_error")) == expected


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\t0-15
GPU1\tNV12\t X \tSYS\t0-15
NIC0\tSYS\tSYS\t X \t

Legend:
"""


def test_links_between_gpus_without_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat {tmp_path}/table\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "table").write_text(TOPOLOGY)
    assert _topology(20) == ("GPU0 X NV12", "GPU1 NV12 X")
    (tmp_path / "table").write_text("\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\x1b[0m\nGPU0\t X \t0-15\t0\n")
    assert _topology(20) == ()


def test_limits_hold_whatever_a_command_leaves_behind() -> None:
    begin = time.monotonic()
    assert run(["sleep", "60"], 0.5) == (False, "no answer within 0.5 s")
    assert run(["sh", "-c", "setsid sleep 30 & echo done"], 5) == (True, "done\n")  # holds its output open
    assert run(["sh", "-c", "echo why >&2; exit 3"], 5) == (False, "why")
    assert run(["sh", "-c", "exit 3"], 5) == (False, "it ended with status 3")
    assert run(["no-such-command"], 5)[0] is False
    assert run(["cat"], 5, "given") == (True, "given")
    assert time.monotonic() - begin < 20  # nobody waited for what was left behind


@pytest.mark.usefixtures("ssh")
def test_a_host_that_answers() -> None:
    found = remote_facts("fine", 20, 2222)
    assert found.error == ""
    assert found.node is not None, found.probe_error
    assert found.node.packages["torch"] is not None
    assert found.skew_s is not None
    assert abs(found.skew_s) <= found.round_trip_s / 2 + 0.01


@pytest.mark.usefixtures("ssh")
def test_hosts_that_do_not() -> None:
    assert remote_facts("closed", 5).error == "ssh: connect to host closed port 22: Connection refused"
    assert remote_facts("silent", 1).error == "no answer within 1 s"
    stuck = remote_facts("stuck", 1)
    assert (stuck.error, stuck.node, stuck.probe_error) == ("", None, "no answer within 2 s")
    assert stuck.skew_s is not None
    late = remote_facts("late", 5)
    assert late.skew_s is not None
    assert 3595 < late.skew_s < 3605
    assert remote_facts("babble", 5).skew_s is None
    bare = remote_facts("bare", 5)
    assert (bare.node, bare.probe_error) == (None, "sh: python: not found")


@pytest.mark.usefixtures("ssh")
def test_everything_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostfile").write_text("fine slots=2\nclosed slots=2\n")
    (tmp_path / ".deepspeed_env").write_text("A=1\n")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        facts = gather(Path("hostfile"), 20, port)
    assert (facts.port, facts.port_is_free) == (port, False)
    assert facts.backends["gloo"] is True
    assert facts.deepspeed_env["./.deepspeed_env"] == "A=1\n"
    assert facts.remote["fine"].node is not None
    assert "refused" in facts.remote["closed"].error


def test_a_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    looked_at = ("torch", "gloo", "nccl", "GPUs")
    found = [finding for finding in diagnose(gather(None, 20)) if finding.check in looked_at]
    (error,) = (finding for finding in found if finding.level == "error")
    assert error.check == "torch"
    assert error.text.endswith("libcudart.so.13: cannot open shared object file")
    assert {finding.check for finding in found} == {"torch"}


@pytest.mark.usefixtures("ssh")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "hostfile").write_text("closed slots=2\n")
    assert main(["doctor", "--hostfile", str(tmp_path / "hostfile"), "--limit", "5"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("error: ssh closed: ssh: connect to host closed port 22") for line in lines)
    assert lines[-1].endswith(" error(s)")
    main(["doctor", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert {found["check"] for found in result["findings"]} >= {"python", "torch", "gloo", "GPUs", "/dev/shm", "port"}
    main(["doctor", "--problems", "--json"])
    assert all(found["level"] != "ok" for found in json.loads(capsys.readouterr().out)["findings"])
    assert main(["doctor", "--hostfile", str(tmp_path / "none")]) == 2
    assert "--hostfile: got" in capsys.readouterr().err
    assert main(["doctor", "--limit", "0"]) == 2

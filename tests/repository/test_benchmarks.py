"""The benchmarks run, as small as they get, and print their tables. What they measure is not tested."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.mp

ARMS = [
    "bare",
    "stock",
    "dualpipev",
    "torch-1f1b",
    "torch-interleaved",
    "torch-zbv",
    "bsp",
    "gpipe",
    "interleaved",
    "asp",
    "asp-deeper",
    "asp-host",
]
SMALL = {
    # First: the process that ranks of all are forked from imports what the first of them asks for, here the most.
    "convergence.py": (
        "--stages 2 --synchronous adamw --methods none recommended@6 --methods-of-full-batches recommended none "
        "--seeds 1 --rates 1e-3 --updates 5 --batch 4 "
        "--layers 1 --validate-every 3 --validation 4 --processes 1 --output out/runs.jsonl "
        "--text text.txt",
        [
            r"synchronous adamw \| 5 \| 0\.00[12] \| 1 \| [\d.]+ \|",
            r"K=2 M=1 nadam \| 6 \| .*\|",
            r"K=2 M=2 nadam \| 5 \| .*\|",
            r"K=2 M=2 none \| 5 \| .*\|",
        ],
    ),
    "schedule.py": (
        "--stages 2 --micro-batches 1 4 --stage-ms 3 --links 0.5 --link-stages 2 --link-micro-batches 1 "
        "--real-micro-batches 1 2 --seconds 0.02 --repetitions 1 --json out/rows.jsonl --plot out/efficiency.png "
        "--table out/rows.md",
        [
            *(rf"emulated K=2 M=4 .*\| {arm} +[\d.]+ micro-batches/s \| efficiency [\d.]+ +\|" for arm in ARMS),
            r"emulated K=2 M=1 +\| dualpipev +needs M >= 2K",
            r"emulated K=2 M=1  link 50% stage .*\| asp-deeper .* x stock",
            r"real +K=2 M=1 .*\| stock ",
            r"real +K=2 M=2 .*\| data-parallel +[\d.]+ micro-batches/s",
            r"real +K=2 M=1 +\| data-parallel +needs M divisible by K",
        ],
    ),
    "simulation.py": (
        "--stages 2 --stage-ms 3 --micro-batches 4 --repetitions 1",
        [r"asp +K=2 M=1 v=1 .*simulated +[\d.]+ measured", r"interleaved K=2 M=8 v=2 .*off by"],
    ),
    "recovery.py": (
        "--width 8 --layers 1 --updates 3 --repetitions 1",
        [r"\| none \| [\d.]+ \| 1.00 \|", r"\| 1 \| [\d.]+ \| [\d.]+ \|"],
    ),
    "restarts.py": (
        "--stages 2 --kills 1 --seconds 1",
        [
            r"a spare: \d+ MB of host memory, \d+ its own",
            r"\| states in host memory \| 1 \| [\d.]+ \|.* \| \d+ \|",
            r"\| a checkpoint every \d+ updates \| 1 \|",
        ],
    ),
    "memory.py": (
        "--stages 2 --hidden 64 --layers 4 --batch 1 --vocabulary 64 --cases asp 1f1b",
        [r"asp +M=1 .*predicted .*measured", r"largest difference: [\d.]+ %"],
    ),
    "balance.py": (
        "--stages 2 --layers 4 --layer-ms 3 --every 4 --updates 16 --frozen-at 6 --repetitions 1 "
        "--cases worst frozen --arms stock live best --json out/balance.jsonl --plot out/balance.svg",
        [
            r"worst: live: replan at update \d+: \[3, 1\]",
            r"\| frozen \| live \| \[\d, \d\] \| [\d.]+ \| \d+ \| [\d.]+ \| \d+% \| \d+% to \d+% \|",
            r"\| worst \| stock \| \[2, 2\] \|",
        ],
    ),
    "overhead.py": ("--tensors 32 --turns 1", [r"stage 1: 32 tensors, SGD, M=1: .*engine -?\d+ us per micro"]),
    "links.py": ("--bytes 64 100000 --repetitions 1", [r"100000 bytes: host \d+ us, shared \d+ us"]),
    "convergence_summary.py": ("--plot out/convergence.svg", [r"\| 1 \| SOAP \| 1 to 2 \| -10\.6 %"]),
    "forecast.py": (
        "--stages 2 --updates 4 --sequence 16 --train-file text.txt",
        [
            r"K=2 M=1, staleness None",
            r"update +4: run [\d.]+, forecast [\d.]+",
            r"largest difference: [\d.e+-]+ of the loss",
        ],
    ),
    "device.py": (
        "--cpu --models gpt2 --stages 2 --arms stock bsp --hidden 64 --layers 2 --vocabulary 64 --batch 1 "
        "--sequence 16 --batches 1 --at-once 1 --repetitions 1",
        [r"gpt2, K=2, M=4", r"\| stock \| [\d.]+ \| .*\| 1.00 \|", r"\| bsp \| [\d.]+ \|", r"planned for asp: \d"],
    ),
    "soak.py": (
        "--updates 4 --every 2 --evaluate 2 --save 2 --epoch 3",
        [
            r"\| 4 \| \d+ \| \d+, \d+, \d+, \d+ \| ",
            r"slope of threads per 1,000 updates: ([+-]\d+\.\d+,? ){4}\(mean \d+\)",
        ],
    ),
    "recorder.py": ("--micro-batches 3 --repetitions 1", [r"us per micro-batch: -?[\d.]+ us per action"]),
}

TEXT = "\n\n".join(
    "\n".join(f"Sentence {n} of page {page} tells of stage {n % 5} and batch {page * n % 7}." for n in range(30))
    for page in range(150)
)


ALL = """
import os, runpy, sys, traceback
bench, *folders = sys.argv[1:]
sys.path[0] = bench
for folder in folders:
    name, *words = open(f"{folder}/command").read().split()
    os.remove(f"{folder}/command")
    os.chdir(folder)
    sys.argv = [f"{bench}/{name}", *words]
    print(f"=== {name}", flush=True)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            traceback.print_exc(file=sys.stdout)
"""
"""Benchmarks one after the other in one process: to import everything takes longer than most of them."""


@pytest.fixture(scope="module")
def small_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """What each benchmark whose test has been asked for prints, and the folder in which it has run."""
    folders = {}
    asked = [item for item in request.session.items if "small_runs" in item.fixturenames]
    for script in [item.callspec.params["script"] for item in asked]:
        folder = folders[script] = tmp_path_factory.mktemp(script)
        (folder / "command").write_text(f"{script} {SMALL[script][0]}", encoding="utf-8")
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    environment = {**os.environ, "DS_VPIPE_CACHE": "out", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ALL, str(ROOT / "scripts" / "bench"), *map(str, folders.values())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    printed = dict(part.split("\n", 1) for part in done.stdout.split("=== ")[1:])
    return {script: (printed[script], folder) for script, folder in folders.items()}


@pytest.mark.parametrize("script", SMALL)
def test_a_small_run(script: str, small_runs: dict[str, tuple[str, Path]]) -> None:
    printed, folder = small_runs[script]
    assert "Traceback" not in printed, printed
    for line in SMALL[script][1]:
        assert re.search(line, printed), printed
    assert {path.name for path in folder.iterdir()} <= {"text.txt", "out"}, "nothing else is left behind"


def test_every_benchmark_is_here() -> None:
    scripts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "scripts" / "bench").glob("*.py")}
    assert {name for name, text in scripts.items() if "__main__" in text} == set(SMALL)


@pytest.fixture
def measurements(tmp_path: Path) -> dict[str, list[list[str]]]:
    """Commands of every measurement of run.sh, words of each; a stand-in for Python writes them down."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/usr/bin/env bash\nprintf "%s\\0" "$@" >>{tmp_path}/words\necho >>{tmp_path}/words\n')
    stand_in.chmod(0o755)
    script = ROOT / "scripts" / "bench" / "run.sh"
    usage = subprocess.run([str(script)], capture_output=True, text=True)
    assert usage.returncode == 2
    found = {}
    for name in re.findall(r"^  ([\w-]+) ", usage.stderr, re.MULTILINE):
        environment = {**os.environ, "PYTHON": str(stand_in)}
        subprocess.run([str(script), name], env=environment, check=True, capture_output=True)
        lines = (tmp_path / "words").read_text(encoding="utf-8").splitlines()
        found[name] = [line.rstrip("\0").split("\0") for line in lines]
        (tmp_path / "words").unlink()
    return found


def test_measurements_of_the_documents_are_commands(measurements: dict[str, list[list[str]]]) -> None:
    """Every word is one that its benchmark knows, and every measurement that a document names is there."""
    for commands in measurements.values():
        for script, *words in commands:
            import_module(Path(script).stem).parse(words)
    measured = {Path(command[0]).name for commands in measurements.values() for command in commands}
    assert measured == set(SMALL) - {"device.py"}  # which scripts/gpu_check.sh runs
    for page in ("performance", "data/performance_notes", "convergence", "balancing", "tuning", "fine_tuning"):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        named = set(re.findall(r"scripts/bench/run\.sh ([\w-]+)", text))
        assert named
        assert named <= set(measurements), page


def test_a_soak_without_a_slope_is_refused_before_it_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "scripts" / "bench" / "soak.py")
    monkeypatch.setattr(sys, "argv", [script, "--updates", "4", "--every", "3"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert end.value.code == 2
    assert "--updates: got 4; a slope takes two rows; allowed: 6 or more" in capsys.readouterr().err


def test_table_has_a_row_per_case_and_a_column_per_arm() -> None:
    import schedule

    def row(arm: str, micro_batches: int, rate: float, link: float = 0.0) -> dict[str, Any]:
        case = {"work": "emulated", "stages": 4, "micro_batches": micro_batches, "link": link, "stage_ms": 25.0}
        return {**case, "arm": arm, "rate": rate, "efficiency": rate / 40}

    rows = [row("stock", 8, 20), row("asp", 8, 36), row("stock", 1, 10), row("asp", 1, 30), row("asp", 8, 38)]
    lines = schedule.table([*rows, row("asp", 1, 20, link=0.5)]).splitlines()
    assert lines[0] == "| work | K | M | stage, ms | stock | asp | fastest, x stock |"
    assert lines[2:] == [
        "| emulated | 4 | 1 | 25.0 | 0.250 | 0.750 | asp 3.00 |",
        "| emulated | 4 | 8 | 25.0 | 0.500 | 0.950 | asp 1.90 |",
        "| link 50% | 4 | 1 | 25.0 |  | 0.500 |  |",
    ]

"""The commands in the documents run, in their order, and print what the documents say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from vpipe_runs import write_run

from ds_vpipe.__main__ import main
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.programs import Workload
from ds_vpipe.simulation.simulator import simulate
from ds_vpipe.simulation.stage_cost import StageCost
from ds_vpipe.timelines.recording import RankRecording

ROOT = Path(__file__).parents[1]
COMMAND = "python -m ds_vpipe "
BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Beginning of a document's name and a command, and the test that runs it; sizes are smaller there where they are large.
RUN_BY = {
    r"(README|docs/(tuning|migrating))\.md: python -m ds_vpipe ": "test_documents",
    r"docs/migrating\.md: deepspeed --module ds_vpipe\.run train\.py": "test_plain_scripts",
    r"docs/multinode\.md: python -m ds_vpipe doctor --hostfile": "test_multinode",
    r"docs/multinode\.md: deepspeed --hostfile": "test_multinode",
    r"docs/multinode\.md: (sbatch|srun) .*scripts/(bert\.sbatch|slurm_rank\.sh)": "test_slurm",
    r"docs/(bert|new_model|hugging_face)\.md: (python|deepspeed) ": "test_model_docs",
    r"docs/new_model\.md: deepspeed\.init_distributed": "test_model_docs",
    r"docs/performance\.md: python scripts/bench/\w+\.py": "test_benchmarks",
    r"docs/convergence\.md: python scripts/bench/convergence\.py": "test_benchmarks",
    r"docs/training\.md: python -m ds_vpipe\.export ": "test_export",
    r"README\.md: (deepspeed .*models/bert/train\.py|scripts/demo\.sh)": "test_demo",
    r"README\.md: scripts/test\.sh": "test_demo",  # whoever reads this has run it
}


def blocks(document: str) -> Iterator[str]:
    """Contents of the fenced blocks, in order."""
    return (match[1] for match in BLOCK.finditer((ROOT / document).read_text(encoding="utf-8")))


def commands(document: str) -> list[list[str]]:
    lines = (line for block in blocks(document) for line in block.splitlines())
    return [shlex.split(line, comments=True)[3:] for line in lines if line.startswith(COMMAND)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with what the documents count on: configurations, a vPipe run, the recording of a run."""
    (tmp_path / "ds_configs").symlink_to(ROOT / "ds_configs")
    (tmp_path / "models").symlink_to(ROOT / "models")
    write_run(tmp_path)
    (tmp_path / "timeline").mkdir()
    trained = simulate(Pipeline("asp", 4, 2), [StageCost(1.0, 2.0, update_s=0.1)] * 4, Workload(6)).timeline
    for rank, row in enumerate(trained.by_rank()):
        RankRecording(rank, 4, 2, "host", 0, row).save(tmp_path / "timeline" / f"rank{rank}.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("document", ["README.md", "docs/tuning.md", "docs/migrating.md"])
def test_every_command_runs_and_prints_what_the_document_says(
    document: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block after a command that begins with the first line of its output holds all of its output."""
    printed: dict[str, str] = {}
    for argv in commands(document):
        status = main(argv)
        streams = capsys.readouterr()
        assert status == (1 if "--current" in argv else 0), (argv, streams.err)
        if streams.out:
            printed[streams.out] = " ".join(argv)
    assert printed
    for block in blocks(document):
        heads = [output for output in printed if block.splitlines()[:2] == output.splitlines()[:2]]
        assert not heads or block in heads, (printed[heads[0]], heads[0])


def test_the_pictures_are_what_the_commands_draw(folder: Path) -> None:
    for argv in commands("docs/tuning.md"):
        main(argv)
    for name in ("before.svg", "after.svg"):
        shipped = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        assert (folder / name).read_text(encoding="utf-8") == shipped, name


def test_every_command_is_run_by_some_test() -> None:
    """A command that no test is known for fails here, so that documents cannot name what nobody runs."""
    tests = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    assert set(RUN_BY.values()) <= tests
    found = 0
    for document in ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))):
        lines = [line for block in blocks(document) for line in block.splitlines()]
        for line in lines:
            if re.match(r"(deepspeed|python|scripts/|sbatch|srun|pip|docker|apptainer|bash)[ .]", line):
                assert any(re.match(pattern, f"{document}: {line}") for pattern in RUN_BY), (document, line)
                found += 1
    assert found > 30


def test_outputs_are_quoted() -> None:
    """The tuning guide's tables are among its blocks, so that the test above compares something."""
    assert sum(block.startswith(("stage  layers", "rank  bubble")) for block in blocks("docs/tuning.md")) == 3

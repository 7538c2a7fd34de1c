"""The commands in the documents run, in their order, and print what the documents say."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from vpipe_runs import write_run

from ds_vpipe.__main__ import main
from ds_vpipe.config import VPipeConfig
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.schedules.one_f_one_b import default_depths, version_used
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.simulation.costs import StageCost
from ds_vpipe.simulation.simulator import simulate
from ds_vpipe.timelines.timeline import Recording

ROOT = Path(__file__).parents[2]
COMMAND = "python -m ds_vpipe "
BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Beginning of a document's name and a command, and the test that runs it; sizes are smaller there where they are large.
RUN_BY = {
    r"docs/(tuning|balancing|migrating/vpipe)\.md: python -m ds_vpipe ": "test_documents",
    r"docs/migrating/plain_scripts\.md: deepspeed --module ds_vpipe\.run train\.py": "test_plain_scripts",
    r"docs/migrating/trainer\.md: deepspeed --num_\w+ 2 --module ds_vpipe\.run run_(mlm|glue)\.py": "test_trainer",
    r"docs/migrating/trainer\.md: python tests/support/trainer_replay\.py out/mlm ": "test_trainer",
    r"docs/migrating/deepspeed_pipelines\.md: deepspeed --module ds_vpipe\.run train\.py": "test_run",
    r"docs/migrating/fine_tuning_loops\.md: deepspeed --num_accelerators 2 ": "test_pipeline_loops",
    r"docs/multinode\.md: python -m ds_vpipe doctor --hostfile": "test_multinode",
    r"docs/multinode\.md: deepspeed --hostfile": "test_multinode",
    r"docs/multinode\.md: (sbatch|srun) .*scripts/(bert\.sbatch|slurm_rank\.sh)": "test_slurm",
    r"docs/(bert|new_model|hugging_face|fine_tuning)\.md: (python|deepspeed) ": "test_model_docs",
    r"docs/new_model\.md: deepspeed\.init_distributed": "test_model_docs",
    r"docs/training\.md: deepspeed --module ds_vpipe\.run --restarts 3 train\.py": "test_restarts",
    r"docs/training\.md: python -m ds_vpipe\.export ": "test_export",
    r"docs/convergence\.md: python -m ds_vpipe forecast ": "test_forecast",
    r"docs/replay\.md: (deepspeed|python -m ds_vpipe replay) ": "test_run_replay",
    r"README\.md: scripts/demo\.sh": "test_demo",
    r"(README|CONTRIBUTING)\.md: scripts/test\.sh": "test_documents",  # runs this line
}


PAGES = sorted(
    str(path.relative_to(ROOT)) for folder in ("", "docs", "docs/migrating") for path in (ROOT / folder).glob("*.md")
)


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
        recording = Recording("test", "recording", 4, 2, row, rank=rank, clock="host")
        recording.save(tmp_path / "timeline" / f"rank{rank}.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("document", ["docs/tuning.md", "docs/balancing.md", "docs/migrating/vpipe.md"])
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
    """By their texts, such as the numbers in bars: other things may change with the version of matplotlib."""

    def texts(path: Path) -> list[str]:
        return re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))

    for argv in commands("docs/tuning.md"):
        main(argv)
    for name in ("before.svg", "after.svg"):
        shipped = texts(ROOT / "docs" / "images" / name)
        assert "time in s" in shipped
        assert len(shipped) > 50
        assert texts(folder / name) == shipped, name


def test_every_command_is_run_by_some_test() -> None:
    """A command that no test is known for fails here, so that documents cannot name what nobody runs."""
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(RUN_BY.values()) <= tests
    found = 0
    for document in PAGES:
        lines = [line for block in blocks(document) for line in block.splitlines()]
        for line in lines:
            if re.match(r"(deepspeed|python|sbatch|srun|pip|docker|apptainer|bash)[ .]|scripts/\w", line):
                assert any(re.match(pattern, f"{document}: {line}") for pattern in RUN_BY), (document, line)
                found += 1
    assert found > 25


def test_outputs_are_quoted() -> None:
    """The tuning guide's tables are among its blocks, so that the test above compares something."""
    assert sum(block.startswith(("stage  layers", "rank  bubble")) for block in blocks("docs/tuning.md")) == 4


def prose(document: str) -> list[str]:
    """Lines outside of fenced blocks."""
    return BLOCK.sub("", (ROOT / document).read_text(encoding="utf-8")).splitlines()


def anchors(document: str) -> set[str]:
    """Names under which the headings of a page are linked to, as GitHub makes them."""
    headings = (line.lstrip("# ") for line in prose(document) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*PAGES, "docs/data/performance_notes.md", "docs/data/convergence_notes.md"])
def test_links_resolve(document: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(document))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = ((ROOT / document).parent / name).resolve() if name else ROOT / document
        assert path.exists(), target
        assert not anchor or anchor in anchors(str(path.relative_to(ROOT))), target


GENERATED = ("docs/compatibility.md", "docs/configuration.md")  # and not wrapped


@pytest.mark.parametrize("document", [page for page in PAGES if page not in GENERATED])
def test_prose_is_wrapped(document: str) -> None:
    assert not [line for line in prose(document) if len(line) > 120 and not line.startswith("|")]


def rows(document: str, heading: str) -> list[list[str]]:
    """Cells of the table whose head begins like this."""
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading}"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_numbers_of_the_readme_are_those_of_the_measurements() -> None:
    """Throughput at the default depths, and the first arm that reaches the synchronous loss on all seeds."""
    lines = (ROOT / "docs" / "data" / "throughput_96ms.jsonl").read_text(encoding="utf-8").splitlines()
    rates = {(row["stages"], row["micro_batches"], row["arm"]): row["rate"] for row in map(json.loads, lines)}
    arms = rows("docs/data/convergence.md", "arm")
    table = rows("README.md", "measured on a CPU, emulated device time")
    assert [int(row[0]) for row in table] == [4, 8, 16]
    soap = {arm[0]: arm[-1] for arm in rows("docs/data/convergence_soap.md", "arm")}
    for stages, *speeds, reached, reached_with_soap in table:
        for micro_batches, speed in zip((1, 8), speeds, strict=True):
            key = int(stages), micro_batches
            if speed:
                assert f"{rates[(*key, 'asp')] / rates[(*key, 'stock')]:.3g}" == speed, key
        found = [arm[-1] for arm in arms if arm[0].startswith(f"K={stages} M=1 ") and "%" in arm[-1]]
        assert [f"{share.replace('%', ' %')} of its time" for share in found] == [reached]
        assert soap[f"K={stages} M=1 soap"].replace("%", " %") == reached_with_soap


def test_the_table_of_versions() -> None:
    table = rows("docs/semantics.md", "stage | W_s")
    for stage, (depth, row) in enumerate(zip(default_depths(4), table, strict=True)):
        wanted = [stage, depth, *(version_used(j, depth, 2) for j in range(8))]
        assert [int(cell) for cell in row] == wanted


def test_the_refusal_in_the_readme_is_printed() -> None:
    with pytest.raises(VPipeConfigError) as refused:
        VPipeConfig.parse({"recompute_ratio": [0.3, 1.3, 0, 0]})
    assert str(refused.value) in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_clients_have_tests_with_the_versions_that_they_were_tried_with() -> None:
    """Those that are installed, or would be: an environment may be older than the client's tests."""
    pinned = dict(re.findall(r"^(\w+)==([\d.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    for script, versions, _, test in rows("docs/migrating.md", "your script | tried with"):
        path = re.fullmatch(r"\[test\]\(\.\./(tests/.*\.py)\)", test)
        assert path is not None, script
        assert (ROOT / path[1]).is_file(), script
        for package, version in re.findall(r"(\w+) (\d+\.\d+)", versions):
            installed = any(metadata.distributions(name=package))
            found = metadata.version(package) if installed else pinned[package]
            assert found.startswith(f"{version}."), package

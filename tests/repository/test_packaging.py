"""Import names, the wheel, and what git tracks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE")
LINKS = {"ds_vpipe/engine": "../engine", "ds_vpipe/models": "../models"}


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize("name", ["engine", "models"])
def test_folder_is_refused_under_its_bare_name(name: str) -> None:
    done = run(sys.executable, "-c", f"import {name}")
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: ")
    assert f"ds_vpipe.{name}" in message


@pytest.mark.parametrize("name", ["engine", "models"])
def test_folder_is_imported_from_the_package(name: str) -> None:
    part = import_module(f"ds_vpipe.{name}")
    assert part.__name__ == f"ds_vpipe.{name}"
    assert name not in sys.modules


@pytest.fixture(params=["links", "no links", "links as text files"])
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the sources as git makes it, or as a zip download or a checkout without links leaves it."""
    copy = tmp_path / "ds_vpipe"
    copy.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    junk = shutil.ignore_patterns("__pycache__")
    for folder in ("ds_vpipe", "engine", "models"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=junk)
    if request.param != "links":
        for link, target in LINKS.items():
            (copy / link).unlink()
            if request.param == "links as text files":
                (copy / link).write_text(target)
    return copy


def test_wheel_holds_every_module(checkout: Path) -> None:
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    done = run(sys.executable, "-c", code, cwd=checkout)
    assert done.returncode == 0, done.stderr
    (wheel,) = (checkout / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))

    expected = {"ds_vpipe/py.typed", "ds_vpipe/timelines/report.html"}
    for package, folder in {"": "ds_vpipe", "engine/": "engine", "models/": "models"}.items():
        for path in (ROOT / folder).rglob("*.py"):
            inner = path.relative_to(ROOT / folder)
            if folder != "ds_vpipe" or inner.parts[0] not in ("engine", "models"):
                expected.add(f"ds_vpipe/{package}{inner.as_posix()}")
    assert {"ds_vpipe/config/block.py", "ds_vpipe/engine/__init__.py", "ds_vpipe/models/bert/__init__.py"} <= expected
    assert {name for name in names if ".dist-info/" not in name and not name.endswith(".json")} == expected
    assert {name.split("/")[0] for name in names} == {"ds_vpipe", "ds_vpipe-0.1.0.dist-info"}


def test_links_point_to_the_folders() -> None:
    for link, target in LINKS.items():
        assert (ROOT / link).is_symlink()
        assert (ROOT / link).readlink() == Path(target)


def test_links_are_tracked_as_links() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    tracked = run("git", "ls-files", "--stage", *LINKS).stdout.splitlines()
    assert {line.split("\t")[1]: line.split()[0] for line in tracked} == dict.fromkeys(LINKS, "120000")


def test_constraints_pin_every_requirement() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.split("==")[0].lower().replace("_", "-") for line in lines if line and not line.startswith("#")}
    assert all("==" in line and "+" not in line for line in lines if line and not line.startswith("#"))
    required = {"torch", "deepspeed", "transformers", "pydantic", "pyyaml", "tokenizers", "numpy", "tqdm", "h5py"}
    assert required | {"matplotlib", "pytest", "ruff", "mypy", "hypothesis", "setuptools"} <= pins

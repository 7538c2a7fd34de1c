"""What containers/run.sh hands to Apptainer, Singularity or Docker; stand-ins print it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ROOT / "containers" / "run.sh"


def run(folder: Path, programs: list[str], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    commands = folder / "bin"
    commands.mkdir()
    for name in programs:
        (commands / name).write_text(f'#!/bin/sh\necho {name} "$@"\n', encoding="utf-8")
        (commands / name).chmod(0o755)
    for name in ("bash", "env"):
        (commands / name).symlink_to(f"/usr/bin/{name}")
    (folder / "image.sif").touch()
    return subprocess.run(
        ["bash", str(RUN), *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={"PATH": str(commands), **environment},
    )  # fmt: skip


@pytest.mark.parametrize("program", ["apptainer", "singularity"])
def test_an_image_file(tmp_path: Path, program: str) -> None:
    done = run(tmp_path, [program, "nvidia-smi"], "image.sif", "deepspeed", "train.py", BIND="/data")
    bound = f"--pwd {tmp_path} --bind {tmp_path} --bind /data --nv"
    assert done.stdout == f"{program} exec {bound} image.sif deepspeed train.py\n"


def test_an_image_of_docker(tmp_path: Path) -> None:
    done = run(tmp_path, ["docker"], "ds_vpipe", "deepspeed", "train.py")
    options = f"--rm --ipc=host --network=host --workdir {tmp_path} --volume {tmp_path}:{tmp_path}"
    assert done.stdout == f"docker run {options} ds_vpipe deepspeed train.py\n"


def test_a_folder_with_a_blank_in_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    done = run(folder, ["docker"], "ds_vpipe", "true")
    options = f"--rm --ipc=host --network=host --workdir {folder} --volume {folder}:{folder}"
    assert done.stdout == f"docker run {options} ds_vpipe true\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["image.sif"], "usage: containers/run.sh"),
        (["image.sif", "true"], "needs apptainer or singularity, and neither is installed"),
        (["ds_vpipe", "true"], "no file ds_vpipe, and docker is not installed"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], says: str) -> None:
    done = run(tmp_path, [], *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_images_install_what_there_is() -> None:
    """Files that the definitions copy exist, and the torch version is the tested one."""
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    for name in ("Dockerfile", "ds_vpipe.def"):
        text = (ROOT / "containers" / name).read_text(encoding="utf-8")
        assert torch in text
    copied = [
        line.split()[1:-1] for line in (ROOT / "containers/Dockerfile").read_text().splitlines() if line[:5] == "COPY "
    ]
    assert copied
    assert all((ROOT / path).exists() for paths in copied for path in paths)
    assert os.access(RUN, os.X_OK)

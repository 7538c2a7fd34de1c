"""Versions of other packages that are refused, before anything is trained with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
import torch

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.requirements import refuse_others

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+1fe3bc3f"])
def test_the_version_that_is_supported(version: str) -> None:
    for torch_version in ("2.15.0.dev20261101+cpu", "2.11.0a0+6c54e8f.nv26.03"):
        refuse_others({"deepspeed": version, "torch": torch_version})
    refuse_others({"deepspeed": deepspeed.__version__, "torch": torch.__version__})


@pytest.mark.parametrize(
    ("package", "version", "wanted"),
    [
        ("deepspeed", "0.19.7", "==0.19.8"),
        ("deepspeed", "0.19.9", "==0.19.8"),
        ("deepspeed", "0.20.0", "==0.19.8"),
        ("deepspeed", "unknown", "==0.19.8"),
        ("torch", "2.10.0+cu128", ">=2.11"),
    ],
)
def test_others(package: str, version: str, wanted: str) -> None:
    with pytest.raises(VPipeConfigError) as refusal:
        refuse_others({"transformers": "5.19.0", package: version})
    assert str(refusal.value) == (
        f'version of {package}: got "{version}"; allowed: {package}{wanted}; pip install "{package}{wanted}"'
    )


@pytest.mark.parametrize(
    ("words", "status"),
    [(["-c", "import ds_vpipe; ds_vpipe.initialize"], 1), (["-m", "ds_vpipe.run", __file__], 2),
     ([str(ROOT / "models/bert/train.py")], 2)],
)  # fmt: skip
def test_every_way_in_refuses_them(tmp_path: Path, words: list[str], status: int) -> None:
    (tmp_path / "sitecustomize.py").write_text("import deepspeed\ndeepspeed.__version__ = '0.19.7'\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status
    *before, line = done.stderr.strip().splitlines()
    assert 'version of deepspeed: got "0.19.7"; allowed: deepspeed==0.19.8; pip install "deepspeed==0.19.8"' in line
    if words[0] != "-c":  # where the script itself imports, it is an exception like others
        assert not any("Traceback" in text for text in before), done.stderr

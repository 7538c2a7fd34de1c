"""The README's first command, with fewer updates, on random tokens."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.mp
def test_the_demo(tmp_path: Path) -> None:
    small = ["--max_steps", "3", "--synthetic", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run([str(ROOT / "scripts" / "demo.sh"), *small], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Finished 3 updates" in done.stdout
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"loss.png", "metrics.jsonl", "run"}
    command = (tmp_path / "run" / "run" / "commands.log").read_text(encoding="utf-8")
    assert "train.py" in command
    assert "bert_tiny_cpu.json" in command

"""The README's first command, for seconds and on random tokens."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.mp
def test_the_demo(tmp_path: Path) -> None:
    words = ["--seconds", "1", "--synthetic", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run([str(ROOT / "scripts" / "demo.sh"), *words], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warn" not in (done.stdout + done.stderr).lower()
    assert re.search(r"^ *DeepSpeed +\d.*\n *ds_vpipe +\d", done.stdout, re.MULTILINE)
    assert re.search(r"^ds_vpipe trains \d\.\d\d times as many micro-batches per second", done.stdout, re.MULTILINE)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"loss.png", "report.html", "timelines"}
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "recording: DeepSpeed's schedule" in report.replace("&#x27;", "'")
    assert "recording: ds_vpipe" in report
    assert re.search(r"<td>replan at update 2\d: \[[\d, ]+\] ", report)  # layers have moved, or it was not worth it


def test_when_a_loss_comes_down_to_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    demo = importlib.import_module("demo")
    run = demo.Run("", None, None, None, losses=[(0.0, 8.0), (3.0, 4.0), (5.0, 6.0), (7.0, 2.0)])
    assert [run.reaches(level) for level in (6.0, 4.0, 3.0, 1.0)] == [1.5, 3.0, 6.5, None]

"""Two hosts: scripts/multinode_test.sh, where network namespaces may be made."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "multinode_test.sh"
NOT_HERE = 77


@pytest.mark.mp
def test_two_hosts_killed_and_resumed() -> None:
    """Also in CI; where it cannot run the reason of the skipped test says why."""
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, timeout=3000)
    if done.returncode == NOT_HERE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses equal those of the undisturbed run bit for bit" in done.stdout

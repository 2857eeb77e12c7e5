"""Memory that a rank's threads have freed goes back to the system with the main thread's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20


def test_memory_that_a_thread_has_freed_goes_back() -> None:
    """The end of a thread's own arena stays: 12 MiB here, up to 64 MiB in ranks, whose budget did not hold."""
    command = [sys.executable, "-m", "tests.unit.machine.arena"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 * MIB

"""Memory that a rank has freed stays for its next block, and goes back where it must, of all of its threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20


def test_memory_that_is_freed_is_used_again_and_goes_back_where_it_must() -> None:
    """glibc gave the end of its heap back after each block, 3,072 pages here. And the end of a thread's own arena
    stayed when all was to go back: 12 MiB here, up to 64 MiB in ranks, whose budget did not hold."""
    command = [sys.executable, "-m", "tests.unit.machine.arena"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    left, faults = map(int, done.stdout.split())
    assert left < 4 * MIB
    assert faults < 100

"""Memory that a rank has freed stays for its next block, and goes back where it must, of all of its threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallax.machine.host import coalescing_variables

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20


def test_memory_that_is_freed_is_used_again_and_goes_back_where_it_must() -> None:
    """glibc gave the end of its heap back after each block: of 96 MiB here 24,544 pages, also after a freed block of 16
    MiB raised its threshold. And the end of a thread's own arena stayed when all was to go back: 12 MiB here, up to 64
    MiB in ranks, whose budget did not hold."""
    command = [sys.executable, "-m", "tests.unit.machine.arena"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    left, faults = map(int, done.stdout.split())
    assert left < 4 * MIB
    assert faults < 100


def test_freed_tensors_are_merged_with_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heap of 1,353 MiB held 432 MiB of a GPT: pieces between freed tensors stayed in malloc's caches, so tensors of
    other sizes did not fit. Blocks of 8 MiB in turns of two sizes took up to 8.9 MB more."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    command = [sys.executable, "-m", "tests.unit.machine.aligned"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **coalescing_variables()},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) == 0

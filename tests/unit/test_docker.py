"""The container's recipe: hadolint finds nothing, and every file that it copies reaches the build."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
HADOLINT = Path(sysconfig.get_path("scripts")) / "hadolint"


@pytest.mark.skipif(
    not HADOLINT.exists(), reason="hadolint is not installed (it comes with the dev extra)"
)
def test_hadolint_finds_nothing() -> None:
    # An empty configuration: nobody's own one may hide a finding.
    command = [
        HADOLINT,
        "--config",
        "/dev/null",
        "--no-color",
        "--failure-threshold",
        "style",
        DOCKERFILE,
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    lines = [line.split() for line in DOCKERFILE.read_text().splitlines()]
    copied = {
        word
        for line in lines
        if line[:1] == ["COPY"] and "--from" not in line[1]
        for word in line[1:-1]
    }
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied == kept
    assert not [name for name in copied if not (ROOT / name).exists()]

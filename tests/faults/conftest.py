"""A working directory in which nothing may be left running."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from parallax import cli
from parallax.model.profiling import clock
from parallax.run import feedback
from tests.distributed.pool import ROOT
from tests.faults.commands import running
from tests.leaks import GRACE_SECONDS


@pytest.fixture(autouse=True)
def kept_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run beside each other, so the machine is busy and steps take longer than predicted. The profiles of their
    models stay in the cache all the same."""
    monkeypatch.setattr(clock, "disturbance", lambda *_: 1.0)
    monkeypatch.setattr(feedback, "contradiction", lambda *_: "")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what still runs in it afterwards, and does not end by itself, fails the test."""
    folder = tmp_path / "here"
    for path in (folder, tmp_path / "tmp"):
        path.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield folder
    _, left = psutil.wait_procs(running(folder), timeout=GRACE_SECONDS)
    lines = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(process.cmdline())
            process.kill()
    assert not lines


@pytest.fixture
def port() -> int:
    """One that is free on this host."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def called(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """As ``call``, but this process is the launcher, which saves a start; ranks are processes of their own."""
    folder = str(here.parent / "tmp")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{here}")
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.main(arguments)
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def command_output(here: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a command prints with ``--json``; its exit code must be 0 and nothing else may be printed."""

    def run(*arguments: str) -> Any:
        capfd.readouterr()
        assert cli.main([*arguments, "--json"]) == 0
        out, _ = capfd.readouterr()
        (line,) = out.splitlines()
        return json.loads(line)

    return run


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "small", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can be mounted by root alone")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)

"""Ranks that never start, cannot open their port, or have another world size are named, and the run ends in time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.agent import agents_store
from tests.distributed.pool import ROOT

pytestmark = pytest.mark.faults

JOIN_SECONDS = 3


@pytest.fixture(params=["of rank 0", "of torchrun's agent"])
def place(
    request: pytest.FixtureRequest, port: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """The port of the store at which ranks meet."""
    if request.param == "of rank 0":
        yield port
    else:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        with agents_store() as served:
            yield served


def start(
    folder: Path, rank: int, size: int, port: int, join_seconds: int = JOIN_SECONDS
) -> subprocess.Popen[str]:
    """One rank, by hand."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    which = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    return subprocess.Popen(
        [sys.executable, "-m", "parallax", "train", "experiment=tiny"],
        cwd=folder,
        env={**os.environ, **where, **which, "PARALLAX_JOIN_SECONDS": str(join_seconds)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Return the exit code and Parallax's messages."""
    _, err = process.communicate(timeout=60.0)
    return process.returncode, [line for line in err.splitlines() if line.startswith("parallax:")]


def test_a_rank_that_never_starts_is_named_and_ends_the_run(tmp_path: Path, place: int) -> None:
    code, output = ended(start(tmp_path, 0, 2, place))
    assert code == 1
    assert output[0] == "parallax: waiting for 1 of 2 ranks: rank 1; up to 3 s"
    assert "rank 1 of 2 has not joined within 3 s" in output[1]


def test_rank_0_never_comes(tmp_path: Path, place: int) -> None:
    code, output = ended(start(tmp_path, 1, 2, place))
    assert code == 1
    assert output[0] == f"parallax: waiting for rank 0 of 2 at 127.0.0.1:{place}, up to 3 s"
    assert f"rank 0 of 2 has not joined at 127.0.0.1:{place} within 3 s" in output[1]


def test_a_port_that_another_program_has(tmp_path: Path) -> None:
    """Which answers nothing: torch would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        first, second = start(tmp_path, 0, 2, port), start(tmp_path, 1, 2, port)
        code, output = ended(first)
        assert code == 2
        assert f"MASTER_PORT={port}" in output[0]
        assert "choose a free port" in output[0]
        code, output = ended(second)
        assert code == 1
        assert "whether another program has that port" in output[-1]


def test_ranks_with_another_world_size_are_named(tmp_path: Path, place: int) -> None:
    both = start(tmp_path, 0, 2, place, 60), start(tmp_path, 1, 3, place, 60)
    for code, output in map(ended, both):
        assert code == 2
        assert "as one of 3" in output[-1]
        assert "as one of 2" in output[-1]
        assert "(WORLD_SIZE)" in output[-1]

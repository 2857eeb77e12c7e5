"""A Slurm for the session, and a folder for each test in which nothing may be left running."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import ROOT
from tests.faults.commands import running
from tests.leaks import lasting
from tests.slurm.cluster import Slurm, missing


@pytest.fixture(scope="session")
def cluster() -> Iterator[Slurm]:
    if reason := missing():
        pytest.skip(reason)
    with lasting():
        slurm = Slurm()
        try:
            slurm.start()
        except BaseException:
            slurm.close()
            raise
    yield slurm
    slurm.close()


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of this machine's measurements: without it each job would measure again."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def slurm(
    cluster: Slurm, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Slurm]:
    """Its jobs run in a folder of this test's, and have gone with it."""
    folder = tmp_path / "here, and there"  # quoted wherever it goes
    temporary = tmp_path / "tmp"
    for path in (folder, temporary):
        path.mkdir()
    monkeypatch.chdir(folder)
    for key, value in cluster.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(measured))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield cluster
    cluster.cancel_all()
    cluster.wait_for(lambda: running(folder) == [], "the last process", 20)
    assert [path.name for path in temporary.iterdir() if "torchinductor" not in path.name] == []

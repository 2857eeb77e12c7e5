from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# As in a shell's background jobs; the tests' own would have it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.distributed.pool import Pool  # noqa: E402


def pytest_collection_finish() -> None:
    """Many tests collect garbage, and would look through the half a million objects of all libraries every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def no_leak(request: pytest.FixtureRequest) -> Iterator[None]:
    """A leaked process, thread, open file or environment variable fails the test that left it."""
    if "pool" in request.fixturenames:
        request.getfixturevalue("pool")  # its workers belong to the session
    this = psutil.Process()
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    workers = set()
    if "pool" in request.fixturenames:
        workers = {process.pid for process, _ in request.getfixturevalue("pool")._workers}
    children = [
        c for c in this.children() if c.pid not in workers and c.pid not in _session_children(this)
    ]
    left = [t.name for t in threading.enumerate() if t not in threads and not t.daemon]
    changed = {
        k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k)
    }
    changed = {
        k for k in changed if k != "PYTEST_CURRENT_TEST" and not k.startswith("TORCHINDUCTOR")
    }
    assert not left, f"threads left over: {left}"
    assert not changed, f"environment variables changed: {changed}"
    alive = [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
    assert not alive, f"processes left over: {alive}"


def _session_children(this: psutil.Process) -> set[int]:
    """multiprocessing's resource tracker and the pool's workers outlive a test."""
    return {
        c.pid
        for c in this.children()
        if any(word in " ".join(c.cmdline()) for word in ("resource_tracker", "spawn_main"))
    }


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "swap"

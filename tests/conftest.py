from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

gc.disable()  # until all is imported, which leaves next to no garbage

import pytest  # noqa: E402
import torch  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# As in a shell's background jobs; the tests' own would have it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.distributed.pool import Pool  # noqa: E402
from tests.leaks import no_leak, own_temporary_folder  # noqa: E402

__all__ = ["no_leak", "own_temporary_folder"]


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Many tests collect garbage, and would look through the half a million objects of all libraries every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A command that plans in this process sets how many threads compute; sums of the next test would be others."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "swap"

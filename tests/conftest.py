from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

gc.disable()  # until all is imported, which leaves next to no garbage

import hypothesis  # noqa: E402
import pytest  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")
# As in a shell's background jobs; the tests' own would have it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.leaks import no_leak, own_temporary_folder  # noqa: E402

# The process that hands tests to pytest-xdist's workers imports this, too, and no torch.
if TYPE_CHECKING:
    from tests.distributed.pool import Pool

__all__ = ["no_leak", "own_temporary_folder"]

hypothesis.settings.register_profile("untimed", deadline=None)  # no test depends on the machine
hypothesis.settings.load_profile("untimed")


LONG = "slow", "faults", "nodes", "slurm", "thorough"  # marks of tests of which a part may run
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_cases: Counter[str] = Counter()  # collected, by test


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--part N``: of long tests every N-th; from which on, ``--seed`` says: the time of the last commit, unless it is
    given. N seeds in a row run all. Examples of properties are drawn with the same seed."""
    parser.addoption("--part", type=int, default=1, metavar="N", help="of long tests, every N-th")
    parser.addoption("--seed", type=int, metavar="N", help="which of them, and which examples")


def pytest_configure(config: pytest.Config) -> None:
    """Before pytest-xdist hands the options to its workers."""
    if config.option.seed is None:
        reported = subprocess.run(
            ["git", "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False
        )
        config.option.seed = int(reported.stdout.strip() or 0)
    hypothesis.core.global_force_seed = config.option.seed


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    part, seed = config.option.part, config.option.seed
    whole = "" if part == 1 else f"a part of the long tests: --part {part} "
    terminalreporter.write_line(f"{whole}--seed {seed}")


@pytest.hookimpl(trylast=True)  # after the choice by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, seed = config.option.part, config.option.seed
    long = [item for item in items if any(item.get_closest_marker(mark) for mark in LONG)]
    left = [item for place, item in enumerate(long) if (place + seed) % part]
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark cases of a ``sampled(n)`` test as slow, all but about one in ``n``, of which the default is 4.

    Tests of several processes take longest. Of theirs, half as many are quick: of one without the mark, about one case
    in two. Multiples of the golden ratio, modulo 1, are distributed evenly and never repeat, so no value of a long
    product is left out by its position. A short product may lose values, which then only the slow tests have.
    """
    if any(map(item.get_closest_marker, LONG)):
        return
    sampled = item.get_closest_marker("sampled")
    one_of = (sampled.args or [4])[0] if sampled else 1
    if item.path.parent.name in ("distributed", "sim"):
        one_of *= 2
    if one_of > 1:
        test = item.nodeid.partition("[")[0]
        if _cases[test] * _GOLDEN_RATIO % 1 >= 1 / one_of:
            item.add_marker("slow")
        _cases[test] += 1


def pytest_collection_finish() -> None:
    import torch

    from tests.natures import remember_natures
    from tests.peaks import remember_peaks

    torch.set_num_threads(1)
    remember_natures()
    remember_peaks()
    gc.freeze()
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
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    from tests.distributed.pool import Pool

    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "swap"

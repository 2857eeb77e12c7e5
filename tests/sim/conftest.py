"""Workers whose torch has the simulated accelerator. It is built on first use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool
from tests.sim.build import library, missing


@pytest.fixture(scope="session")
def sim_pool() -> Iterator[Pool]:
    if why := missing():
        pytest.skip(why)
    library()
    workers = Pool()
    yield workers
    workers.close()

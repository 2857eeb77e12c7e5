"""Every wait of the swap is missed by the simulated accelerator when it is taken away."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.sim.mutants import judged, waits

WAITS = waits()


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(WAITS)), ids=[str(wait) for wait in WAITS])
def test_a_wait_is_missed(sim_pool: Pool, number: int) -> None:
    assert judged(number)

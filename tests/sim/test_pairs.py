"""Two ranks on simulated devices: what they send arrives, no more is held than may be, and who is done may leave."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.sim import jobs


@pytest.mark.sampled
@pytest.mark.parametrize("variant", ["direct", "staged"])
@pytest.mark.parametrize("what", ["sends", "leaves early"])
def test_between_two(sim_pool: Pool, what: str, variant: str) -> None:
    """Senders that did not wait would hold all messages at once, and a rank that closed would take away those that
    had not been received."""
    for error, races, _ in sim_pool.run(jobs.pair, 2, f"{what} {variant}"):
        assert not error
        assert not races, races[0]

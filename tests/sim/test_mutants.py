"""Every wait of the package is missed by the simulated accelerator when it is taken away, but for those named here."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.sim.mutants import NO_WAITS, judged, waits, waits_of_any_kind

# By file and function: why nothing is wrong without it in what is run here.
UNNOTICED = {
    "runtime/replicas/compress.py reduce": "of gloo alone, which ends sums on threads of its own and carries no tensor "
    "of a simulated device; its group ends them in order",
    "runtime/saving.py begin": "orders files of checkpoints, which are written from copies in host memory",
    "runtime/saving.py copy": "the same, of copies in the memory of other hosts",
}
ALL = waits()


def test_what_is_unnoticed_is_there() -> None:
    assert set(UNNOTICED) <= {wait.place for wait in ALL}


def test_what_is_no_wait_is_there() -> None:
    assert set(NO_WAITS) <= {wait.place for wait in waits_of_any_kind()}
    assert not set(NO_WAITS) & {wait.place for wait in ALL}


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(ALL)), ids=[str(wait) for wait in ALL])
def test_a_wait_is_missed(sim_pool: Pool, number: int) -> None:
    if ALL[number].place in UNNOTICED:
        pytest.skip(UNNOTICED[ALL[number].place])
    assert judged(number)

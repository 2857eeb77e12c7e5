"""Every wait of the package is missed by the simulated accelerator when it is taken away, but for those named here."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.sim.mutants import NO_WAITS, verdict_on, waits, waits_of_any_kind

_WAITS_NEXT = "only a query whether a wait would be short: the wait follows"
# By file and function, with what is called where there are others: why nothing is wrong without it in what is run here.
UNNOTICED = {
    "runtime/replicas/compress.py reduce": "of gloo alone, which ends sums on threads of its own and carries no tensor "
    "of a simulated device; its group ends them in order",
    "swap/activations/manager.py _free_bytes_for": "of a loop that asks again whether the transfer is over: it would "
    "not sleep meanwhile",
    "swap/offload_benchmark.py bring_back": "of a measurement before there is a run: without it what has "
    "not left yet does not come back, and a figure is wrong",
    "machine/device.py done: self._event.query()": "of a mark, about which no code asks",
    "machine/device.py seconds": "of a figure",
    "swap/activations/accounting.py time_finished": "of a figure",
    "swap/lms/offloaded_states.py is_written": _WAITS_NEXT,
    "swap/lms/states.py _finish_writes": _WAITS_NEXT,
    "swap/stores/store.py done: self._own_future().done()": _WAITS_NEXT,
    "runtime/channels/staging.py close: self._released[0][1].done()": "queried when the device has ended all work, "
    "unless it failed",
    "swap/parameters/chunks.py has_ended: has_ended(pending)": _WAITS_NEXT,
    "swap/parameters/chunks.py is_written": _WAITS_NEXT,
    "swap/parameters/offloaded.py _collect_written": _WAITS_NEXT,
    "runtime/replicas/streamed_sum.py _read": _WAITS_NEXT,
    "runtime/replicas/streamed_sum.py _launch: has_ended(read.work)": _WAITS_NEXT,
    "runtime/replicas/streamed_sum.py _write: bucket.work.is_completed()": _WAITS_NEXT,
    "runtime/replicas/streamed_sum.py _close": _WAITS_NEXT,
    "runtime/saving.py begin": "orders files of checkpoints, which are written from copies in host memory",
}
ALL = waits()


def test_what_is_unnoticed_is_there() -> None:
    assert all(any(wait.is_in({name}) for wait in ALL) for name in UNNOTICED)


def test_what_is_no_wait_is_there() -> None:
    found = [wait for wait in waits_of_any_kind() if wait.is_in(NO_WAITS)]
    assert all(any(wait.is_in({name}) for wait in found) for name in NO_WAITS)


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(ALL)), ids=[str(wait) for wait in ALL])
def test_a_wait_is_missed(sim_pool: Pool, number: int) -> None:
    if ALL[number].is_in(UNNOTICED):
        pytest.skip("named as unnoticed, with the reason")
    assert verdict_on(number)

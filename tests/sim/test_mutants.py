"""Every wait of the swap is missed by the simulated accelerator when it is taken away, but for those named here."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.sim.mutants import ROOT, Wait, judged, waits

# By file and function: why nothing is wrong without it in what is run here.
UNNOTICED = {
    "swap/lms/below.py free": "who frees places has waited; or a scope ends in the middle of a step, not tried",
    "swap/lms/below.py _copy": "between steps no state is on its way; a copy in the middle of a step is not tried",
    "swap/optimizer/buckets.py reset": "only after a step that failed, which is not tried",
    "swap/parameters/chunks.py write_behind": "bounds what is held in host memory, not what is right",
    "swap/parameters/chunks.py finish": "the end of a run; the store waits again when it closes",
    "swap/parameters/chunks.py drop": "a step has read the gradient by then, which waits for its write",
    "swap/parameters/chunks.py discard": "the end of a run; the store waits again when it closes",
    "swap/parameters/chunks.py _write_master": "the next step reads it much later; the file is checked by its sum then",
    "swap/parameters/flat.py release": "blocks that come are given up only where another order begins, not tried",
    "swap/parameters/flat.py restore": "parameters that stop streaming, as at the end of a scope, are not tried",
    "swap/parameters/flat.py discard": "the end of a run; the store waits again when it closes",
    "swap/stores/store.py done": "tells of a failed transfer; failures are tried elsewhere",
}


def place(wait: Wait) -> str:
    return f"{wait.path.relative_to(ROOT / 'parallax')} {wait.function}"


WAITS = waits()


def test_what_is_unnoticed_is_there() -> None:
    assert set(UNNOTICED) <= {place(wait) for wait in WAITS}


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(WAITS)), ids=[str(wait) for wait in WAITS])
def test_a_wait_is_missed(sim_pool: Pool, number: int) -> None:
    if place(WAITS[number]) in UNNOTICED:
        pytest.skip(UNNOTICED[place(WAITS[number])])
    assert judged(number)

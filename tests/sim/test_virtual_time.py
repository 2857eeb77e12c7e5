"""In virtual time the runtime does what the planner predicts, and its spans say where the time went."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.sim import jobs


@pytest.fixture(scope="module")
def figures(sim_pool: Pool) -> dict[str, Any]:
    (found,) = sim_pool.run(jobs.timed, 1)
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("directive", ["keep", "recompute", "offload"])
def test_a_step_takes_what_was_predicted(figures: dict[str, Any], directive: str) -> None:
    found = figures[directive]
    assert found["seconds"] == pytest.approx(found["predicted"], rel=0.05)


@pytest.mark.slow
def test_offloading_hides(figures: dict[str, Any]) -> None:
    """Where the planner says so, with half of the activations on the device."""
    keep, offload = figures["keep"], figures["offload"]
    assert offload["predicted"] <= 1.02 * keep["predicted"]
    assert offload["seconds"] <= 1.02 * keep["seconds"]
    assert offload["high_water"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("directive", ["keep", "recompute", "offload"])
def test_spans_are_the_devices(figures: dict[str, Any], directive: str) -> None:
    """By the host's clock all of a step was in UPDATE, which waits for everything."""
    found = figures[directive]
    computing = found["by_kind"]["forward"] + found["by_kind"]["backward"]
    assert computing == pytest.approx(found["seconds"], rel=0.05)
    assert found["by_kind"].get("update", 0.0) < 0.02 * found["seconds"]


@pytest.mark.slow
def test_waits_of_the_stream_are_stalls(figures: dict[str, Any]) -> None:
    """Behind a link that is too slow. Where the host is held up, by whatever else runs on it, some are longer by
    hundredths of a second, so those of the quick link tell nothing."""
    assert figures["keep"]["waited"]["backward"] == 0
    late = figures["late"]["seconds"] - figures["keep"]["seconds"]
    waited = sum(figures["late"]["waited"].values())
    assert late > 0.02 * figures["keep"]["seconds"]
    assert waited == pytest.approx(late, rel=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("directive", ["keep", "recompute", "offload"])
def test_the_device_may_be_as_small_as_was_planned(figures: dict[str, Any], directive: str) -> None:
    """The allocator refuses more than the plan's peak, and no request exceeded it."""
    assert 0.5 * figures[directive]["planned_bytes"] < figures[directive]["peak_bytes"]
    assert figures[directive]["peak_bytes"] <= figures[directive]["planned_bytes"]


@pytest.mark.slow
def test_what_a_trial_waits_for_is_no_work(sim_pool: Pool) -> None:
    """The stream waited, and the host did not: plans that offload looked as much longer as the link took."""
    ((longer, one_way),) = sim_pool.run(jobs.offloading, 1)
    assert one_way > 1
    assert longer < 0.02 * one_way


@pytest.mark.slow
def test_what_was_not_planned_is_refused_as_torch_does(figures: dict[str, Any]) -> None:
    assert "out of memory" in figures["too small"]


def test_inputs_are_copied_while_computing_where_the_plan_has_memory(sim_pool: Pool) -> None:
    """Their bytes are in the plan's peak, and a device that cannot hold them gets them when they are needed."""
    (found,) = sim_pool.run(jobs.wide_inputs, 1)
    (ahead, peak, planned), (at_once, less, least) = found["ahead"], found["at once"]
    assert found["chosen"] == (True, False)
    assert ahead < 0.7 * at_once
    assert peak - less == planned - least == found["inputs"]
    assert (peak <= planned, less <= least) == (True, True)

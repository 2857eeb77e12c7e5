"""The swap on a simulated accelerator: results are plain training's, and every access waits for what it needs."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.sim import jobs

PARTS = [
    *("activations host eager", "activations host lazy", "activations disk eager"),
    *("activations host verified", "activations early host", "activations early disk"),
    *("activations dropped host", "activations dropped disk"),
    *("parameters host", "parameters host adamw", "parameters disk"),
    *("host optimizer", "first span", "scope host", "scope disk"),
]
MIDWAY = [
    *("other orders host", "other orders disk", "stops streaming host", "stops streaming disk"),
    *("stops at once host", "stops at once disk", "written twice disk"),
    *("masters host", "masters disk", "gradients lost", "gradients cleared", "gradients read"),
    *("weights set while read", "owner fails", "writes lost"),
    *("step fails host", "step fails disk", "scope ends midway host", "scope ends midway disk"),
    *("states read", "states read in one bucket"),
    *("states set back", "states set back in one bucket", "states lost"),
    *(
        "loop clips host",
        "loop clips disk",
        "loop changes weights host",
        "loop changes weights disk",
    ),
    *("loop holds gradients host", "loop holds gradients disk"),
    *("another stream host", "another stream disk"),
    *("moves to another stream", "begins on another stream"),
    "steps fail in backwards",
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "lateness",
    [
        2,
        pytest.param(0, marks=pytest.mark.thorough),
        pytest.param(9, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("name", PARTS + MIDWAY)
def test_trains_alike_without_a_race(sim_pool: Pool, name: str, lateness: int) -> None:
    """``lateness``: transfers are complete at the first query, or later."""
    ((error, races, counts),) = sim_pool.run(jobs.scenario, 1, name, lateness)
    assert not error
    assert not races, races[0]
    if name in PARTS and "first span" not in name and "dropped" not in name:
        assert counts["kernels"] > 500


def test_all_parts_are_tried(sim_pool: Pool) -> None:
    assert sim_pool.run(jobs.scenario_names, 1) == [PARTS + MIDWAY]


def test_a_missing_wait_is_seen(sim_pool: Pool) -> None:
    """Otherwise the assertions above prove nothing."""
    ((_, races, _),) = sim_pool.run(jobs.missing_wait, 1)
    ((what, _),) = races
    assert what.startswith("a copy up on stream ")
    assert what.endswith(
        " writes memory that the block's last user on stream 0 wrote: no wait between them"
    )


def test_unread_stalls_do_not_accumulate(sim_pool: Pool) -> None:
    """Two events for each wait stayed for as long as a plain loop swapped."""
    assert sim_pool.run(jobs.stalls, 1) == [(0, 3)]


def test_events_are_recorded_again(sim_pool: Pool) -> None:
    """Two were made for every copy, and a driver takes longer to make one than to record it."""
    ((made, races),) = sim_pool.run(jobs.events_made, 1)
    assert made <= 4
    assert not races


def test_dropout_is_the_same_on_every_device(sim_pool: Pool) -> None:
    """Each device had a generator of its own kind, and drew other masks."""
    assert sim_pool.run(jobs.masks, 1) == [(True, 0, 0)]


def test_threads_that_copy_stay_on_their_streams(sim_pool: Pool) -> None:
    """Both were in one stream object, which knew where the last one had been: the first to leave went there."""
    assert sim_pool.run(jobs.two_threads, 1) == [[True, True]]

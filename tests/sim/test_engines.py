"""Engines on simulated accelerators: one rank and several, on one device and on one each, train as a CPU does."""

from __future__ import annotations

import statistics
from functools import cache, partial
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.plans import DRAINING, stages_each
from tests.sim import jobs

STAGED_TOO = [
    pytest.param(False, id="staged", marks=pytest.mark.thorough),
    pytest.param(True, id="direct"),
]
ROWS_APART = (
    1e-6  # relative; rows of a replica are summed in another order, and kernels round by alignment
)
OFFLOADED = {"parameter_offload": 1.0, "optimizer_offload": 1.0}


@cache
def on_a_cpu(pool: Pool) -> list[float]:
    ((found),) = pool.run(partial(jobs.engine, "cpu", (1,), {}), 1)
    losses: list[float] = found["losses"]
    return losses


def check(
    pool: Pool, replicas: tuple[int, ...], options: dict[str, Any], *, direct: bool, **more: Any
) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = pool.run(
        partial(jobs.engine, "sim", replicas, options, direct=direct, **more), sum(replicas)
    )
    for ran in ranks:
        error, races, _ = ran["verdict"]
        assert not error
        assert not races, races[0]
        assert ran["losses"] == pytest.approx(on_a_cpu(pool), rel=ROWS_APART)
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("direct", STAGED_TOO)
@pytest.mark.parametrize("schedule", DRAINING)
def test_schedules(sim_pool: Pool, schedule: str, direct: bool) -> None:
    """NCCL's habits included: what connects late would make the ranks of a pipeline wait for each other."""
    each = stages_each(schedule, 2)
    directive = "offload" if direct else "recompute"
    options = {"schedule": schedule, "interleave": each, "directive": directive}
    check(sim_pool, (1, 1), options, direct=direct)


@pytest.mark.sampled
@pytest.mark.parametrize("direct", STAGED_TOO)
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        ((2,), {"optimizer_offload": 1.0}),
        ((2,), {"shard": True}),
        ((1, 2), {"directive": "offload", "tier": "disk"}),
        ((2, 1), OFFLOADED),
        ((2, 1), {**OFFLOADED, "schedule": "zb-h1"}),
        ((1, 1), {**OFFLOADED, "schedule": "zb-v", "interleave": 2, "tier": "disk"}),
        ((2,), {**OFFLOADED, "schedule": "breadth-first", "interleave": 6}),
        ((2, 1), {**OFFLOADED, "schedule": "breadth-first", "interleave": 3, "group": 2}),
        pytest.param((2,), {}, marks=pytest.mark.thorough),
        pytest.param((2, 2), {"directive": "offload"}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_replicas(
    sim_pool: Pool, replicas: tuple[int, ...], options: dict[str, Any], direct: bool
) -> None:
    check(sim_pool, replicas, options, direct=direct)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {"directive": "keep"},
        {"directive": "offload"},
        {"directive": "offload", "tier": "disk"},
        {"directive": "recompute"},
        {"optimizer_offload": 1.0},
        OFFLOADED,
        {**OFFLOADED, "tier": "disk", "directive": "offload"},
        {**OFFLOADED, "schedule": "breadth-first", "interleave": 6},
        {**OFFLOADED, "schedule": "breadth-first", "interleave": 6, "group": 2, "tier": "disk"},
        {**OFFLOADED, "schedule": "zb-h1"},
    ],
    ids=str,
)
def test_one_rank(sim_pool: Pool, options: dict[str, Any]) -> None:
    check(sim_pool, (1,), options, direct=False)


def test_recurrent_weights_in_one_buffer_stay_and_the_rest_is_offloaded(sim_pool: Pool) -> None:
    ((expected, every),) = sim_pool.run(partial(jobs.recurrent, {}), 1)
    ((losses, resident),) = sim_pool.run(partial(jobs.recurrent, OFFLOADED), 1)
    assert losses == expected
    assert resident == {name for name in every if ".cells." in name}
    assert 0 < len(resident) < len(every)


@pytest.mark.parametrize(
    "options", [{"optimizer_offload": 1.0}, {"optimizer_offload": 0.5, "tier": "disk"}], ids=str
)
def test_gradients_being_offloaded_are_not_cleared(sim_pool: Pool, options: dict[str, Any]) -> None:
    """Those of a step that was never taken."""
    check(sim_pool, (1,), options, direct=False, fails="gradients")


def test_on_a_stream_of_ones_own(sim_pool: Pool) -> None:
    """Threads that step gave their work to the first stream, and cleared gradients that were new."""
    check(sim_pool, (1,), {"optimizer_offload": 1.0}, direct=False, stream=True)


@pytest.mark.sampled
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        ((1,), {}),
        ((1,), {"optimizer_offload": 1.0, "directive": "offload"}),
        ((1, 1), {"directive": "offload", "tier": "disk"}),
        ((1, 1), {"schedule": "zb-h1"}),
        ((1, 2), {"directive": "recompute"}),
    ],
    ids=str,
)
def test_the_host_waits_once_in_a_step(
    sim_pool: Pool, replicas: tuple[int, ...], options: dict[str, Any], direct: bool
) -> None:
    """For the loss. It was twice for each micro-batch, for its inputs and targets, and three times for each message
    between devices. Threads that do nothing but transfer may wait."""
    for ran in check(sim_pool, replicas, options, direct=direct):
        (where, count), *more = ran["waits"].items()
        assert "runtime/optim/scaling.py" in where
        assert (count, more) == (1, [])


LONG = [40, pytest.param(200, marks=pytest.mark.thorough)]


def assert_level(ran: dict[str, Any], *, threads: bool = False) -> None:
    """In the second half of the steps no more is held than in the first. Where ``threads`` transfer, what is on its way
    when a step ends is a matter of time: there the least at last is no more than what was usual at first."""
    assert ran["verdict"][0] == ""
    for held in (ran["allocated_bytes"], ran["pinned_bytes"]):
        half = len(held) // 2
        assert 0 < min(held[half + half // 2 :]) <= statistics.median_low(held[3:half])
        # Weights and states may be on their way when a step ends.
        assert threads or max(held[half:]) <= max(held[3:half])


@pytest.mark.slow
@pytest.mark.parametrize("steps", LONG)
@pytest.mark.parametrize(
    "options",
    [
        {"directive": "offload"},
        {**OFFLOADED, "directive": "offload"},
        pytest.param(
            {**OFFLOADED, "directive": "offload", "tier": "disk"}, marks=pytest.mark.thorough
        ),
    ],
    ids=str,
)
def test_nothing_is_left(sim_pool: Pool, options: dict[str, Any], steps: int) -> None:
    """On the device, and of pinned memory."""
    (ran,) = sim_pool.run(partial(jobs.engine, "sim", (1,), options, steps=steps, layers=1), 1)
    assert_level(ran, threads=options.get("tier") == "disk")


@pytest.mark.thorough
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_nothing_is_left_of_messages(sim_pool: Pool, direct: bool) -> None:
    job = partial(
        jobs.engine, "sim", (1, 1), {"directive": "offload"}, direct=direct, steps=200, layers=1
    )
    for ran in sim_pool.run(job, 2):
        assert_level(ran)


@pytest.mark.parametrize("steps", LONG)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_nothing_is_left_of_a_loop(sim_pool: Pool, tier: str, steps: int) -> None:
    (ran,) = sim_pool.run(jobs.loop, 1, tier, steps)
    assert_level(ran, threads=tier == "disk")


def test_batches_may_show_a_number_several_times(sim_pool: Pool) -> None:
    """Torch pins no such tensor, as masks are that were expanded to a batch's rows."""
    assert sim_pool.run(jobs.shown_often, 1) == [[True] * 3]


def test_the_device_has_a_number_and_is_selected(sim_pool: Pool) -> None:
    """Blocks are seeded, and devices identified, by the device index, which was 0 for a device without one."""
    assert sim_pool.run(jobs.selected, 1) == [[1, 1, 1]]


def test_tied_weights(sim_pool: Pool) -> None:
    """Moved to a device, the two names of one weight were two weights there, and each had half of the gradient."""
    (on_cpu,) = sim_pool.run(partial(jobs.engine, "cpu", (1,), {}, tied=True), 1)
    for replicas in ((1,), (1, 1)):
        for ran in sim_pool.run(
            partial(jobs.engine, "sim", replicas, {}, tied=True, direct=True), sum(replicas)
        ):
            assert ran["verdict"][0] == ""
            assert ran["losses"] == pytest.approx(on_cpu["losses"], rel=ROWS_APART)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_streamed_weights_fit_however_late_transfers_end(sim_pool: Pool, schedule: str) -> None:
    """The tier was full in the middle of an update: places are free only when the reads at them are over. Under a split
    backward, gradients under write are limited, too."""
    for lateness in (0, 2, 30):
        (ran,) = sim_pool.run(
            partial(
                jobs.engine,
                "sim",
                (1,),
                {**OFFLOADED, "schedule": schedule},
                layers=2,
                steps=6,
                lateness=lateness,
                exact=True,
            ),
            1,
        )
        assert ran["verdict"][0] == ""
        assert len(ran["losses"]) == 6


@pytest.mark.sampled
@pytest.mark.parametrize("lateness", [2, pytest.param(9, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("replicas", "options"),
    [((1,), {}), ((1, 2), {"directive": "offload"}), ((2, 1), {"schedule": "gpipe"})],
    ids=str,
)
def test_inputs_come_while_the_micro_batch_before_computes(
    sim_pool: Pool, replicas: tuple[int, ...], options: dict[str, Any], lateness: int
) -> None:
    ahead = {**options, "inputs_ahead": True}
    for ran in check(sim_pool, replicas, ahead, direct=True, lateness=lateness):
        (where, count), *more = ran["waits"].items()
        assert "runtime/optim/scaling.py" in where
        assert (count, more) == (1, [])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        ((1,), {"optimizer_offload": 1.0, "directive": "offload", "tier": "disk"}),
        ((1,), {**OFFLOADED, "inputs_ahead": True}),
        ((2,), {"optimizer_offload": 1.0}),
        pytest.param((1, 1), {"directive": "offload"}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_rank_has_no_other_device(
    sim_pool: Pool, replicas: tuple[int, ...], options: dict[str, Any]
) -> None:
    """A thread that waits for an event from where it began, the first device, makes a context there: of half a GiB."""
    ranks = sim_pool.run(partial(jobs.engine, "sim:1", replicas, options), sum(replicas))
    for ran in ranks:
        error, races, _ = ran["verdict"]
        assert not error
        assert not races, races[0]
        assert ran["losses"] == pytest.approx(on_a_cpu(sim_pool), rel=ROWS_APART)
        assert ran["contexts"] == {1}

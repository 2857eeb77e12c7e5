"""A schedule of one's own is a list of forwards and backwards; planned, simulated and run as any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from parallax.errors import ConfigError
from parallax.plan.schedule import SCHEDULES, Action, Kind, Listing, register_schedule
from parallax.runtime.engine import Engine
from tests.distributed import test_order as order
from tests.distributed import test_transparency as transparency
from tests.distributed.pool import Pool
from tests.distributed.test_varying import in_turn
from tests.plans import make_plan

ROWS = transparency.ROWS


def eager(pipeline_ranks: int, pipeline_rank: int, micro_batches: int) -> list[Action]:
    """1F1B with one more forward before the first backward."""
    warm_up = pipeline_ranks - pipeline_rank
    listed = []
    for turn in range(micro_batches + warm_up):
        if turn < micro_batches:
            listed.append(Action(Kind.FORWARD, pipeline_rank, turn))
        if turn >= warm_up:
            listed.append(Action(Kind.BACKWARD, pipeline_rank, turn - warm_up))
    return listed


def weights_last(pipeline_ranks: int, pipeline_rank: int, micro_batches: int) -> list[Action]:
    """1F1B of input-gradient passes, then all weight-gradient passes, the latest first."""
    listed = []
    for turn in range(micro_batches + pipeline_ranks - pipeline_rank - 1):
        if turn < micro_batches:
            listed.append(Action(Kind.FORWARD, pipeline_rank, turn))
        if turn >= pipeline_ranks - pipeline_rank - 1:
            listed.append(
                Action(Kind.BACKWARD, pipeline_rank, turn - (pipeline_ranks - pipeline_rank - 1))
            )
    return listed + [
        Action(Kind.BACKWARD_WEIGHT, pipeline_rank, micro)
        for micro in reversed(range(micro_batches))
    ]


OWN: dict[str, Listing] = {"own-eager": eager, "own-weights-last": weights_last}


@pytest.fixture
def registered() -> Iterator[None]:
    _register()
    yield
    _forget()


def _register() -> None:
    for name, listing in OWN.items():
        register_schedule(name, listing)


def _forget() -> None:
    for name in OWN:
        del SCHEDULES[name]


def running(options: dict[str, Any]) -> Any:
    """Loss and gradients as of :mod:`.test_transparency`."""
    _register()
    try:
        return transparency.job("gpt", torch.float64, options, ROWS)
    finally:
        _forget()


def test_a_plan_may_be_read_before_its_schedule_is_registered() -> None:
    chain = transparency.make_chain("mlp", torch.float64)
    plan = make_plan(chain, schedule="own-weights-last", global_batch=ROWS)
    with pytest.raises(ConfigError, match=r"plan.schedule=own-weights-last: accepted are gpipe"):
        plan.schedule.order(1, 0, 4)
    _register()
    try:
        engine = Engine.build(chain, plan, loss=transparency.MODELS["mlp"][1])
        spans = engine.step(transparency.make_batch()).spans
        engine.close()
    finally:
        _forget()
    assert [s.micro for s in spans if s.kind is Kind.BACKWARD_WEIGHT] == [3, 2, 1, 0]


@pytest.mark.sampled
@pytest.mark.parametrize("directive", ["keep", "offload", "recompute"])
@pytest.mark.parametrize(("schedule", "replicas"), in_turn(OWN, [(1, 1, 1), (1, 2)]), ids=str)
def test_own_schedules_train_alike(
    pool: Pool, registered: None, schedule: str, replicas: tuple[int, ...], directive: str
) -> None:
    options = {"schedule": schedule, "replicas": replicas, "directive": directive}
    results = pool.run(running, sum(replicas), options)
    transparency.compare(results, "gpt", torch.float64, ROWS, 1e-12)


def ordered(*arguments: Any) -> list[str]:
    """What blocks do, as of :mod:`.test_order`."""
    _register()
    try:
        return order.job(*arguments)
    finally:
        _forget()


@pytest.mark.parametrize("schedule", OWN)
def test_own_schedules_run_as_listed(pool: Pool, registered: None, schedule: str) -> None:
    letters = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_WEIGHT: "W"}
    pipeline_ranks, micro_batches = 3, 4
    found = pool.run(ordered, pipeline_ranks, schedule, pipeline_ranks, micro_batches, 1)
    for pipeline_rank, cells in enumerate(found):
        listed = OWN[schedule](pipeline_ranks, pipeline_rank, micro_batches)
        assert cells == [f"{letters[action.kind]}{action.micro}" for action in listed]

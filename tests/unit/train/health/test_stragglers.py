"""A slow rank is distinguished from noise, from unequal work, and from a rank that delays no other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from parallax.common.events import Span, busy_seconds
from parallax.model.describe import describe
from parallax.model.factory.gpt import GPTConfig
from parallax.plan.plan import Plan, StagePrediction
from parallax.train.health.stragglers import StragglerDetector
from tests.plans import make_plan


def plan(replicas: tuple[int, ...], seconds: Sequence[float] = (), rows: int = 8) -> Plan:
    """A plan whose stages are predicted to compute for ``seconds``."""
    chain = describe(GPTConfig(layers=4, hidden=16, heads=2, sequence=8).build)
    made = make_plan(chain, replicas=replicas, global_batch=rows)
    stages = tuple(
        StagePrediction(
            memory={}, seconds={"forward": each / 3, "backward": each * 2 / 3, "idle": 9.0}
        )
        for each in seconds
    )
    return replace(made, prediction=replace(made.prediction, stages=stages))


def named(
    requested: Plan,
    busy: Callable[[int, random.Random], Sequence[float]],
    steps: int = 60,
    step: float = 1.0,
) -> list[tuple[int, float]]:
    detector, chance, found = StragglerDetector(requested), random.Random(2), []
    for number in range(steps):
        found += detector.add(step, busy(number, chance))
    return found


def test_one_five_times_slower_than_predicted_is_named_once() -> None:
    """Though the other's work is twice its own."""
    ((rank, factor),) = named(plan((1, 1), (0.2, 0.1)), lambda n, c: (0.2 * c.uniform(1, 1.3), 0.5))
    assert rank == 1
    assert 4 < factor < 5.1
    message = str(StragglerDetector(plan((1, 1), (0.2, 0.1))).straggler(1, 4.97, "node7"))
    assert message == (
        "rank 1 (stage 1, replica 0, on node7) is slow: its actions take 5.0 times as long as predicted, beside the "
        "other ranks"
    )


def test_replicas_are_compared_with_each_other_row_by_row() -> None:
    """Of three rows, one replica has one and the other two."""
    uneven = plan((1, 2), (0.1, 0.1), rows=3)
    assert named(uneven, lambda n, c: (0.3, 0.1, 0.2)) == []
    ((rank, factor),) = named(uneven, lambda n, c: (0.3, 0.4, 0.2))
    assert (rank, factor) == (1, pytest.approx(4.0))


@pytest.mark.parametrize(
    "busy",
    [
        lambda n, c: (0.2, 0.1 * c.choice([1, 1, 1, 5])),  # now and then
        lambda n, c: (0.2 * c.uniform(0.7, 1.6), 0.1 * c.uniform(0.7, 1.6)),
        lambda n, c: (0.2, 0.1 if n > 1 else 2.0),  # the first steps connect
        lambda n, c: (1.0, 0.5),  # all are slow: the prediction is wrong
        lambda n, c: (0.02, 0.05),  # of a step of a second
        lambda n, c: (0.2, 0.0),  # computes nothing, as one without rows
    ],
    ids=["noise", "more noise", "warm-up", "all", "delays no rank", "nothing"],
)
def test_others_are_not(busy: Callable[[int, random.Random], Sequence[float]]) -> None:
    assert named(plan((1, 1), (0.2, 0.1)), busy) == []


def test_without_a_prediction_unequal_work_is_none() -> None:
    assert named(plan((1, 1)), lambda n, c: (0.2, 0.5)) == []
    ((rank, _),) = named(plan((1, 1)), lambda n, c: (0.2, 0.9))
    assert rank == 1


def test_one_rank_has_no_other_to_compare_with() -> None:
    assert named(plan((1,), (0.1,)), lambda n, c: (5.0,)) == []


def test_waiting_is_not_computing() -> None:
    spans = [
        Span(0, 1, "receive_activation", 0, 0, 0.0, 5.0, 5.0),
        Span(0, 1, "forward", 0, 0, 5.0, 7.0, 1.5),
        Span(0, 1, "backward", 0, 0, 7.0, 8.0),
        Span(0, 1, "reduce", 0, -1, 8.0, 20.0),
    ]
    assert busy_seconds(spans) == pytest.approx(1.5)

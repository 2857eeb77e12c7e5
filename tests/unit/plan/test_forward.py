"""The bytes of forwards alone, against sums that can be done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.errors import InfeasiblePlan
from parallax.plan.cost.forward import forward_plan
from parallax.plan.plan import Plan, Prediction, RankPrediction, StagePlan
from parallax.plan.simulation.predict import predict
from tests.unit.plan.simulated import DRAINING
from tests.unit.plan_fakes import HUGE, block, cluster, profile, stages

BLOCKS = [
    block(
        parameter_bytes=100,
        largest_bytes=20,
        buffer_bytes=7,
        moved=10,
        stays=1,
        input=8,
        output=4,
        forward_work=5,
        backward_work=20,
    ),
    block(
        parameter_bytes=300,
        largest_bytes=150,
        moved=30,
        stays=2,
        input=4,
        output=3,
        forward_work=50,
        backward_work=600,
    ),
]


def planned(parts: list[StagePlan], **fields: object) -> Plan:
    rank = RankPrediction(
        peak_bytes=0, budget_bytes=1, tier_peak_bytes=0, offloaded_bytes=0, stall_seconds=0.0
    )
    interleave = int(fields.get("interleave", 1))  # type: ignore[call-overload]
    ranks = sum(part.replicas for part in parts) // interleave
    usual = {
        "model": "m",
        "fingerprint": "f",
        "schedule": "1f1b",
        "global_batch": 6,
        "microbatch": 2,
        "tier": "disk",
        "prediction": Prediction(step_seconds=1.0, bubble=0.0, ranks=(rank,) * ranks),
    }
    return Plan(stages=tuple(parts), **{**usual, **fields})  # type: ignore[arg-type]


def test_bytes_by_hand() -> None:
    """Two stages, three micro-batches of two rows; the first is up to four messages ahead."""
    model = profile(BLOCKS, optimizer_bytes=2.0, master_bytes=1.0)
    plan = forward_plan(model, cluster(2, reserve=1000), planned(stages([0, 1, 2])))
    first, second = plan.prediction.ranks
    boundary = 2 * 8 + 2 * (2 * 4) + 4 * 2 * 4
    assert first.peak_bytes == 100 + 7 + 1000 + boundary + 2 * (8 + 4 + 5 + 10 + 1)
    outputs, work = 3 * 2 * 3, 2 * (4 + 3 + 50 + 30 + 2)
    assert second.peak_bytes == 300 + 1000 + 2 * (2 * 4) + outputs + work
    assert {term for term, size in plan.prediction.stages[1].memory.items() if size} == {
        *("parameters", "reserve", "boundary", "activations", "workspace"),
    }


def test_a_cpu_reads_one_parameter_beside_the_others() -> None:
    plan = forward_plan(
        profile(BLOCKS), cluster(1), planned(stages([0, 2]), global_batch=1, microbatch=1)
    )
    assert plan.prediction.stages[0].memory["workspace"] == 150


def test_the_plan_keeps_its_stages_and_nothing_of_training() -> None:
    parts = [
        replace(
            part,
            optimizer_offload=1.0,
            parameter_offload=0.5,
            state_bytes=HUGE,
            streamed_bytes=HUGE,
            shard_optimizer=True,
        )
        for part in stages([0, 1, 2], directive="offload")
    ]
    before = planned(parts, gather_loss=True, schedule="gpipe")
    after = forward_plan(profile(BLOCKS, master_bytes=1.0), cluster(2), before)
    assert [(s.start, s.stop) for s in after.stages] == [(0, 1), (1, 2)]
    for stage in after.stages:
        assert not stage.offloads
        assert stage.state_bytes == stage.tier_bytes == stage.swap_limit_bytes == 0
        assert not stage.shard_optimizer
    # Half of the parameters, rounded up to a block, and the new values of a block beside the old ones.
    assert [stage.streamed_bytes for stage in after.stages] == [200, 600]
    memory = after.prediction.stages[1].memory
    assert (memory["parameters"], memory["staging"]) == (150, 150)


def test_shared_parameters_count_once() -> None:
    parts, ties = [stages([0, 2])[0]], ((60, (0, 1)),)
    memory = forward_plan(profile(BLOCKS, ties=ties), cluster(1), planned(parts))
    assert memory.prediction.stages[0].memory["parameters"] == 100 + 300 - 60


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    needed = forward_plan(profile(BLOCKS), cluster(2), planned(stages([0, 1, 2])))
    most = max(rank.peak_bytes for rank in needed.prediction.ranks)
    forward_plan(profile(BLOCKS), cluster(2, memory=most), planned(stages([0, 1, 2])))
    with pytest.raises(InfeasiblePlan, match=r"^rank 1: a forward of 2 row") as error:
        forward_plan(profile(BLOCKS), cluster(2, memory=most - 1), planned(stages([0, 1, 2])))
    assert "\n" not in str(error.value)
    offloaded = [replace(part, parameter_offload=1.0) for part in stages([0, 1, 2])]
    with pytest.raises(InfeasiblePlan, match=r"of tier disk: .*, or plan\.parameters=device$"):
        forward_plan(profile(BLOCKS), cluster(2, tier=99), planned(offloaded))


KINDS = [(s.name, each) for s in DRAINING for each in (1, 2) if s.allows(each)]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    pipeline_ranks=st.integers(2, 3),
    micro=st.integers(1, 6),
    replicas=st.integers(1, 2),
)
def test_a_forward_needs_no_more_than_training(
    kind: tuple[str, int], pipeline_ranks: int, micro: int, replicas: int
) -> None:
    """Where outputs of blocks are small beside parameters and what is saved, as usual."""
    schedule, interleave = kind
    count = pipeline_ranks * interleave
    one = block(
        parameter_bytes=1000, largest_bytes=500, moved=100, input=1, output=1, backward_work=9
    )
    model = profile([one] * count)
    parts = stages(list(range(count + 1)), [replicas] * count)
    plan = planned(
        parts, schedule=schedule, interleave=interleave, global_batch=2 * micro, microbatch=2
    )
    machines = cluster(pipeline_ranks * replicas)
    forward = forward_plan(model, machines, plan)
    for mine, trained in zip(forward.prediction.ranks, predict(model, machines, plan).ranks):
        assert mine.peak_bytes < trained.peak_bytes

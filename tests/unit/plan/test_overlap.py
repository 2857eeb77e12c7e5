"""Steps that overlap: the lists of all steps together, their time without a bubble, and the plans that use them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallax.errors import ConfigError
from parallax.plan.config import PlanConfig
from parallax.plan.cost.forward import forward_plan
from parallax.plan.cost.stage import load_stage
from parallax.plan.cost.states import Sizes, load_states
from parallax.plan.lists import actions, task_actions
from parallax.plan.plan import Directive, Plan, Visits
from parallax.plan.schedule import Kind
from parallax.plan.schedule.action import COMPUTE
from parallax.plan.search.search import search
from parallax.plan.simulation.predict import quick_seconds
from parallax.plan.updates import Updates
from tests.unit.plan.simulated import run
from tests.unit.plan_fakes import block, cluster, pipeline, profile, stages

SHAPES = [(2, 2), (2, 4), (3, 3), (3, 7), (4, 4), (4, 9)]
STEPS = 5


@pytest.mark.parametrize(("ranks", "micro"), SHAPES)
def test_the_lists_of_all_steps_compute_everything_once(ranks: int, micro: int) -> None:
    shape = pipeline(stages(range(ranks + 1)), schedule="2bw", rows=micro, micro=micro)
    for rank in range(ranks):
        listed = task_actions(shape, rank, micro, STEPS - 1)
        listed += [
            replace(each, step=STEPS - 1 + each.step)
            for each in actions(shape, rank, micro, begun=True)
        ]
        computed = [each for each in listed if each.kind in COMPUTE]
        assert len(set(computed)) == len(computed) == 2 * micro * STEPS
        updates = [n for n, each in enumerate(listed) if each.kind is Kind.UPDATE]
        assert [listed[n].step for n in updates] == list(range(STEPS))
        flying = 0
        for each in computed:
            flying += 1 if each.kind is Kind.FORWARD else -1
            assert 0 <= flying <= ranks - rank
        for step, n in enumerate(updates):
            before = [each for each in listed[:n] if each.kind in COMPUTE]
            assert all(each.step <= step + 1 for each in before)  # two versions of the weights
            assert sum(each.step <= step for each in before) == 2 * micro * (step + 1)


@pytest.mark.parametrize(("ranks", "micro"), SHAPES)
def test_equal_stages_have_no_bubble(ranks: int, micro: int) -> None:
    parts = stages(range(ranks + 1))
    result = run(
        [block(forward=1, backward=2)] * ranks, parts, schedule="2bw", rows=micro, micro=micro
    )
    assert result.step_seconds == pytest.approx(3 * micro)
    assert result.bubble == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (1.0, 3.0), (1.0, 1.0), (2.0, 3.0)])
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_step_takes_as_long_as_the_slowest_stage(
    slow: int, forward: float, backward: float
) -> None:
    blocks = [
        block(forward=forward * factor, backward=backward * factor)
        for factor in (1.5 if stage == slow else 1.0 for stage in range(3))
    ]
    parts = stages([0, 1, 2, 3])
    result = run(blocks, parts, schedule="2bw", rows=6, micro=6)
    assert result.step_seconds == pytest.approx(6 * 1.5 * (forward + backward), rel=1e-6)
    shape = pipeline(parts, schedule="2bw", rows=6, micro=6)
    quick = quick_seconds(profile(blocks), cluster(3), shape)
    assert quick.likely == pytest.approx(result.step_seconds, rel=1e-6)
    assert quick.least <= result.step_seconds * (1 + 1e-6)


def planned(*, continues: bool, schedule: str = "auto", memory: int = 10**9) -> Plan:
    blocks = [block(parameter_bytes=1000, moved=10, input=1, output=1)] * 4
    found = profile(blocks, continues=continues)
    config = PlanConfig(stages=2, replicas=1, schedule=schedule)
    plan, _ = search(
        found,
        cluster(2, memory),
        config,
        global_batch=4,
        microbatch=1,
        updates=Updates.DELAYED if continues else Updates.SYNCHRONOUS,
    )
    return plan


def test_auto_overlaps_the_steps_of_delayed_updates() -> None:
    plan = planned(continues=True)
    assert plan.schedule.name == "2bw"
    assert plan.prediction.bubble == pytest.approx(0, abs=1e-6)
    assert planned(continues=False).schedule.name != "2bw"


def test_a_plan_that_overlaps_steps_has_a_plan_of_its_forwards() -> None:
    plan = planned(continues=True)
    model = profile([block(parameter_bytes=1000, moved=10, input=1, output=1)] * 4)
    forwards = forward_plan(model, cluster(2), plan)
    assert forwards.schedule is plan.schedule
    assert forwards.prediction.ranks[0].peak_bytes < plan.prediction.ranks[0].peak_bytes


def test_a_second_set_of_gradients_may_not_fit() -> None:
    """Each stage holds weights, gradients and two states of 2,000 bytes each, and activations; the last one holds
    gradients twice."""
    assert planned(continues=True, memory=10_500).schedule.name == "2bw"
    assert planned(continues=True, memory=9_000).schedule.name != "2bw"


def test_other_updates_are_refused_with_a_way_out() -> None:
    with pytest.raises(
        ConfigError, match=r"needs trainer\.updates=delayed, .* or plan\.schedule=1f1b"
    ):
        planned(continues=False, schedule="2bw")


def test_all_stages_but_the_first_have_two_sets_of_gradients() -> None:
    found = profile([block(parameter_bytes=1000)] * 2, continues=True)
    visits = pipeline(stages([0, 1, 2]), schedule="2bw", rows=4, micro=4).visits(0)
    loads = [
        load_stage(found, start, [Directive.KEEP], 1, device=cluster(1).devices[0], visits=visits)
        for start in (0, 1)
    ]
    first, second = (load.states.gradient_bytes for load in loads)
    assert second == 2 * first


def test_weights_of_two_bytes_have_a_second_buffer() -> None:
    found = profile([block(parameter_bytes=1000)])
    sizes, device = Sizes.of(found, 0, 1), cluster(1).devices[0]
    for masters, buffers in ((0.0, 1), (2.0, 2)):
        wide = replace(found, master_bytes=masters)
        load = load_states(wide, sizes, device, visits=Visits(continues=True))
        assert load.parameter_bytes == 1000 * buffers
        assert load.staging_bytes == 1000 * masters  # gradients in full precision

"""Plans of forwards alone: found by the same search, proved and timed by the same simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallax.errors import ConfigError, InfeasiblePlan, PlanError
from parallax.plan.cluster import Cluster, Link
from parallax.plan.config import PlanConfig
from parallax.plan.cost.forward import forward_plan, task_costs
from parallax.plan.explained import explain
from parallax.plan.plan import Plan
from parallax.plan.profile import Affine, ModelProfile
from parallax.plan.search.search import search
from parallax.plan.simulation import predict as predictions
from parallax.plan.simulation.predict import predict
from parallax.plan.task import PlanTask
from tests.unit.plan_fakes import block, cluster, profile

SLOW = Link(bytes_per_second=1e6)
FORWARD, BLOCKS = 1e-3, 6  # seconds per row
ONE = block(
    parameter_bytes=1000,
    largest_bytes=500,
    moved=100,
    stays=10,
    by_loss=7,
    input=8,
    output=8,
    forward_work=20,
    backward_work=50,
    forward=FORWARD,
    backward=2 * FORWARD,
)


def model(**fields: float) -> ModelProfile:
    return profile([ONE] * BLOCKS, optimizer_seconds=1e-9, **fields)


def devices(count: int, memory: int) -> Cluster:
    return cluster(count, memory, link=SLOW, write=SLOW, host_update_seconds=1e-9)


def found(
    count: int, memory: int, task: PlanTask = PlanTask.INFERENCE, config: PlanConfig | None = None
) -> Plan:
    plan, _ = search(
        model(),
        devices(count, memory),
        config or PlanConfig(),
        global_batch=8,
        task=task,
        spare=True,
    )
    return plan


def test_replicas_share_the_rows_if_the_weights_fit() -> None:
    plan = found(4, 10**9)
    assert [stage.replicas for stage in plan.stages] == [4]
    assert plan.prediction.step_seconds == pytest.approx(8 / 4 * BLOCKS * FORWARD)
    assert plan.rows_per_second == pytest.approx(8 / plan.prediction.step_seconds)


@pytest.mark.parametrize("task", [PlanTask.EVALUATION, PlanTask.INFERENCE])
def test_a_model_that_does_not_fit_for_training_is_planned(task: PlanTask) -> None:
    with pytest.raises(InfeasiblePlan):
        found(1, 8000, PlanTask.TRAINING)
    plan = found(1, 8000, task)
    assert plan.task is task
    assert plan.stages[0].parameter_offload == 0
    memory = plan.prediction.stages[0].memory
    assert memory["parameters"] == 6000
    assert not memory["gradients"] + memory["optimizer"] + memory["master"]
    assert sum(memory.values()) <= 8000


def test_weights_that_do_not_fit_are_fetched_block_by_block() -> None:
    plan = found(1, 4500)
    share = plan.stages[0].parameter_offload
    assert share > 0
    memory = plan.prediction.stages[0].memory
    assert memory["parameters"] == 6000 - int(6000 * share)
    assert memory["staging"] == 2000  # two blocks
    assert plan.prediction.ranks[0].tier_peak_bytes >= 6000 * share
    assert any("in disk" in line for line in explain(plan))


def test_weights_stay_on_the_device_if_that_is_as_fast() -> None:
    """A batch at once is a little faster, and leaves no memory for all weights."""
    costs = [replace(ONE, forward_seconds=Affine(FORWARD / 1000, FORWARD))] * BLOCKS
    plans = [
        search(
            profile(costs),
            devices(1, 7000),
            PlanConfig(parameters=where),
            global_batch=8,
            task=PlanTask.INFERENCE,
        )[0]
        for where in ("host", "auto")
    ]
    assert [plan.stages[0].parameter_offload for plan in plans] == [1.0, 0.0]
    assert plans[0].micro_batches(8) == 1 < plans[1].micro_batches(8)
    assert plans[0].prediction.step_seconds < plans[1].prediction.step_seconds
    assert plans[1].bound_seconds <= plans[1].prediction.step_seconds


def test_fetched_weights_are_read_once_for_all_micro_batches() -> None:
    """A batch that does not fit at once, on a link on which reading weights takes as long as computing."""
    slow = Link(bytes_per_second=6000 / (8 * BLOCKS * FORWARD))
    tight = cluster(1, 2800, link=SLOW, write=slow)
    plan, _ = search(model(), tight, PlanConfig(), global_batch=8, task=PlanTask.INFERENCE)
    assert plan.micro_batches(8) > 1
    assert plan.schedule.name == "breadth-first"
    assert plan.prediction.step_seconds < 1.5 * 8 * BLOCKS * FORWARD


def test_an_evaluation_holds_the_loss_and_an_inference_the_outputs() -> None:
    evaluated, inferred = (
        search(model(), devices(1, 10**9), PlanConfig(), global_batch=8, microbatch=8, task=task)[0]
        .prediction.stages[0]
        .memory
        for task in (PlanTask.EVALUATION, PlanTask.INFERENCE)
    )
    assert evaluated["activations"] == 0
    assert inferred["activations"] == 8 * 8
    assert evaluated["workspace"] - inferred["workspace"] == 8 * (7 + 5 * 8)


def test_the_longest_path_and_the_simulator_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, memory in ((1, 10**9), (4, 4500), (2, 3000)):
        plan = found(count, memory)
        simulated = predict(model(), devices(count, memory).first(plan.world_size), plan)
        monkeypatch.setattr(predictions, "SIMULATED_BLOCKS", 0)
        timed = predict(model(), devices(count, memory).first(plan.world_size), plan)
        monkeypatch.undo()
        assert timed.step_seconds == pytest.approx(simulated.step_seconds, rel=0.05)
        assert [r.peak_bytes for r in timed.ranks] == [r.peak_bytes for r in simulated.ranks]
        assert simulated.spans
        assert not {span.kind for span in simulated.spans} - {
            "forward",
            "send_activation",
            "receive_activation",
        }


def test_the_bound_is_none_above_the_plan() -> None:
    for count, memory in ((1, 10**9), (4, 4500), (3, 3000)):
        plan = found(count, memory)
        assert plan.bound_seconds <= plan.prediction.step_seconds


def test_the_bytes_are_those_of_forward_plan() -> None:
    plan = found(4, 4500)
    again = forward_plan(model(), devices(4, 4500), plan)
    assert [r.peak_bytes for r in again.prediction.ranks] == [
        r.peak_bytes for r in plan.prediction.ranks
    ]


def test_a_plan_file_keeps_its_task() -> None:
    plan = found(1, 10**9)
    assert plan.to_dict()["task"] == "inference"
    again = Plan.from_dict(plan.to_dict())
    assert again.task is PlanTask.INFERENCE
    assert again.hash() == plan.hash()
    assert "task" not in found(1, 10**9, PlanTask.TRAINING).to_dict()
    with pytest.raises(PlanError, match="task=guessing: accepted are training, evaluation"):
        Plan.from_dict(plan.to_dict() | {"task": "guessing"})


def test_constraints_of_training_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^plan\.shard=none: a plan with task=inference"):
        PlanConfig(shard="none").check_task(PlanTask.INFERENCE)
    PlanConfig(shard="none").check_task(PlanTask.TRAINING)


def test_what_fits_nowhere_names_the_smallest_change() -> None:
    with pytest.raises(InfeasiblePlan, match=r"cluster\.device_memory=1MiB") as error:
        found(1, 1500)
    assert "\n" not in str(error.value)


def test_weights_stay_on_the_device_if_requested() -> None:
    with pytest.raises(InfeasiblePlan):
        found(1, 4500, config=PlanConfig(parameters="device"))
    streamed = found(1, 10**9, config=PlanConfig(parameters="host"))
    assert streamed.stages[0].parameter_offload == 1.0


def test_costs_between_measured_rows_are_summed() -> None:
    first = Affine.measured([(1, 2.0), (2, 6.0), (4, 8.0)])
    second = Affine.measured([(1, 1.0), (3, 2.0), (9, 3.0)])
    total = first.plus(second)
    for rows in (0, 1, 2, 3, 4, 5, 9, 12):
        assert total.at(rows) == pytest.approx(first.at(rows) + second.at(rows))


def test_costs_of_training_are_the_profile() -> None:
    measured = model()
    assert task_costs(measured, PlanTask.TRAINING) is measured

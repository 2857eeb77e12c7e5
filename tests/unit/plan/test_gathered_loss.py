"""A loss that is computed once, of all rows: what it costs, and which plans can have it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallax.errors import ConfigError, InfeasiblePlan, PlanError
from parallax.plan.cluster import Link
from parallax.plan.config import PlanConfig
from parallax.plan.cost.estimate import estimate
from parallax.plan.inputs import Inputs
from parallax.plan.plan import Pipeline, Plan
from parallax.plan.profile import Affine, ModelProfile
from parallax.plan.schedule import SCHEDULES
from parallax.plan.search.contradiction import Question, check_question
from parallax.plan.search.search import search
from parallax.plan.simulation.calibrate import calibrate, times
from parallax.plan.simulation.predict import Forecast, predict
from parallax.plan.work import BlockWork, ModelWork, Work
from tests.unit.plan_fakes import block, cluster, profile, stages

ROWS = 8
OUTPUTS, NEEDED, SECONDS = 640, 9000, 5.0


def gathered(blocks: int = 4, rows: int = ROWS, **fields: Any) -> ModelProfile:
    """Blocks alike, and a loss of all rows that is larger than any of them."""
    alike = [block(str(n), moved=100, input=10, output=10, **fields) for n in range(blocks)]
    alike[-1] = replace(
        alike[-1], gathered_bytes=OUTPUTS, gathered_work=NEEDED, gathered_seconds=SECONDS
    )
    return profile(alike, gathered_rows=rows)


def found(model: ModelProfile, devices: int = 2, memory: int = 10**9, **requested: Any) -> Plan:
    options = {key: requested.pop(key) for key in ("microbatch", "gather_loss") if key in requested}
    options = {"gather_loss": True, **options}
    where = cluster(devices, memory)
    return search(model, where, PlanConfig(**requested), global_batch=ROWS, swap=False, **options)[
        0
    ]


def test_the_file_of_a_profile_says_so() -> None:
    assert ModelProfile.from_json(gathered().to_json()) == gathered()


@pytest.mark.parametrize("replicas", [(1, 1), (1, 2), (2, 2)], ids=str)
def test_the_loss_takes_its_time_once(replicas: tuple[int, ...]) -> None:
    link = Link(bytes_per_second=640.0)
    where = cluster(sum(replicas), link=link)
    even = stages([0, 2, 4], replicas)
    pipeline = Pipeline(
        schedule=SCHEDULES["gpipe"],
        stages=tuple(even),
        global_batch=ROWS,
        microbatch=2,
        placement=tuple(range(sum(replicas))),
    )
    without = replace(
        gathered(), blocks=(*gathered().blocks[:-1], replace(gathered().blocks[0], name="3"))
    )
    sent = OUTPUTS / 640.0 if replicas[1] == 2 else 0.0  # by a ring of two
    before, after = (predict(model, where, pipeline) for model in (without, gathered()))
    assert after.step_seconds == pytest.approx(before.step_seconds + SECONDS + sent)
    forward = [each.stages[1].seconds["forward"] for each in (before, after)]
    assert forward[1] == pytest.approx(forward[0] + SECONDS)


def forecast_of(model: ModelProfile, microbatch: int) -> Forecast:
    return predict(
        model,
        cluster(2),
        Pipeline(
            schedule=SCHEDULES["gpipe"],
            stages=tuple(stages([0, 2, 4])),
            global_batch=ROWS,
            microbatch=microbatch,
            placement=(0, 1),
        ),
    )


def test_the_peak_has_all_outputs_and_what_the_loss_needs() -> None:
    found = forecast_of(gathered(), 2)
    first, last = found.ranks
    kept = 2 * 100 * ROWS  # of both blocks, of all micro-batches
    entering = 2 * 10 * 2
    assert last.peak_bytes == kept + entering + OUTPUTS + NEEDED
    assert first.peak_bytes < last.peak_bytes - NEEDED


def test_where_blocks_need_more_the_loss_adds_its_outputs_alone() -> None:
    model = gathered(forward_work=10_000, backward_work=10_000)
    plain = replace(
        model, blocks=(*model.blocks[:-1], replace(model.blocks[0], name="3")), gathered_rows=0
    )
    with_loss, without = (forecast_of(each, 2).ranks[1].peak_bytes for each in (model, plain))
    assert with_loss == without + OUTPUTS


@pytest.mark.parametrize("blocks", [4, 300])  # by the exact search, and by the greedy one
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_plans_let_all_micro_batches_go_forward_first(blocks: int, devices: int) -> None:
    plan = found(gathered(blocks), devices, microbatch=2)
    assert plan.gather_loss
    assert plan.schedule.name == "gpipe"
    assert plan.bound_seconds <= plan.prediction.step_seconds
    whole = found(gathered(blocks), devices, microbatch=ROWS)
    assert whole.schedule.forwards_first(whole.pipeline_ranks, 1, whole.interleave)


@pytest.mark.parametrize("blocks", [4, 300])
def test_a_budget_is_never_exceeded_for_the_loss(blocks: int) -> None:
    model = gathered(blocks)
    needed = max(rank.peak_bytes for rank in found(model, microbatch=1).prediction.ranks)
    tight = found(model, memory=needed, microbatch=1)
    assert max(rank.peak_bytes for rank in tight.prediction.ranks) <= needed
    with pytest.raises(InfeasiblePlan, match="no plan fits"):
        found(model, memory=OUTPUTS + NEEDED, microbatch=1)


def test_profiles_of_another_loss_are_refused() -> None:
    with pytest.raises(ConfigError, match="of m counts a loss for each micro-batch; measure it"):
        found(replace(gathered(), gathered_rows=0))
    with pytest.raises(ConfigError, match="of m counts one loss over 9 rows; measure it"):
        found(gathered(rows=9))
    with pytest.raises(ConfigError, match=r"trainer.gather_loss=false .*one loss over 8 rows"):
        found(gathered(), gather_loss=False)


@pytest.mark.parametrize(
    ("requested", "microbatch", "message"),
    [
        ({"schedule": "1f1b"}, "auto", "plan.schedule=1f1b starts backward before"),
        ({"schedule": "zb-h2"}, 4, "use plan.schedule=gpipe, or trainer.microbatch=8"),
        ({"schedule": "zb-v"}, 4, "use plan.schedule=gpipe, or trainer.microbatch=8"),
        ({"schedule": "interleaved", "interleave": 2}, 1, "gpipe plan.interleave=auto, or"),
        ({"interleave": 2}, "auto", "plan.interleave=2 starts backward"),
        ({"schedule": "gpipe"}, 1, ""),
        ({"schedule": "1f1b"}, 8, ""),
        ({}, "auto", ""),
    ],
)
def test_other_schedules_are_one_line(
    requested: dict[str, Any], microbatch: int | str, message: str
) -> None:
    def ask() -> None:
        check_question(
            Question(
                config=PlanConfig(**requested),
                blocks=8,
                devices=2,
                rows=8,
                microbatch=microbatch,
                gather_loss=True,
            )
        )

    if not message:
        ask()
        return
    with pytest.raises(ConfigError) as caught:
        ask()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_estimate_has_all_micro_batches_in_flight() -> None:
    line = Affine(per_row=100.0)
    parts = [
        BlockWork(
            name=str(n),
            parameters=0,
            parameter_bytes=0,
            forward=Work(),
            input_gradient=Work(),
            weight_gradient=Work(),
            moved=line,
            input=Affine(),
            output=Affine(),
        )
        for n in range(2)
    ]
    work = ModelWork(
        model="m", fingerprint="f", precision="fp32", dtype="fp32", blocks=tuple(parts)
    )
    last = replace(parts[-1], gathered_bytes=OUTPUTS, gathered_work=NEEDED)
    whole = replace(work, blocks=(parts[0], last), gathered_rows=ROWS)
    plain, once = (estimate(each, global_batch=ROWS, microbatch=2) for each in (work, whole))
    assert (plain.schedule, once.schedule) == ("1f1b", "gpipe")
    assert sum(plain.keep.values()) == 2 * 100 * 2
    assert sum(once.keep.values()) == 2 * 100 * ROWS + OUTPUTS + NEEDED
    assert once.pipelines[1].keep_bytes == 100 * ROWS + OUTPUTS + NEEDED


def test_a_measured_loss_corrects_the_predicted_one() -> None:
    plan, where = found(gathered(), microbatch=2, schedule="gpipe", stages=2), cluster(2)
    slower = times(gathered(), 2.0)
    assert slower.blocks[-1].gathered_seconds == 2 * SECONDS
    before, after = (predict(model, where, plan) for model in (gathered(), slower))
    corrected = calibrate(gathered(), before.spans, after.spans, plan, where)
    again = predict(corrected, where, plan)
    assert again.step_seconds == pytest.approx(after.step_seconds, rel=0.01)
    assert corrected.blocks[-1].gathered_seconds == pytest.approx(2 * SECONDS, rel=0.01)


def test_inputs_of_another_loss_are_refused() -> None:
    plan = found(gathered(), microbatch=2)
    Inputs(gathered(), cluster(2)).check(plan)
    with pytest.raises(PlanError, match=r"one loss of 8 rows .* its inputs one of 0: plan again"):
        Inputs(replace(gathered(), gathered_rows=0), cluster(2)).check(plan)

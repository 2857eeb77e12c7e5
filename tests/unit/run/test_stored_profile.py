"""Forwards are planned with the profile of the run, without a measurement, if its bytes hold for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parallax.config import RunConfig, compose
from parallax.plan.plan import Prediction
from parallax.plan.profile import ModelProfile
from parallax.plan.task import PlanTask
from parallax.run import planning
from parallax.run.export import CheckpointChoice
from parallax.run.inference import ForwardRequest, _StoredProfile
from parallax.run.job import plan_run
from parallax.run.planning import Planned
from parallax.run.prepare import write_run
from parallax.run.resume import StoredRun

SMALL = ["model=mlp", "model.layers=2", "trainer.global_batch=4", "cluster.devices=1"]


def slow(prediction: Prediction) -> Prediction:
    """Return the prediction of a plan whose forwards take longer than to measure the model."""
    return replace(prediction, step_seconds=1e6)


def planned(config: RunConfig, run: StoredRun) -> Planned:
    known = _StoredProfile(run, config)
    return plan_run(config, run.directory / "swap", lambda text: None, known=known.of)


def test_forwards_of_a_run_are_planned_without_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prediction of 19 s was planned in 67 s, because it had other threads than the run's ranks."""
    trained = compose(SMALL)
    of_run = plan_run(trained, tmp_path / "swap", lambda text: None)
    other = replace(of_run.profile, device=f"{of_run.profile.device.rpartition(',')[0]}, 7 threads")
    write_run(tmp_path, trained, replace(of_run, profile=other))
    run = StoredRun.read(tmp_path)
    measured: list[str] = []

    def measure(*_: object, name: str, gather_loss: bool, **__: object) -> ModelProfile:
        measured.append(name)
        return replace(of_run.profile, gathered_rows=4 if gather_loss else 0)

    monkeypatch.setattr(planning, "measure_model", measure)
    choice = CheckpointChoice()
    for task in (PlanTask.EVALUATION, PlanTask.INFERENCE):
        config = ForwardRequest(task=task, choice=choice).settings(run)
        found = planned(config, run)
        assert not measured
        assert found.profile == other
        assert _StoredProfile(run, config).is_too_rough(
            replace(found, plan=replace(found.plan, prediction=slow(found.plan.prediction)))
        )
        assert ("with 7 threads" in _StoredProfile(run, config).remark(found)) == (
            task is PlanTask.EVALUATION
        )
    evaluation = ForwardRequest(task=PlanTask.EVALUATION, choice=choice).settings(run)
    assert not _StoredProfile(run, evaluation).is_too_rough(planned(evaluation, run))
    for change in (["precision=bf16"], ["loss=cross_entropy"], ["trainer.gather_loss=true"]):
        request = ForwardRequest(task=PlanTask.EVALUATION, choice=choice, overrides=tuple(change))
        planned(request.settings(run), run)
        assert measured.pop() == "mlp", change
        assert not measured
    write_run(tmp_path, trained, replace(of_run, profile=replace(other, device="else, 7 threads")))
    planned(ForwardRequest(task=PlanTask.EVALUATION, choice=choice).settings(run), run)
    assert measured == ["mlp"]

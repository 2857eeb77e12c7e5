"""Which steps of a run are compared with its prediction, and which are ignored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallax.common.events import EventLog, Span
from parallax.common.files import cache_directory
from parallax.config import compose
from parallax.model.describe import describe
from parallax.model.factory.gpt import GPTConfig
from parallax.report.ranks import RankSnapshot
from parallax.run import feedback
from parallax.run.feedback import (
    RECENT_STEPS,
    drop_contradicted,
    measured_spans,
    typical_step,
)
from parallax.run.prepare import _set_aside
from parallax.train.record import MEASURED_EVENTS, WARM_UP
from parallax.train.stop import contradiction
from tests.plans import make_plan
from tests.unit import plan_fakes as fakes


def write(path: Path, spans: Sequence[Span]) -> None:
    with EventLog(path) as events:
        events.extend(list(spans))


def step(number: int, rank: int = 0, seconds: float = 1.0) -> list[Span]:
    return [
        Span(rank, number, "forward", rank, 0, 10.0 * number, 10.0 * number + seconds / 2),
        Span(
            rank, number, "backward", rank, 0, 10.0 * number + seconds / 2, 10.0 * number + seconds
        ),
    ]


def test_the_last_steps_count_without_the_first(tmp_path: Path) -> None:
    for rank in range(2):
        write(
            tmp_path / f"events-rank{rank}.jsonl",
            [span for number in range(1, 6) for span in step(number, rank)],
        )
    found = measured_spans(tmp_path, ranks=2)
    assert {span.step for span in found} == {1 + WARM_UP, 2 + WARM_UP, 3 + WARM_UP}
    assert {span.rank for span in found} == {0, 1}
    assert measured_spans(tmp_path, ranks=1) == [span for span in found if span.rank == 0]


def test_only_the_end_of_a_long_run_is_compared(tmp_path: Path) -> None:
    steps = RECENT_STEPS + 50
    write(
        tmp_path / "events-rank0.jsonl", [span for number in range(steps) for span in step(number)]
    )
    found = {span.step for span in measured_spans(tmp_path, ranks=1)}
    assert found == set(range(50 + WARM_UP, steps))


def test_the_time_between_two_starts_is_no_part_of_a_step(tmp_path: Path) -> None:
    """`parallax why` of a run that was resumed once told that evaluation took 96% of the time."""
    file = tmp_path / "events-rank0.jsonl"
    killed = [span for number in range(8) for span in step(number)]
    later = [
        span._replace(start=span.start + 1000, end=span.end + 1000)
        for number in range(6, 12)
        for span in step(number)
    ]
    place: dict[str, Any] = {"rank": 0, "ranks": 1, "stage": 0, "replica": 0, "host": "here"}
    RankSnapshot(**place, time=0.0, steps=12, begun=1000.0).save(tmp_path)
    write(file, killed)
    assert {span.step for span in measured_spans(tmp_path, ranks=1)} == {2, 3, 4, 5, 6, 7}
    write(file, later[: 2 * WARM_UP])
    assert {span.step for span in measured_spans(tmp_path, ranks=1)} == {2, 3, 4, 5, 6, 7}
    write(file, later[2 * WARM_UP :])
    assert measured_spans(tmp_path, ranks=1) == later[2 * WARM_UP :]


def test_a_run_that_kept_no_events_has_its_typical_step(tmp_path: Path) -> None:
    assert measured_spans(tmp_path, ranks=1) == []
    write(tmp_path / MEASURED_EVENTS, step(7))
    assert measured_spans(tmp_path, ranks=1) == step(7)


def test_too_few_steps_are_none(tmp_path: Path) -> None:
    write(
        tmp_path / "events-rank0.jsonl",
        [span for number in range(WARM_UP) for span in step(number)],
    )
    assert measured_spans(tmp_path, ranks=1) == []


def test_the_typical_step_is_of_median_length() -> None:
    spans = [
        span
        for number, seconds in enumerate((5.0, 1.0, 3.0))
        for span in step(number, seconds=seconds)
    ]
    assert typical_step(spans) == step(2, seconds=3.0)
    assert typical_step([]) == []


def test_what_an_old_plan_measured_is_put_aside(tmp_path: Path) -> None:
    chain = describe(GPTConfig(layers=2, hidden=16, heads=2, sequence=8).build)
    plan = make_plan(chain, replicas=(1, 1))
    _set_aside(tmp_path, plan)  # nothing there yet
    plan.save(tmp_path / "plan.yaml")
    for name in (
        "plan.inputs.json",
        "profile.json",
        feedback.CALIBRATED,
        "events-rank0.jsonl",
        "metrics.jsonl",
    ):
        (tmp_path / name).write_text("")
    predicted = replace(plan.prediction, step_seconds=plan.prediction.step_seconds + 1)
    _set_aside(tmp_path, replace(plan, prediction=predicted))  # the same decisions
    assert (tmp_path / "events-rank0.jsonl").exists()
    _set_aside(
        tmp_path, replace(plan, schedule="gpipe" if plan.schedule.name != "gpipe" else "1f1b")
    )
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", f"before-{plan.hash()}"}
    kept = {path.name for path in (tmp_path / f"before-{plan.hash()}").iterdir()}
    assert kept == {
        "plan.yaml",
        "plan.inputs.json",
        "profile.json",
        feedback.CALIBRATED,
        "events-rank0.jsonl",
    }


@pytest.mark.parametrize(
    ("measured", "predicted", "steps", "contradicts"),
    [
        (0.027, 1.71, 60, True),  # the profile was measured on a busy machine
        (1.71, 0.027, 60, True),
        (1.5, 1.0, 60, False),
        (1.55, 1.0, 60, True),
        (0.67, 1.0, 60, False),
        (0.6, 1.0, 60, True),
        (1.71, 0.027, 6, False),  # the first steps
        (0.004, 0.0005, 60, False),  # dispatch
        (1.0, 0.0, 60, False),  # nothing is predicted
        (0.0, 1.0, 60, False),
    ],
)
def test_when_a_run_contradicts_its_profile(
    measured: float, predicted: float, steps: int, contradicts: bool
) -> None:
    assert bool(contradiction(measured, predicted, steps)) == contradicts


@pytest.mark.parametrize(
    ("changed", "dropped"),
    [
        ({}, True),
        ({"step_seconds_median": 1.6}, False),
        ({"stragglers": [{"rank": 1, "factor": 5.0}]}, False),
        ({"step_seconds_median": None}, False),
        ({"steps": 5}, False),
    ],
)
def test_a_contradicted_profile_is_dropped_so_that_the_next_plan_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], dropped: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache_directory().mkdir(parents=True)
    mine, other = fakes.profile([fakes.block()]), fakes.profile([fakes.block(), fakes.block()])
    files = [cache_directory() / f"profile-{name}.json" for name in ("mine", "other")]
    files[0].write_text(mine.to_json())
    files[1].write_text(replace(other, fingerprint="another").to_json())
    (tmp_path / "profile.json").write_text(replace(mine, optimizer_bytes=1.0).to_json())
    summary = {"steps": 60, "step_seconds_median": 0.027, "predicted_step_seconds": 1.71} | changed
    message = drop_contradicted(tmp_path, compose([]), summary)
    assert [file.exists() for file in files] == [not dropped, True]
    assert message == (
        "a step takes 27.0 ms, 0.02 times the 1.71 s that were predicted: the kept profile of m is dropped, and the "
        "next plan measures again"
        if dropped
        else ""
    )
    assert drop_contradicted(tmp_path, compose([]), summary) == "", "it is reported once"


@pytest.mark.parametrize(("queued", "kept"), [(0.0, False), (0.3, False), (4.0, True), (9.0, True)])
def test_a_profile_is_kept_if_the_machine_was_busy_in_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queued: float, kept: bool
) -> None:
    """Steps that took five times as long because other processes had the cores dropped a profile that was right."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache_directory().mkdir(parents=True)
    profile = fakes.profile([fakes.block()])
    cached = cache_directory() / "profile-mine.json"
    for path in (cached, tmp_path / "profile.json"):
        path.write_text(profile.to_json())
    ranks = [{"queued_seconds_per_step": 0.0}, {"queued_seconds_per_step": queued}]
    summary = {
        "steps": 60,
        "step_seconds_median": 5.0,
        "predicted_step_seconds": 1.0,
        "ranks": ranks,
    }
    assert (drop_contradicted(tmp_path, compose([]), summary) == "") == kept
    assert cached.exists() == kept


def test_a_profile_of_a_busy_machine_needs_no_message(tmp_path: Path) -> None:
    """The run has said at its start that the next plan measures again."""
    profile = replace(fakes.profile([fakes.block()]), disturbance=3.0)
    (tmp_path / "profile.json").write_text(profile.to_json())
    summary = {"steps": 60, "step_seconds_median": 0.027, "predicted_step_seconds": 1.71}
    assert drop_contradicted(tmp_path, compose([]), summary) == ""

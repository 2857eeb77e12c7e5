"""The benchmark of predictions: its configurations are valid, its arithmetic is what the page says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.prediction import CASES, Case, Outcome, Reading, _outcome, markdown, totals
from parallax.config import compose

EXACT = Outcome(
    case="one",
    predicted_seconds=1.0,
    measured_seconds=1.0,
    predicted_bytes=200 << 20,
    measured_bytes=200 << 20,
)


def test_there_are_enough_configurations_of_every_sort() -> None:
    assert len(CASES) >= 20
    assert len({str(case) for case in CASES}) == len(CASES)
    assert {len(case.replicas) for case in CASES} == {1, 2, 3}
    assert {case.activations for case in CASES} == {"keep", "offload", "recompute", "auto"}
    assert {case.schedule for case in CASES} == {"1f1b", "gpipe"}
    assert any(len(set(case.replicas)) > 1 for case in CASES)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.quick or case.model == "mlp"], ids=str
)
def test_a_command_line_means_its_configuration(case: Case) -> None:
    config = compose(case.overrides())
    assert list(config.plan.replicas) == list(case.replicas)
    assert config.plan.activations == case.activations
    assert (config.trainer.global_batch, config.trainer.microbatch) == (case.batch, case.microbatch)


def test_the_page_counts_errors_and_broken_promises() -> None:
    slow = replace(EXACT, case="two", measured_seconds=0.8, predicted_bytes=100 << 20)
    quick = replace(EXACT, case="three", measured_seconds=1.25, measured_bytes=100 << 20)
    found = totals([EXACT, slow, quick])
    assert found["median_seconds_error"] == pytest.approx(0.2)
    assert found["worst_seconds_error"] == pytest.approx(0.25)
    assert found["median_bytes_error"] == pytest.approx(0.5)
    assert found["bytes_underestimated"] == 1
    page = markdown([EXACT, slow, quick])
    assert "| two | 1.000 s | 0.800 s | +25.0% | 100.0 MiB | 200.0 MiB | -50.0% |" in page
    assert "the peak 50.0%; 1 peaks under-estimated" in page


def test_rounds_are_read_as_one_set_of_steps_and_the_worst_peak() -> None:
    first = Reading(predicted_seconds=1.0, steps=(4.0, 1.0), peaks=((100, 90), (100, 80)))
    other = Reading(predicted_seconds=3.0, steps=(2.0, 3.0, 5.0), peaks=((100, 70), (100, 95)))
    found = _outcome(CASES[0], [first, other])
    assert (found.predicted_seconds, found.measured_seconds) == (2.0, 2.0)
    assert (found.predicted_bytes, found.measured_bytes) == (100, 95)

"""The status file of a rank: its figures, and how often it is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parallax.common.events import Span
from parallax.plan.plan import Prediction, RankPrediction
from parallax.plan.schedule import Action, Kind
from parallax.report.ranks import RankSnapshot, load_snapshots
from parallax.runtime.failure.heartbeat import BeatStatus
from parallax.runtime.failure.report import RankStatus
from parallax.runtime.meters.step import StepResult
from parallax.swap.statistics import SwapStatistics
from parallax.train import status
from parallax.train.status import RankStatusFile
from tests.unit import plan_fakes as fakes

RANKS = 3
PREDICTED = RankPrediction(
    peak_bytes=1, budget_bytes=1000, tier_peak_bytes=0, offloaded_bytes=0, stall_seconds=0.0
)


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(status, "time", found)
    return found


def written(folder: Path) -> RankStatusFile:
    """Rank 2 of two stages with one and two replicas; its stage needs 100 operations for a row, of 1,000 a second."""
    plan = fakes.plan(
        stages=tuple(fakes.stages([0, 1, 2], [1, 2])),
        prediction=Prediction(step_seconds=1.0, bubble=0.0, ranks=(PREDICTED,) * RANKS),
    )
    blocks = (fakes.block(), fakes.block())
    needed = (replace(blocks[0], flops_per_row=7.0), replace(blocks[1], flops_per_row=100.0))
    costs = fakes.profile(needed, peak_flops=1000.0)
    return RankStatusFile(
        folder,
        plan,
        2,
        20,
        profile=costs,
        tokens_per_row=16,
        sensors=lambda: (61.0, None),
    )


def result(seconds: float, read: float, **swap: float) -> StepResult:
    return StepResult(
        loss=1.0,
        gradient_norm=1.0,
        seconds=seconds,
        peak_bytes=700,
        swap=SwapStatistics(**swap),  # type: ignore[arg-type]
        spans=[Span(2, 0, "forward", 1, 0, 0.0, seconds, read, read)],
        read_seconds=0.25,
    )


def beat(file: RankStatusFile, seen: RankStatus) -> None:
    file.beat(BeatStatus("rank 2", seen, 0.0, 0.0))
    file.wait()


def read(folder: Path) -> RankSnapshot:
    (found,) = load_snapshots(folder)
    return found


def test_the_figures_of_a_step(tmp_path: Path, clock: Clock) -> None:
    file = written(tmp_path)
    for step in range(1, 5):
        clock.now += 2.5
        moved = {"bytes_out": 600, "bytes_in": 400, "stall_seconds": 0.5, "limit_bytes": 1}
        file.stepped(result(2.0, 0.25 * step, **moved), step, 0.25 * step)
    beat(file, RankStatus(Action(Kind.FORWARD, 1, 3), 4, 0.1))
    found = read(tmp_path)
    assert (found.rank, found.ranks, found.stage, found.replica) == (2, RANKS, 1, 1)
    assert (found.doing, found.step, found.steps) == ("forward of micro-batch 3", 4, 20)
    assert found.step_seconds == 3
    assert found.rows_per_second == 4 / 3, "half of the rows are the other replica's"
    assert found.tokens_per_second == 16 * 4 / 3
    assert found.utilization == pytest.approx(100 * 4 / 3 / 1000)
    assert (found.device_bytes, found.device_budget_bytes) == (700, 1000)
    assert (found.stall_share, found.swap_bytes_per_second) == (0.25, 500.0)
    assert found.input_share == pytest.approx(2.25 / 3)
    assert found.fetch_seconds == 1.125, "without the first two"
    assert found.seconds_left == pytest.approx(16 * 2.5)
    assert (found.temperature, found.power_watts, found.ended) == (61.0, None, "")
    assert found.host_bytes is not None
    assert found.host_budget_bytes is not None
    assert 0 < found.host_bytes < found.host_budget_bytes


def test_the_file_is_written_at_most_once_a_second(tmp_path: Path, clock: Clock) -> None:
    file = written(tmp_path)
    seen = []
    for _ in range(20):
        clock.now += 0.25
        beat(file, RankStatus(None, -1, phase=f"at {clock.now}"))
        seen.append(read(tmp_path).doing)
    assert len(set(seen)) == 5


def test_phases_and_the_end(tmp_path: Path, clock: Clock) -> None:
    file = written(tmp_path)
    beat(file, RankStatus(None, 3, phase="evaluating"))
    assert read(tmp_path).doing == "evaluating"
    assert read(tmp_path).utilization is None
    file.end("steps")
    clock.now += 5
    beat(file, RankStatus(None, 3, phase="closing the engine"))
    assert (read(tmp_path).ended, read(tmp_path).time) == ("steps", 1e9 + 100)


def test_a_folder_that_cannot_be_written_does_not_disturb(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "ranks").write_text("")
    file = written(tmp_path)
    beat(file, RankStatus())
    file.end()
    assert load_snapshots(tmp_path) == []

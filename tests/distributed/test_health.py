"""What a run finds out beside training: a source that leaks or is slow, a rank that stays slow; and it trains on."""

from __future__ import annotations

import json
import mmap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.model.describe import describe
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan
from tests.results import read_metrics

MIB = 2**20


class Wide(nn.Module):
    """A module that takes ``seconds``, so that other work of the ranks does not count."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(64, 64), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        out: Tensor = self.linear(x)
        return out


def build(pause: float) -> nn.Module:
    """Two blocks, and two that take ``pause`` seconds more, six times as long."""
    usual = pause / 5 or 0.002
    return nn.Sequential(*(Wide(usual + more) for more in (0.0, 0.0, pause, pause)))


class Rows:
    """Rows that wait ``on_demand`` seconds when they are requested, of a source that waits ``before``, and keeps
    ``leak`` bytes of each batch."""

    def __init__(self, before: float = 0.0, on_demand: float = 0.0, leak: int = 0) -> None:
        self._before, self._on_demand, self._leak = before, on_demand, leak
        self._kept: list[Any] = []

    def batch(self, rows: int) -> Any:
        time.sleep(self._before)
        if self._leak:
            # New pages: malloc may have enough free ones for all steps, left by other tests.
            kept = mmap.mmap(-1, self._leak, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            kept.write(b"x" * self._leak)
            self._kept.append(kept)
        return self.validation(0, rows)

    def validation(self, index: int, rows: int) -> Any:
        return Waiting(self._on_demand, rows)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


class Waiting(TensorRows):
    def __init__(self, seconds: float, rows: int) -> None:
        super().__init__(torch.ones(rows, 64), torch.zeros(rows, 64))
        self._seconds = seconds

    def inputs(self, start: int, stop: int) -> Any:
        time.sleep(self._seconds)
        return super().inputs(start, stop)


def running(folder: Path, source: Rows, replicas: tuple[int, ...], steps: int, pause: float) -> Any:
    chain = describe(lambda: build(pause))
    plan = make_plan(chain, replicas=replicas, global_batch=4)
    engine = Engine.build(chain, plan, loss=nn.functional.mse_loss)
    trainer = TrainerConfig(
        steps=steps, global_batch=4, eval_every=0, eval_batches=1, checkpoint_every=0
    )
    logger = LoggerConfig(to=[], events=False)
    try:
        return train(engine, source, trainer, logger, folder, tokens_per_row=1)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_source_that_keeps_its_rows_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = running(tmp_path, Rows(leak=MIB), (1,), 120, 0.0)
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "memory keeps" in each]
    assert "rank 0: memory keeps rising: resident memory of the host by 1.0 MiB per step" in line
    assert "probably rows that the data source keeps (data.*)" in line
    assert summary["steps"] == 120
    assert summary["memory_growth"] == [line.partition(": ")[2]]


@pytest.mark.slow
def test_a_source_that_keeps_nothing_is_not(tmp_path: Path) -> None:
    assert running(tmp_path, Rows(), (1,), 120, 0.0)["memory_growth"] == []


def test_the_share_of_a_step_that_waits_for_rows_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of rows that are made before the step, and of such as are made on request."""
    shares = {}
    for name, source in (
        ("before", Rows(before=0.1)),
        ("demand", Rows(on_demand=0.05)),
        ("neither", Rows()),
    ):
        folder = tmp_path / name
        folder.mkdir()
        summary = running(folder, source, (1,), 3, 0.02 if name == "neither" else 0.0)
        metrics = [m for m in read_metrics(folder / "metrics.jsonl") if "loss" in m]
        lines = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
        shares[name] = summary["input_share"]
        if name == "neither":
            continue
        assert all(m["input_seconds"] >= 0.1 for m in metrics)
        assert all(0 < m["input_share"] <= 1 for m in metrics)
        assert json.loads((folder / "summary.json").read_text())["input_share"] == shares[name]
        assert ["  input " in line and "%" in line for line in lines[:3]] == [True] * 3
    assert 0 <= shares["neither"] < min(shares["before"], shares["demand"]) <= 1


@pytest.mark.slow
def test_a_slow_rank_is_named_once_and_trained_with(pool: Pool, tmp_path: Path) -> None:
    """It sleeps in its actions, for five times as long as the others compute."""
    for summary in pool.run(running, 2, tmp_path, Rows(), (1, 1), 14, 0.05):
        (found,) = summary["stragglers"]
        assert found["rank"] == 1
        assert found["where"].startswith("stage 1, replica 0, on ")
        assert 2.5 < found["factor"] < 7
        assert (summary["steps"], summary["ended"]) == (14, "steps")


def test_ranks_of_equal_speed_are_not(pool: Pool, tmp_path: Path) -> None:
    assert all(
        summary["stragglers"] == []
        for summary in pool.run(running, 2, tmp_path, Rows(), (2,), 14, 0.0)
    )

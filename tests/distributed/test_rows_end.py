"""Rows that end: the run ends after the last step that had some, with a checkpoint, on all ranks, and says so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from parallax.errors import DataError
from parallax.model.describe import describe
from parallax.report.run import summary_table
from parallax.runtime.batch import TensorRows
from parallax.runtime.checkpoint import list_checkpoints
from parallax.runtime.engine import Engine
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan
from tests.results import read_metrics

ROWS = 4


def batch_of(seed: int) -> TensorRows:
    random = torch.Generator().manual_seed(seed)
    return TensorRows(
        torch.randn(ROWS, 4, generator=random), torch.randn(ROWS, 2, generator=random)
    )


class Source:
    """So many batches, after which ``end`` is called."""

    def __init__(self, count: int, end: Callable[[], Any]) -> None:
        self._count, self._end, self.taken = count, end, 0

    def batch(self, rows: int) -> Any:
        if self.taken == self._count:
            return self._end()
        self.taken += 1
        return batch_of(self.taken)

    def validation(self, index: int, rows: int) -> TensorRows:
        return batch_of(0)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


def stop() -> Any:
    return next(iter(()))


def stop_in_a_generator() -> Any:
    def batches() -> Iterator[Any]:
        yield next(iter(()))

    return next(batches())


def index() -> Any:
    return [][3]


ENDS = {"stop": stop, "generator": stop_in_a_generator, "index": index}


def trained(
    folder: Path, counts: dict[int, int], end: str, options: dict[str, Any]
) -> tuple[Any, str, list[str]]:
    """The summary or the error, and the checkpoints."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    chain = describe(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    gathers = options.get("gather_loss", False)
    plan = make_plan(
        chain,
        replicas=(1, 1) if world > 1 else (1,),
        global_batch=ROWS,
        gather_loss=gathers,
        schedule="gpipe" if gathers else "1f1b",
    )
    engine = Engine.build(chain, plan, loss=nn.functional.mse_loss)
    usual = {"steps": 6, "global_batch": ROWS, "eval_every": 0, "checkpoint_every": 0}
    source = Source(counts.get(rank, counts[0]), ENDS[end])
    logger = LoggerConfig(to=[], events=False)
    summary, output = None, ""
    try:
        trainer = TrainerConfig(**{**usual, **options})  # type: ignore[arg-type]
        summary = train(engine, source, trainer, logger, folder, tokens_per_row=1)
    except DataError as error:
        output = str(error)
    finally:
        engine.close()
    return summary, output, [each.name for each in list_checkpoints(folder / "checkpoints")]


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"gather_loss": True}, {"checkpoint_every": 3}], ids=str)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("end", ["stop", "generator"])
def test_a_run_whose_rows_end_is_saved_and_evaluated(
    pool: Pool, tmp_path: Path, world: int, end: str, options: dict[str, Any]
) -> None:
    for summary, output, saved in pool.run(trained, world, tmp_path, {0: 3}, end, options):
        assert output == ""
        assert (summary["ended"], summary["steps"], summary["stopped"]) == ("rows", 3, 0)
        assert saved == ["step-00000003"]
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [each["step"] for each in metrics if "loss" in each] == [1, 2, 3]
    assert [each["step"] for each in metrics if "validation_loss" in each] == [3]
    assert json.loads((tmp_path / "summary.json").read_text())["ended"] == "rows"
    # The same command again takes no step twice, and ends in the same way.
    for summary, output, saved in pool.run(trained, world, tmp_path, {0: 3}, end, options):
        assert (output, summary["ended"], summary["steps"]) == ("", "rows", 3)
        assert saved == ["step-00000003"]
    # With more rows the run continues.
    for summary, _, saved in pool.run(trained, world, tmp_path, {0: 9}, end, options):
        assert (summary["ended"], summary["steps"]) == ("steps", 6)
        assert saved[-1] == "step-00000006"


@pytest.mark.parametrize("options", [{}, {"gather_loss": True}], ids=str)
@pytest.mark.parametrize(
    ("counts", "end", "expected", "saves"),
    [
        (
            {0: 2},
            "index",
            "after step 2, which is saved, batch(4) of the data source raised Ind",
            True,
        ),
        ({0: 0}, "stop", "before the first step, batch(4) of the data source raised StopI", False),
        (
            {0: 2, 1: 3},
            "stop",
            "after step 2, the data source has no more rows",
            False,
        ),
        ({0: 3, 1: 2}, "stop", "has no more rows on rank(s) 1, and has some on others", False),
    ],
)
def test_rows_that_must_not_end_here_are_one_line(
    pool: Pool,
    tmp_path: Path,
    options: dict[str, Any],
    counts: dict[int, int],
    end: str,
    expected: str,
    saves: bool,
) -> None:
    """Where only some ranks have rows nothing is saved: the state of the source would be a batch ahead."""
    for _, output, saved in pool.run(trained, 2, tmp_path, counts, end, options):
        assert expected in output
        assert "\n" not in output
        assert saved == (["step-00000002"] if saves else [])


def test_the_end_says_that_the_rows_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, _, _ = trained(tmp_path, {0: 2}, "stop", {})
    assert "the rows end after step 2 of 6: training ends" in capsys.readouterr().out
    Console(width=200).print(summary_table(summary))
    shown = capsys.readouterr().out
    assert "2 steps; the rows ended there: loss" in shown
    assert "rows/s" in shown
    assert "tokens" not in shown

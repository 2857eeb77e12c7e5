"""Why a run ends early: any rank may know, all end after the same step, with a checkpoint, and the summary says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallax.model.describe import describe
from parallax.model.factory.mlp import MLP, MLPConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.checkpoint import list_checkpoints, step_of
from parallax.runtime.engine import Engine
from parallax.train import loop
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from parallax.train.stop import Agreed, StopReason
from parallax.train.watchdog import NoWatchdog
from tests.distributed.pool import Pool
from tests.plans import make_plan

STEPS = 6


class SameRows:
    """One batch for ever."""

    vocabulary = 256

    def batch(self, size: int) -> TensorRows:
        return self.validation(0, size)

    def validation(self, index: int, size: int) -> TensorRows:
        torch.manual_seed(index)
        return TensorRows(torch.randint(0, 256, (size, 4)), torch.randint(0, 256, (size,)))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


class Full:
    """A reason of the user's own: one rank finds after its ``after``-th step, or the first at the second checkpoint,
    that the disk is full."""

    name, at_checkpoints, ends, then = "full", True, True, "free space"

    def __init__(self, rank: int, after: int) -> None:
        self.rank, self.after, self.steps, self.saved = rank, after, 0, 0

    def stop_requested(self) -> int:
        self.steps += 1
        return (
            28 + self.rank if self.after and self.steps == self.after + 1 else 0
        )  # once before the first step

    def verdict(self) -> str:
        self.saved += 1
        return "the disk is nearly full" if self.saved == 2 and self.rank == 0 else ""

    def summary_entries(self, agreed: Agreed, *, ended: bool) -> dict[str, Any]:
        return {"full": [agreed.number, agreed.message, ended]}


def an_engine(folder: Path) -> Engine:
    chain = describe(MLPConfig(layers=2, hidden=16, embedding=4, sequence=4).build)
    plan = make_plan(chain, replicas=(1, 1), global_batch=4)
    return Engine.build(chain, plan, loss=MLP.loss, scratch=folder / "swap")


def running(folder: Path, afters: dict[int, int], every: int) -> tuple[dict[str, Any], list[str]]:
    """The summary of a run with one reason more, and its checkpoints."""
    engine = an_engine(folder)
    usual = loop._Run._reasons

    def reasons(run: Any, on_drift: Any) -> list[StopReason]:
        rank = engine.mesh.rank
        return [*usual(run, on_drift), Full(rank, afters.get(rank, 0))]

    loop._Run._reasons = reasons  # type: ignore[method-assign]
    trainer = TrainerConfig(
        steps=STEPS, global_batch=4, eval_every=0, eval_batches=1, checkpoint_every=every
    )
    logger = LoggerConfig(to=[], events=False)
    try:
        summary = train(engine, SameRows(), trainer, logger, folder, tokens_per_row=1)
    finally:
        loop._Run._reasons = usual  # type: ignore[method-assign]
        engine.close()
    return summary, [path.name for path in list_checkpoints(folder / "checkpoints")]


@pytest.mark.parametrize(
    ("afters", "every", "steps", "facts"),
    [
        ({1: 3}, 0, 3, ["full", [29, "", True]]),  # a rank that writes nothing
        ({0: 2, 1: 2}, 0, 2, ["full", [29, "", True]]),
        ({}, 2, 4, ["full", [0, "the disk is nearly full", True]]),
        ({}, 0, 6, ["steps", [0, "", False]]),
        ({0: 6}, 0, 6, ["full", [28, "", True]]),  # the last step anyway, but it is not evaluated
    ],
)
def test_a_reason_more_ends_all_ranks_after_the_same_step(
    pool: Pool,
    tmp_path: Path,
    afters: dict[int, int],
    every: int,
    steps: int,
    facts: list[Any],
) -> None:
    for summary, checkpoints in pool.run(running, 2, tmp_path, afters, every):
        assert [summary["ended"], summary["full"]] == facts
        assert (summary["steps"], summary["stopped"], summary["drift"]) == (steps, 0, "")
        assert int(checkpoints[-1].rpartition("-")[2]) == steps


class Counted(SameRows):
    """Rows that contain their index; the source resumes from the state that it returns."""

    def __init__(self) -> None:
        self.state = {"taken": 0}

    @property
    def taken(self) -> int:
        return self.state["taken"]

    def batch(self, size: int) -> TensorRows:
        self.state["taken"] += 1
        return self.validation(self.taken, size)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class StopsAtStep(NoWatchdog):
    """Asks this rank to end in the midst of its third step, or another."""

    def __init__(self, source: Counted, step: int = 3) -> None:
        self._source, self._step = source, step

    def stop_requested(self) -> int:
        return 15 if self._source.taken >= self._step else 0


Ended = tuple[list[dict[str, Any]], dict[str, Tensor], list[tuple[int, dict[str, Any]]]]


def in_parts(folder: Path, every: int, requested: bool) -> Ended:
    """The summaries of a run that one rank is requested to end, and that resumes; its weights; the contents of the
    checkpoints that were there in between."""
    summaries, between = [], []
    for ask in (requested, False):
        engine, source = an_engine(folder), Counted()
        watchdog = StopsAtStep(source) if ask and engine.mesh.rank == 1 else NoWatchdog()
        trainer = TrainerConfig(
            steps=STEPS, global_batch=4, eval_every=0, eval_batches=1, checkpoint_every=every
        )
        logger = LoggerConfig(to=[], events=False)
        reported = train(
            engine, source, trainer, logger, folder, tokens_per_row=1, watchdog=watchdog
        )
        summaries.append(reported)
        weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
        engine.close()
        for path in (
            list_checkpoints(folder / "checkpoints") if ask == requested and requested else ()
        ):
            index = json.loads((path / "checkpoint.json").read_text())
            between.append((step_of(path), index))
        if not requested:
            break
    return summaries, weights, between


@pytest.mark.parametrize("every", [0, 1])
def test_a_request_in_a_step_ends_all_after_it(pool: Pool, tmp_path: Path, every: int) -> None:
    for name in ("parts", "whole"):
        (tmp_path / name).mkdir()
    parts = pool.run(in_parts, 2, tmp_path / "parts", every, True)
    whole = pool.run(in_parts, 2, tmp_path / "whole", every, False)
    for (summaries, weights, between), (_, others, _) in zip(parts, whole):
        first, second = summaries
        assert (first["ended"], first["stopped"], first["steps"]) == ("stopped", 15, 3)
        assert (second["ended"], second["steps"]) == ("steps", STEPS)
        step, index = between[-1]
        assert (step, index["state"]["source"]) == (3, {"taken": 3})
        assert "loss" in index["metrics"]
        assert weights.keys() == others.keys()
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def extended(folder: Path) -> tuple[str, int]:
    """What the summary says of a complete run that was made longer and stopped in its next step."""
    for steps in (2, 4):
        engine, source = an_engine(folder), Counted()
        trainer = TrainerConfig(steps=steps, global_batch=4, eval_batches=1)
        logger = LoggerConfig(to=[], events=False)
        requested = StopsAtStep(source)
        train(engine, source, trainer, logger, folder, tokens_per_row=1, watchdog=requested)
        engine.close()
        torch.distributed.barrier()
    summary = json.loads((folder / "summary.json").read_text())
    return summary["ended"], summary["steps"]


def test_a_request_in_the_first_step_of_a_start_is_reported(pool: Pool, tmp_path: Path) -> None:
    """Who goes by the summary queues the run again."""
    assert pool.run(extended, 2, tmp_path) == [("stopped", 3)] * 2

"""Steps of the engine that cannot be taken: nothing is updated, and nothing is left."""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from parallax.errors import NonFiniteError, ParallaxError, PlanError
from parallax.model.describe import describe
from parallax.model.factory.gpt import GPT
from parallax.runtime.engine import Engine
from tests.distributed.pool import Pool
from tests.distributed.test_engine import POISON, Case, gpt, make_batch, poisoned, that_fails
from tests.plans import make_plan

# ---- what goes wrong


def poisoned_step(case: Case) -> tuple[str, list[str], int, float]:
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        good = case.batches()[0]
        bad = make_batch(8, 1)
        bad.targets(0, 8)[5, 3] = POISON
        engine.step(good)
        before = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
        states = {
            p: {n: v.clone() for n, v in engine._optimizer.states(p).items()}
            for p in engine.parameters.values()
        }
        try:
            engine.step(bad)
        except NonFiniteError as error:
            message = str(error)
        changed = [
            name
            for name, tensor in engine.parameters.items()
            if not torch.equal(tensor, before[name])
        ]
        for parameter, state in states.items():
            now = engine._optimizer.states(parameter)
            changed += [key for key, value in state.items() if not torch.equal(value, now[key])]
        after = engine.step(good).loss
        engine.close()
    return message, changed, engine.completed_steps, after


def test_nan_stops_all_ranks_and_updates_nothing(pool: Pool) -> None:
    case = Case(gpt(), loss=poisoned).under((1, 2))
    for message, changed, steps, after in pool.run(poisoned_step, 3, case):
        assert "nothing was updated" in message
        assert not changed
        assert steps == 2
        assert after == after


def huge(outputs: Tensor, targets: Tensor) -> Tensor:
    return GPT.loss(outputs, targets) * 1e200


def first_refusal(case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        try:
            engine.step(case.batches()[0])
        except ParallaxError as error:
            return str(error)
        return ""


def test_gradient_norm_whose_square_overflows(pool: Pool) -> None:
    """``norm ** 2`` on a Python float raised OverflowError on one rank, and its peers waited."""
    case = Case(gpt(), loss=huge).under((1, 1))
    for message in pool.run(first_refusal, 2, case):
        assert "nothing was updated" in message


def test_plan_of_another_model_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    chain, other = describe(gpt()), describe(gpt(layers=3))
    with mock.patch(
        "parallax.runtime.stage.materialise_each", side_effect=AssertionError("allocated")
    ):
        with pytest.raises(PlanError, match="plan again"):
            Engine.build(chain, make_plan(other), loss=GPT.loss, scratch=tmp_path)
        with pytest.raises(PlanError, match="needs 2 ranks but 1 run"):
            Engine.build(chain, make_plan(chain, replicas=(1, 1)), loss=GPT.loss, scratch=tmp_path)


def failing_step(case: Case) -> tuple[str, list[str], tuple[int, int], list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        kind, notes = "", []
        try:
            engine.step(case.batches()[0])
        except Exception as error:
            kind, notes = type(error).__name__, list(error.__notes__)
        gc.collect()
        manager = engine._manager
        assert manager is not None
        deadline = time.monotonic() + 20
        while (left := (manager.stored_bytes, manager.resident_bytes)) != (
            0,
            0,
        ) and time.monotonic() < deadline:
            time.sleep(0.01)  # a write that had begun is let end
        after = [engine.step(case.batches()[0]).loss] if engine.mesh.world is None else []
        engine.close()
    return kind, notes, left, after


def test_exception_in_a_block_releases_what_was_in_flight(pool: Pool) -> None:
    case = Case(that_fails).under((1,), "offload", schedule="gpipe")
    ((kind, notes, left, after),) = pool.run(failing_step, 1, case)
    assert (kind, left) == ("ValueError", (0, 0))
    assert any("stage 0 of 1, step 0" in note for note in notes)
    assert after == after
    first, second = pool.run(failing_step, 2, case.under((1, 1), "offload", schedule="gpipe"))
    assert second[0] == "ValueError"
    assert first[0]  # it lost its peer
    assert first[2] == second[2] == (0, 0)

"""Micro-batches that differ: in length, in number, and in the evaluations between two steps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.model.describe import Chain, parameter_names
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.plan.plan import Plan
from parallax.plan.rows import micro_batch_rows
from parallax.runtime.engine import Engine
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import DRAINING, described, make_plan

MICRO = 2
# Fewer micro-batches than stages, fewer rows than replicas, last ones of any size.
SIZES = 5, 1, 8, 3, 1, 7
LONGEST, VOCABULARY = 12, 32
REPLICAS = [(1, 1, 1), (1, 2), (2, 2, 2)]
MODEL = GPTConfig(layers=4, hidden=16, heads=2, sequence=LONGEST, vocabulary=VOCABULARY)
FP64 = PrecisionConfig(parameters="fp64", compute="fp64")
Gradients = dict[str, Tensor]


def micro_bounds(rows: int) -> list[tuple[int, int]]:
    count = -(-rows // MICRO)
    return [micro_batch_rows(rows, count, micro) for micro in range(count)]


class Ragged:
    """Tokens made on demand; the micro-batch that a row belongs to says how many."""

    def __init__(self, rows: int) -> None:
        self._rows, self._bounds = rows, micro_bounds(rows)

    def __len__(self) -> int:
        return self._rows

    def inputs(self, start: int, stop: int) -> Tensor:
        return self._tokens(start, stop)[:, :-1]

    def targets(self, start: int, stop: int) -> Tensor:
        return self._tokens(start, stop)[:, 1:]

    def _tokens(self, start: int, stop: int) -> Tensor:
        (first,) = [low for low, high in self._bounds if low <= start and stop <= high]
        length = 2 + (7 * first) % (LONGEST - 1)
        rows = [
            torch.Generator().manual_seed(1000 * self._rows + row) for row in range(start, stop)
        ]
        return torch.stack(
            [torch.randint(0, VOCABULARY, (length + 1,), generator=each) for each in rows]
        )


@dataclass(frozen=True)
class Case:
    schedule: str
    replicas: tuple[int, ...]
    directive: str = "keep"

    @property
    def interleave(self) -> int:
        return 2 if DRAINING[self.schedule].allows(2) and len(self.replicas) < 4 else 1

    def plan(self, chain: Chain) -> Plan:
        return make_plan(
            chain,
            replicas=self.replicas,
            schedule=self.schedule,
            directive=self.directive,
            microbatch=MICRO,
            interleave=self.interleave,
        )

    def engine(self, folder: str) -> Engine:
        chain = make_chain()
        return Engine.build(
            chain,
            self.plan(chain),
            loss=GPT.loss,
            optimizer=AdamWConfig(lr=1e-4),
            precision=FP64,
            swap=SwapConfig(minimum_bytes=1),
            scratch=Path(folder) / "swap",
        )


def make_chain() -> Chain:
    return described(MODEL.build, seed=3, dtype=torch.float64)


# ---- gradients


def plain_model() -> tuple[nn.Module, Gradients]:
    """The blocks, and their parameters by name."""
    chain = make_chain()
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    names = parameter_names(chain, range(len(blocks))).items()
    return nn.Sequential(*blocks), {
        name: blocks[index].get_parameter(inner) for name, (index, inner) in names
    }


def plain() -> list[tuple[float, Gradients]]:
    """A loop over micro-batches, for each size."""
    model, parameters = plain_model()
    found = []
    for rows in SIZES:
        batch, total = Ragged(rows), 0.0
        model.zero_grad()
        for low, high in micro_bounds(rows):
            loss = (
                GPT.loss(model(batch.inputs(low, high)), batch.targets(low, high))
                * (high - low)
                / rows
            )
            loss.backward()
            total += loss.item()
        found.append(
            (total, {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        )
    return found


def piped(case: Case) -> list[tuple[float, Gradients]]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        for rows in SIZES:
            loss = engine.gradients(Ragged(rows))
            found.append(
                (
                    loss,
                    {name: gradient.clone() for name, gradient in engine.gradients_by_name.items()},
                )
            )
        engine.close()
    return found


THOROUGH = [pytest.mark.thorough]
CHOSEN = [("1f1b", (2, 1)), ("interleaved", (2, 1)), ("zb-v", (1, 1))]
"""A pipeline rank with one stage, with several, and with a split backward evaluates in its own way."""


def in_turn(schedules: Iterable[str], layouts: list[tuple[int, ...]]) -> list[Any]:
    """Each schedule with every second of the layouts, the next one with the others; the rest is thorough."""
    return [
        pytest.param(schedule, layout, marks=[pytest.mark.thorough] if (i + j) % 2 else [])
        for i, schedule in enumerate(schedules)
        for j, layout in enumerate(layouts)
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [
        pytest.param(schedule, replicas, marks=THOROUGH if (i + j) % 3 else [])
        for i, schedule in enumerate(DRAINING)
        for j, replicas in enumerate(REPLICAS)
    ],
    ids=str,
)
def test_lengths_and_numbers_of_micro_batches_vary(
    pool: Pool, schedule: str, replicas: tuple[int, ...]
) -> None:
    directive = {"gpipe": "offload", "zb-h1": "recompute", "interleaved": "offload"}.get(
        schedule, "keep"
    )
    expected = plain()
    seen = set()
    for by_size in pool.run(piped, sum(replicas), Case(schedule, replicas, directive)):
        for (loss, gradients), (plain_loss, plain_gradients) in zip(by_size, expected, strict=True):
            assert loss == pytest.approx(plain_loss, rel=1e-12)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-9, atol=1e-12)
                seen.add(name)
    assert seen == set(expected[0][1])


# ---- prediction


def predictions(case: Case) -> list[list[tuple[int, Tensor]]]:
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        found = [engine.predict(Ragged(rows)) for rows in SIZES]
        engine.close()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("schedule", "replicas"),
    in_turn(["gpipe", "interleaved", "zb-h2", "zb-v"], [(1, 1), (2, 3), (3, 1), (1, 1, 2)]),
    ids=str,
)
def test_predictions_are_the_plain_models(
    pool: Pool, schedule: str, replicas: tuple[int, ...]
) -> None:
    case = Case(schedule, replicas, "offload")
    ranks = pool.run(predictions, sum(replicas), case)
    model = plain_model()[0]
    plan = case.plan(make_chain())
    last = plan.ranks(len(plan.stages) - 1)
    for index, rows in enumerate(SIZES):
        parts = [part for number in last for part in ranks[number][index]]
        assert len(parts) == sum(len(rank[index]) for rank in ranks)
        for rank in ranks:
            assert [first for first, _ in rank[index]] == sorted(first for first, _ in rank[index])
        by_row = {first + n: output[n] for first, output in parts for n in range(len(output))}
        assert sorted(by_row) == list(range(rows)), "each row once"
        with torch.no_grad():
            for low, high in micro_bounds(rows):
                expected = model(Ragged(rows).inputs(low, high))
                torch.testing.assert_close(
                    torch.stack([by_row[n] for n in range(low, high)]), expected
                )


# ---- evaluation between steps


def training(case: Case, *, evaluating: bool) -> tuple[list[float], list[float], Gradients]:
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        losses, evaluated = [], []
        for rows in SIZES[:4]:
            losses.append(engine.step(Ragged(rows)).loss)
            if evaluating:
                evaluated += [engine.evaluate(Ragged(size)) for size in (7, 1)]
                engine.predict(Ragged(3))
        weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
        engine.close()
    return losses, evaluated, weights


def plainly_training(case: Case) -> tuple[list[float], list[float], Gradients]:
    return training(case, evaluating=False)


def training_and_evaluating(case: Case) -> tuple[list[float], list[float], Gradients]:
    return training(case, evaluating=True)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [
        pytest.param(schedule, replicas, marks=[] if (schedule, replicas) in CHOSEN else THOROUGH)
        for schedule in DRAINING
        for replicas in ((1, 1), (2, 1))
    ],
    ids=str,
)
def test_evaluation_between_steps_changes_nothing(
    pool: Pool, schedule: str, replicas: tuple[int, ...]
) -> None:
    case = Case(schedule, replicas, "offload")
    expected = pool.run(plainly_training, sum(replicas), case)
    found = pool.run(training_and_evaluating, sum(replicas), case)
    for (losses, _, weights), (same_losses, evaluated, same_weights) in zip(expected, found):
        assert same_losses == losses
        assert all(torch.equal(same_weights[name], weight) for name, weight in weights.items())
        assert evaluated[::2] == sorted(evaluated[::2], reverse=True), (
            "it is the trained model that is evaluated"
        )

"""Models of every shape under every schedule: the pipeline's gradients are the plain model's."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.model.describe import Chain, describe, parameter_names
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.plan.rows import micro_batch_rows
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import DRAINING, make_plan, stages_each
from tests.zoo import ADAPTED, FAMILIES, ZOO, Entry, tokens_batch

ROWS, MICRO = 7, 2
REPLICAS = [(1, 1), (2, 1), (1, 2), (1, 1, 1), (1, 3, 2)]
DIRECTIVES = ["keep", "offload", "recompute"]
TIED_GPT = GPTConfig(layers=2, hidden=16, heads=2, sequence=6, vocabulary=16)
OWN = {**ZOO, "gpt": Entry(TIED_GPT.build, GPT.loss, tokens_batch)}
MODELS: dict[str, Entry] = {**OWN, **FAMILIES, **ADAPTED}
Found = tuple[float, dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """One model under one plan; ``offloaded``: with all parameters that may be, and the optimizer's states."""

    model: str
    schedule: str
    replicas: tuple[int, ...]
    directive: str
    compute: str = "fp64"
    offloaded: bool = False

    def __str__(self) -> str:
        suffix = "-offloaded" if self.offloaded else ""
        return (
            f"{self.model}-{self.schedule}-{self.replicas}-{self.directive}-{self.compute}{suffix}"
        )

    @property
    def precision(self) -> PrecisionConfig:
        return PrecisionConfig(
            parameters="fp64" if self.compute == "fp64" else "fp32", compute=self.compute
        )

    def chain(self) -> Chain:
        entry = MODELS[self.model]
        return describe(
            entry.build, seed=3, dtype=self.precision.parameter_dtype, sample=entry.sample
        )

    @property
    def interleave(self) -> int:
        return stages_each(self.schedule, len(self.replicas))


def cases() -> list[Any]:
    """Each model under each schedule; replicas and directives take turns, so that each meets each. Five cases of six
    are for the thorough tests: what is left has each model under one of the schedules, and each schedule with a sixth
    of the models, on three ranks at most, each of which records the model; in two-byte numbers every eighth model."""
    turns = itertools.cycle(itertools.product(REPLICAS, DIRECTIVES))
    pairs = itertools.cycle(replicas for replicas in REPLICAS if len(replicas) == 2)
    few = itertools.cycle([(1, 1), (1, 1), (2, 1), (1, 1), (1, 2)])
    found: list[Any] = []
    for model, schedule in itertools.product(MODELS, DRAINING):
        replicas, directive = next(turns)
        if not stages_each(schedule, len(replicas)):
            replicas = next(pairs)
        # Every second model and schedule: each of both has cases with and without.
        suffix = (list(MODELS).index(model) + list(DRAINING).index(schedule)) // len(DRAINING) % 2
        found.append(Case(model, schedule, replicas, directive, offloaded=suffix == 0))
    schedules = len(DRAINING)
    skipped = [(i // schedules + i % schedules) % schedules > 0 for i in range(len(found))]
    found = [
        pytest.param(case, marks=pytest.mark.thorough)
        if skip
        else replace(case, replicas=next(few))
        for case, skip in zip(found, skipped)
    ]
    short = [
        Case(model, schedule, (2, 1), "keep", "bf16")
        for model, schedule in zip(MODELS, itertools.cycle(DRAINING))
    ]
    thorough = [
        pytest.param(case, marks=pytest.mark.thorough) for i, case in enumerate(short) if i % 8
    ]
    return found + short[::8] + thorough


def every_case() -> list[Case]:
    """Each model under each schedule with each directive in each precision, with even and uneven replicas, with its
    parameters on the device and offloaded."""
    layouts, precisions = [(2, 2), (1, 3, 2)], ("fp64", "bf16")
    return [
        Case(*each)
        for each in itertools.product(
            MODELS, DRAINING, layouts, DIRECTIVES, precisions, (False, True)
        )
        if stages_each(each[1], len(each[2]))
    ]


def plain(case: Case) -> Found:
    """The model itself in one process, with the weights of the chain. Batch statistics are of micro-batches, so where a
    model has some, it goes through them one by one."""
    entry, chain = MODELS[case.model], case.chain()
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    model = entry.build().to(chain.dtype)
    states = [block.state_dict(keep_vars=True) for block in blocks]
    values = {
        name: states[i][inner]
        for name, (i, inner) in parameter_names(chain, range(len(blocks))).items()
    }
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in values:
                tensor.copy_(values[name])
    batch, count = make_batch(case), micro_batches(ROWS)
    bounds = (
        [micro_batch_rows(ROWS, count, m) for m in range(count)] if entry.buffers else [(0, ROWS)]
    )
    total = 0.0
    for low, high in bounds:
        with case.precision.autocast("cpu"):
            loss = (
                entry.loss(call(model, batch.inputs(low, high)), batch.targets(low, high))
                * (high - low)
                / ROWS
            )
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def make_batch(case: Case) -> TensorRows:
    """Rows in the type of the parameters."""
    batch, dtype = MODELS[case.model].batch(ROWS, 0), case.precision.parameter_dtype

    def cast(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: cast(value) for name, value in values.items()}
        if isinstance(values, tuple):
            return tuple(map(cast, values))
        return values.to(dtype) if values.is_floating_point() else values

    return TensorRows(cast(batch.inputs(0, ROWS)), cast(batch.targets(0, ROWS)))


def micro_batches(rows: int) -> int:
    return -(-rows // MICRO)


def call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def piped(case: Case) -> Found:
    entry, chain = MODELS[case.model], case.chain()
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(
            chain,
            replicas=case.replicas,
            schedule=case.schedule,
            directive=case.directive,
            global_batch=ROWS,
            microbatch=MICRO,
            interleave=case.interleave,
            **({"optimizer_offload": 1.0, "parameter_offload": 1.0} if case.offloaded else {}),
        )
        engine = Engine.build(
            chain,
            plan,
            loss=entry.loss,
            precision=case.precision,
            replicas=ReplicasConfig(batchnorm="sync"),
            swap=SwapConfig(minimum_bytes=1),
            scratch=Path(folder) / "swap",
        )
        loss = engine.gradients(make_batch(case))
        gradients = {name: gradient.clone() for name, gradient in engine.gradients_by_name.items()}
        engine.close()
    return loss, gradients


ALL = [*cases(), *(pytest.param(case, marks=pytest.mark.thorough) for case in every_case())]


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_gradients_equal_the_plain_models(pool: Pool, case: Case) -> None:
    loss, expected = plain(case)
    whole = float(torch.stack([g.norm() for g in expected.values()]).norm())
    # Parts of transformers are in fp32 whatever the rest is.
    exact = 1e-10 if case.model in OWN else 2e-6
    seen = set()
    for found, gradients in pool.run(piped, sum(case.replicas), case):
        assert abs(found - loss) <= (exact if case.compute == "fp64" else 1e-2) * abs(loss)
        for name, gradient in gradients.items():
            seen.add(name)
            wanted = expected.get(name, torch.zeros_like(gradient))
            error = float((gradient - wanted).norm())
            if case.compute == "fp64":
                assert error <= exact * max(float(wanted.norm()), 1e-3 * whole), name
            else:
                assert error <= 0.1 * max(float(wanted.norm()), 0.1 * whole), name
    assert seen >= set(expected)

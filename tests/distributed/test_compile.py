"""Compiled blocks compute what blocks compute, under every plan. Compiling is slow, so there are few of these."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.pool import ROOT, Pool
from tests.distributed.test_batchnorm import losses_and_states, pictures
from tests.distributed.test_engine import Case, Outcome, compare, gpt, training

SIZES = (8, 5, 2)


def with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, 16), nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2)), nn.Linear(64, 64)
    )


def small() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, 16), nn.Sequential(nn.Linear(16, 64), nn.GELU()), nn.Linear(64, 64)
    )


def with_norm() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(48, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 5)
    )


def trained(case: Case) -> tuple[Outcome, int]:
    """What was trained, and how many programs this process has compiled so far: it keeps them for other engines."""
    import torch._dynamo.utils as dynamo

    return training(case), dynamo.counters["stats"]["unique_graphs"]


OFFLOADED = {"parameter_offload": 1.0, "optimizer_offload": 1.0}
PLANS: list[Any] = [
    # As with everything offloaded.
    pytest.param({"replicas": (1,), "directive": "keep"}, marks=pytest.mark.thorough),
    # As with zb-h1 below, but whole.
    pytest.param(
        {"replicas": (1,), "directive": "offload", "microbatch": 3, "swap_limit": 200000},
        marks=pytest.mark.thorough,
    ),
    # As with_dropout and with_norm below.
    pytest.param(
        {"replicas": (1,), "directive": "recompute", "microbatch": 3}, marks=pytest.mark.thorough
    ),
    pytest.param(
        {"replicas": (1, 1), "directive": "keep", "schedule": "zb-h1"}, marks=pytest.mark.thorough
    ),
    # Each rank compiles for itself.
    {"replicas": (1,), "directive": "offload", "schedule": "zb-h1", "swap_limit": 200000},
    pytest.param(
        {"replicas": (1, 1), "directive": "offload", "schedule": "zb-h1", "swap_limit": 200000},
        marks=pytest.mark.thorough,
    ),
    pytest.param(
        {"replicas": (1, 2), "directive": "recompute", "microbatch": 3}, marks=pytest.mark.thorough
    ),
    {"replicas": (1,), **OFFLOADED},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "factory",
    [small, pytest.param(gpt(tied=False, layers=1), marks=pytest.mark.thorough)],
    ids=["small", "gpt"],
)
@pytest.mark.parametrize("options", PLANS, ids=str)
def test_compiled_blocks_train_alike(
    pool: Pool, factory: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    plain = Case(factory, dtype=torch.float32, sizes=SIZES).under(**options)
    expected = pool.run(training, plain.world, plain)
    found = pool.run(trained, plain.world, replace(plain, compile=True))
    for (outcome, programs), wanted in zip(found, expected):
        compare([replace(outcome, weights=wanted.weights)], wanted, 1e-5)
        # Adam makes steps of a bias of the keys out of its gradient's rounding errors.
        compare([outcome], wanted, 1e-2)
        assert programs > 0


@pytest.mark.slow
def test_a_recomputed_compiled_block_drops_the_same(pool: Pool) -> None:
    case = Case(with_dropout, dtype=torch.float32, sizes=SIZES, compile=True).under(
        (1,), microbatch=3
    )
    (kept,) = pool.run(training, 1, case)
    (again,) = pool.run(training, 1, case.under((1,), "recompute", microbatch=3))
    compare([again], kept, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "replicas", "directive"),
    [
        ("sync", (2,), "recompute"),
        pytest.param("sync", (2,), "keep", marks=pytest.mark.thorough),
        pytest.param("replica", (1,), "keep", marks=pytest.mark.thorough),
        pytest.param("replica", (1,), "recompute", marks=pytest.mark.thorough),
    ],
)
def test_norms_in_compiled_blocks(
    pool: Pool, mode: str, replicas: tuple[int, ...], directive: str
) -> None:
    plain = replace(pictures(mode, sizes=(8, 5)), factory=with_norm)
    case = replace(plain, options={"replicas": replicas, "microbatch": 4})
    expected = pool.run(losses_and_states, case.world, case)
    compiled = replace(case, compile=True, options={**case.options, "directive": directive})
    for outcome, wanted in zip(pool.run(losses_and_states, case.world, compiled), expected):
        compare([outcome], wanted, 1e-9)


STEP = """
import sys, torch
before = "torch._dynamo" in sys.modules
from parallax.runtime.engine import Engine
from parallax.model.describe import describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.lion import LionConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from tests.plans import make_plan

chain = describe(GPTConfig(layers=1, hidden=16, heads=2, sequence=8, vocabulary=16).build)
tokens = torch.zeros(2, 8, dtype=torch.int64)
for config in (AdamWConfig(), SGDConfig(), LionConfig()):
    plan = make_plan(chain, global_batch=2, microbatch=1)
    engine = Engine.build(chain, plan, loss=GPT.loss, optimizer=config)
    engine.step(TensorRows(tokens, tokens))
    engine.close()
print(before, "torch._dynamo" in sys.modules,
      "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook" in sys.modules)
"""


@pytest.mark.slow
def test_the_compiler_is_loaded_only_on_request() -> None:
    """It takes as long as torch itself. A constructor that is recorded, an optimizer that is made and one that steps
    loaded it."""
    found = subprocess.run(
        [sys.executable, "-c", STEP], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["False", "False", "False"]

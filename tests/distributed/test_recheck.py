"""A bit that flips is found and named; and training with the check is training without it, bit by bit."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.errors import CorruptionError
from parallax.model.describe import describe
from parallax.runtime.batch import TensorRows
from parallax.runtime.checkpoint import CheckpointReader, list_checkpoints
from parallax.runtime.engine import Engine
from parallax.runtime.health.recheck import Recheck, digest
from parallax.train.loop import TrainerConfig, train
from parallax.train.monitor import LoggerConfig
from tests.distributed.pool import Pool
from tests.distributed.test_engine import Case, gpt, gpt_with_dropout, make_batch
from tests.distributed.test_stop import SameRows
from tests.plans import make_plan


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, 16),
        nn.Flatten(),
        nn.Linear(256, 16),
        nn.BatchNorm1d(16),
        nn.Linear(16, 64),
    )


def first_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets[:, 0])


# ---- nothing of it stays


def trained(case: Case, checked: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        torch.manual_seed(5)
        losses = []
        for step in range(4):
            batch = make_batch(8, step)
            result = engine.step(batch)
            losses.append((result.loss, result.gradient_norm))
            if checked:
                assert Recheck(engine.part_runs()).check(batch, step) == ""
        weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
        engine.close()
    return losses, weights, torch.rand(2).tolist()


PLANS: list[tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = [
    (gpt_with_dropout, (1, 2), {"directive": "offload"}),
    (gpt(tied=False), (2,), {"optimizer_offload": 1.0, "directive": "recompute"}),
    (gpt(tied=False), (1,), {"parameter_offload": 1.0, "optimizer_offload": 1.0}),
    (gpt(tied=False), (1, 1), {"schedule": "zb-h1"}),
    (normed, (2,), {"microbatch": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "replicas", "options"), PLANS, ids=range(len(PLANS)))
def test_training_with_it_is_training_without(
    pool: Pool, factory: Callable[[], nn.Module], replicas: tuple[int, ...], options: dict[str, Any]
) -> None:
    case = Case(factory).under(replicas, **options)
    case = replace(case, loss=first_token) if factory is normed else case
    jobs = [pool.run(trained, case.world, case, checked) for checked in (True, False)]
    for (losses, weights, drawn), (others, other_weights, other) in zip(*jobs):
        assert losses == others
        assert all(torch.equal(weights[name], weight) for name, weight in other_weights.items())
        assert drawn == other


# ---- what is wrong


class Flips(nn.Module):
    """A linear layer, of whose output, or of the gradient of whose input, a bit flips at one of its calls on a rank."""

    def __init__(self, where: str, rank: int, call: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.where, self.rank, self.call, self.calls = where, rank, call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        mine = dist.is_initialized() and dist.get_rank() == self.rank
        now = mine and self.call in (self.calls, 0) and self.where != "random"
        out = self.linear(x)
        if now and self.where == "output":
            return FlipForward.apply(out)
        if now and self.where == "gradient":
            return FlipBackward.apply(out)
        return out + int.from_bytes(os.urandom(2), "big") if self.where == "random" else out


def flipped(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1).view(torch.int32)[0] ^= 1 << 20
    return changed


class FlipForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return flipped(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class FlipBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return flipped(gradient)


def build(where: str, rank: int, call: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), Flips("", 0, 0), Flips(where, rank, call), nn.Linear(8, 8)
    )


def found(replicas: tuple[int, ...], where: str, rank: int, call: int) -> str:
    """What is found after a step, of four micro-batches."""
    chain = describe(partial(build, where, rank, call))
    plan = make_plan(chain, replicas=replicas, global_batch=8, microbatch=2)
    engine = Engine.build(chain, plan, loss=nn.functional.mse_loss)
    torch.manual_seed(0)
    batch = TensorRows(torch.randn(8, 8), torch.randn(8, 8))
    engine.step(batch)
    if where == "weight" and engine.mesh.rank == rank:
        name = "2.linear.weight"
        with torch.no_grad():
            engine.parameters[name].copy_(flipped(engine.parameters[name].detach()))
    said = Recheck(engine.part_runs()).check(batch, 1)
    engine.close()
    return said


AGAIN = ", computed from the same rows and weights"
OF_TWO = "; which of the two is right, nobody knows"


@pytest.mark.parametrize(
    ("replicas", "fault", "expected"),
    [
        # The fifth and sixth times are the two of the check.
        (
            (1, 1),
            ("output", 1, 6),
            f"rank 1 (stage 1, replica 0): block 2 put out other values the second time{AGAIN}",
        ),
        (
            (1, 1),
            ("gradient", 1, 5),
            "rank 0 (stage 0, replica 0): the gradient that came back to block 1's output was another the second "
            f"time{AGAIN}",
        ),
        (
            (1, 2),
            ("weight", 2, 0),
            "rank 2 (stage 1, replica 1): parameter 2.linear.weight differs from that of rank 1"
            + OF_TWO,
        ),
        (
            (3,),
            ("weight", 0, 0),
            "rank 0 (stage 0, replica 0): parameter 2.linear.weight differs from that of rank 1",
        ),
        (
            (1, 2),
            ("output", 2, 0),
            "rank 2 (stage 1, replica 1): block 2 puts out other values, for the same rows, than rank 1"
            + OF_TWO,
        ),
        ((1, 1), ("random", 0, 0), ""),
        ((1, 1), ("", 0, 0), ""),
    ],
    ids=["output", "gradient", "weight", "one of three", "always", "random", "nothing"],
)
def test_a_flipped_bit_is_named(
    pool: Pool, replicas: tuple[int, ...], fault: tuple[str, int, int], expected: str
) -> None:
    said = pool.run(found, sum(replicas), replicas, *fault)
    assert said == [expected] * sum(replicas)


# ---- in a run


def mlp_that_flips() -> nn.Module:
    model = nn.Sequential(nn.Embedding(256, 8), nn.Flatten(), nn.Linear(32, 8), Wrong())
    model.append(nn.Linear(8, 256))
    return model


class Wrong(nn.Module):
    """Wrong at its fourth call: of a run of steps with one micro-batch each, the second of the check after two."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Wrong.calls += torch.is_grad_enabled()
        return FlipForward.apply(x) if Wrong.calls == 4 else x * 1.0


def test_ragged_rows_have_bits_to_compare() -> None:
    rows = [torch.ones(2, 3), torch.ones(1, 3)]
    for layout in (torch.jagged, torch.strided):
        one, same = (torch.nested.nested_tensor(rows, layout=layout) for _ in range(2))
        other = torch.nested.nested_tensor([rows[0], 2 * rows[1]], layout=layout)
        assert digest(one) == digest(same) != digest(other)


@pytest.mark.parametrize("corruption", ["stop", "note"])
def test_a_run_stops_or_notes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], corruption: str
) -> None:
    chain = describe(mlp_that_flips)
    plan = make_plan(chain, global_batch=4, microbatch=4)
    engine = Engine.build(chain, plan, loss=nn.functional.cross_entropy)
    trainer = TrainerConfig(
        steps=4, global_batch=4, eval_every=0, check_every=2, corruption=corruption
    )
    logger = LoggerConfig(tensorboard=False, events=False)
    Wrong.calls = 0
    words = "rank 0 (stage 0, replica 0): block 3 put out other values the second time"
    try:
        if corruption == "note":
            train(engine, SameRows(), trainer, logger, tmp_path, tokens_per_row=1)
            out = capsys.readouterr().out
            assert f"step 2: {words}" in out
            assert "step 4/4" in out
            return
        with pytest.raises(CorruptionError) as error:
            train(engine, SameRows(), trainer, logger, tmp_path, tokens_per_row=1)
        assert f"after step 2: {words}" in str(error.value)
        assert not list(tmp_path.glob("checkpoints/*"))
    finally:
        engine.close()


def test_what_is_being_saved_when_it_is_found_is_from_before(tmp_path: Path) -> None:
    """The checkpoint of step 1 has no name yet when step 2 is found to be wrong: all it lacks is that ranks agree."""
    chain = describe(mlp_that_flips)
    engine = Engine.build(
        chain,
        make_plan(chain, global_batch=4, microbatch=4),
        loss=nn.functional.cross_entropy,
    )
    trainer = TrainerConfig(
        steps=4, global_batch=4, eval_every=0, check_every=2, checkpoint_every=1
    )
    logger = LoggerConfig(tensorboard=False, events=False)
    Wrong.calls = 0
    with contextlib.closing(engine), pytest.raises(CorruptionError, match="after step 2: rank 0"):
        train(engine, SameRows(), trainer, logger, tmp_path, tokens_per_row=1)
    (kept,) = list_checkpoints(tmp_path / "checkpoints")
    assert CheckpointReader(kept).step == 1

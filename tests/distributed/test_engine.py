"""Whole training steps under any plan equal plain torch training written out here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.model.describe import Chain, parameter_names
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.optim.config import OptimizerConfig
from parallax.runtime.optim.ema import EmaConfig
from parallax.runtime.optim.emas.off import EmaOff
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.schedule import ScheduleConfig
from parallax.runtime.optim.schedules.cosine import CosineSchedule
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import described, make_plan

# Rows per step: whole, uneven, fewer than micro-batches, fewer than replicas.
SIZES = 8, 3, 7, 1, 2
STEPS = len(SIZES)
OPTIMIZER = AdamWConfig(lr=3e-3, clip_norm=0.5)
SCHEDULE = CosineSchedule(warmup=2)
IGNORED, POISON = -100, 63
Weights = dict[str, Tensor]


# ---- models, losses, batches


def gpt(**changes: Any) -> Callable[[], nn.Module]:
    return GPTConfig(
        **{"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocabulary": 64, **changes}
    ).build


def gpt_with_dropout() -> nn.Module:
    return gpt(dropout=0.1)()


def half_frozen() -> nn.Module:
    model = gpt(tied=False)()
    model.embedding.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    model.layers[1].up.requires_grad_(False)
    return model


class Scaled(nn.Module):
    """A block with a constant table that is saved, and one that is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.empty(width))
        self.register_buffer("shift", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.linear.weight, std=0.2)
        nn.init.zeros_(self.linear.bias)
        self.scale.copy_(torch.linspace(0.5, 1.5, len(self.scale)))
        self.shift.copy_(torch.linspace(-1, 1, len(self.shift)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale + self.shift


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 16), Scaled(16), Scaled(16), nn.Linear(16, 64))


def of_many_buckets() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, 1024), *(nn.Linear(1024, 1024) for _ in range(3)), nn.Linear(1024, 64)
    )


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        used: Tensor = self.used(x)
        return used


def with_unused() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 1024), HalfUsed(), nn.Linear(1024, 64))


class Priced(nn.Module):
    """Its weight is an output, too, and all that a loss may ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.price = nn.Linear(16, 64), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.price


def priced() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 16), Priced())


def with_price(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """The gradient with which the backward begins is that of the price, as it is."""
    return GPT.loss(outputs[0], targets) + outputs[1].reshape(())


class Fails(nn.Module):
    """Raises on its third forward."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("boom")
        return x * 1.0


def that_fails() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64), Fails(), nn.Linear(64, 64))


class Counted:
    """The sum over targets that count, and how many do."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def count(self, targets: Tensor) -> int:
        return int((targets != IGNORED).sum())


def poisoned(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = GPT.loss(outputs, targets)
    return loss * float("nan") if bool((targets == POISON).any()) else loss


def make_batch(rows: int, step: int, *, ignoring: bool = False) -> TensorRows:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 63, (rows, 17), generator=generator)
    targets = tokens[:, 1:].clone()
    if ignoring:
        targets[torch.rand(targets.shape, generator=generator) < 0.6] = IGNORED
        targets[0] = IGNORED
    return TensorRows(tokens[:, :-1], targets)


@dataclass(frozen=True)
class Case:
    """What is trained, and under which plan; sent to every worker."""

    factory: Callable[[], nn.Module]
    loss: Any = GPT.loss
    options: dict[str, Any] = field(default_factory=dict)
    sizes: Sequence[int] = SIZES
    dtype: torch.dtype = torch.float64
    compute: str = ""
    ignoring: bool = False
    optimizer: OptimizerConfig = OPTIMIZER
    schedule: ScheduleConfig = SCHEDULE
    together: ReplicasConfig = field(default_factory=ReplicasConfig)
    compile: bool = False
    skips: int = 0
    ema: EmaConfig = field(default_factory=EmaOff)

    def under(self, replicas: Sequence[int], directive: str = "keep", **options: Any) -> Case:
        chosen = {"replicas": tuple(replicas), "directive": directive, **options}
        return replace(self, options=chosen)

    @property
    def world(self) -> int:
        return sum(self.options["replicas"])

    def chain(self) -> Chain:
        return described(self.factory, seed=3, dtype=self.dtype)

    def precision(self) -> PrecisionConfig:
        parameters = "fp64" if self.dtype is torch.float64 else "fp32"
        return PrecisionConfig(parameters=parameters, compute=self.compute or parameters)

    def batches(self) -> list[TensorRows]:
        return [
            make_batch(rows, step, ignoring=self.ignoring) for step, rows in enumerate(self.sizes)
        ]

    def engine(self, folder: str | Path) -> Engine:
        chain = self.chain()
        return Engine.build(
            chain,
            make_plan(
                chain,
                **{"global_batch": 8, "microbatch": 2, "swap_limit": 60000, **self.options},
                local_steps=self.together.local_steps,
                local_groups=self.together.local_groups,
                fragments=self.together.fragments,
                fragment_delay=self.together.fragment_delay,
                staleness=self.together.staleness_bound,
            ),
            loss=self.loss,
            steps=STEPS,
            optimizer=self.optimizer,
            schedule=self.schedule,
            ema=self.ema,
            precision=self.precision(),
            swap=SwapConfig(minimum_bytes=1),
            replicas=self.together,
            compile=self.compile,
            scratch=Path(folder) / "swap",
            nonfinite_skips=self.skips,
        )


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    weights: Weights
    moved: int = 0
    averages: Weights = field(default_factory=dict)


# ---- plain torch


def plain_blocks(case: Case) -> tuple[list[nn.Module], Weights]:
    chain = case.chain()
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    states = [block.state_dict(keep_vars=True) for block in blocks]
    return blocks, {
        name: states[i][inner]
        for name, (i, inner) in parameter_names(chain, range(len(blocks))).items()
    }


def plain_loss(case: Case, blocks: list[nn.Module], batch: TensorRows) -> Tensor:
    with case.precision().autocast("cpu"):
        (x,) = batch.inputs(0, len(batch))
        for block in blocks:
            x = block(x)
        targets = batch.targets(0, len(batch))
        loss: Tensor = case.loss(x, targets)
    return loss / case.loss.count(targets) if hasattr(case.loss, "count") else loss


def plain_training(
    case: Case, batches: Sequence[TensorRows] = (), *, skips: bool = False
) -> Outcome:
    """On these ``batches``, or the case's; one that ``skips`` takes no step if the loss is NaN or Inf."""
    blocks, tensors = plain_blocks(case)
    trained = [t for t in tensors.values() if t.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    outcome = Outcome([], [], tensors)
    for step, batch in enumerate(batches or case.batches()):
        optimizer.zero_grad()
        loss = plain_loss(case, blocks, batch)
        if skips and not torch.isfinite(loss):
            continue
        loss.backward()
        outcome.norms.append(float(nn.utils.clip_grad_norm_(trained, OPTIMIZER.clip_norm)))
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * SCHEDULE.factor(step, STEPS)
        optimizer.step()
        outcome.losses.append(loss.item())
    return outcome


# ---- jobs of the workers


def training(case: Case) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        results = [engine.step(batch) for batch in case.batches()]
        engine.end_round()
        weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
        engine.close()
    moved = sum(r.swap.bytes_out + r.swap.bytes_cancelled for r in results)
    return Outcome([r.loss for r in results], [r.gradient_norm for r in results], weights, moved)


def close(found: float, expected: float, tolerance: float) -> bool:
    return abs(found - expected) <= tolerance * abs(expected)


def check_near(found: Weights, expected: Weights, tolerance: float) -> None:
    for name, tensor in found.items():
        error = (tensor - expected[name]).norm() / expected[name].norm().clamp(min=1e-3)
        assert error <= tolerance, f"{name}: {error}"


def compare(outcomes: list[Outcome], expected: Outcome, tolerance: float) -> None:
    for outcome in outcomes:
        assert all(close(*pair, tolerance) for pair in zip(outcome.losses, expected.losses)), (
            outcome.losses
        )
        assert all(close(*pair, tolerance) for pair in zip(outcome.norms, expected.norms)), (
            outcome.norms
        )
        check_near(outcome.weights, expected.weights, tolerance)
    assert {name for outcome in outcomes for name in outcome.weights} == set(expected.weights)


def same(found: list[Outcome], expected: list[Outcome]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.losses == b.losses
        assert a.norms == b.norms
        assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights | b.weights)


# ---- training


@pytest.mark.parametrize(
    "replicas",
    [(1,), (2,), pytest.param((1, 1), marks=pytest.mark.thorough), (1, 2), (2, 1)],
    ids=str,
)
def test_training_equals_plain_torch(pool: Pool, replicas: tuple[int, ...]) -> None:
    case = Case(gpt()).under(replicas)
    expected = plain_training(case)
    assert any(norm > OPTIMIZER.clip_norm for norm in expected.norms)
    found = {}
    for directive in ("keep", "offload", "recompute"):
        found[directive] = pool.run(training, case.world, case.under(replicas, directive))
        compare(found[directive], expected, 1e-9)
    same(found["offload"], found["keep"])
    same(found["recompute"], found["keep"])
    assert all(outcome.moved for outcome in found["offload"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_batches_of_any_size(pool: Pool, schedule: str) -> None:
    case = Case(gpt(), sizes=(1, 2, 3, 5, 9)).under((2, 1), schedule=schedule, microbatch=1)
    compare(pool.run(training, 3, case), plain_training(case), 1e-9)


def test_counted_targets(pool: Pool) -> None:
    case = Case(gpt(), loss=Counted(), ignoring=True, sizes=(8, 3, 7, 2, 2))
    expected = plain_training(case)
    for replicas in [(1,), (1, 2), (2, 2)]:
        compare(pool.run(training, sum(replicas), case.under(replicas)), expected, 1e-9)


def test_a_loss_whose_gradient_is_a_parameters(pool: Pool) -> None:
    case = Case(priced, loss=with_price)
    expected = plain_training(case)
    for replicas in [(1,), (1, 1), (1, 2)]:
        compare(pool.run(training, sum(replicas), case.under(replicas)), expected, 1e-9)


class Reusing:
    """Squared scores, summed up into one and the same memory, at the end of a larger one."""

    def __init__(self) -> None:
        self.memory = torch.zeros(10, dtype=torch.float64)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.sum((outputs - targets[..., None]) ** 2, dim=(0, 1, 2), out=self.memory[9])


def evaluating(case: Case) -> float:
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        loss = engine.evaluate(case.batches()[0])
        engine.close()
    return loss


def test_a_loss_in_memory_that_is_used_again(pool: Pool) -> None:
    case = Case(gpt(), loss=Reusing()).under((1, 1))
    blocks, _ = plain_blocks(case)
    with torch.no_grad():
        expected = sum(
            plain_loss(
                case, blocks, TensorRows(batch.inputs(m, m + 2), batch.targets(m, m + 2))
            ).item()
            / 4
            for batch in case.batches()[:1]
            for m in range(0, 8, 2)
        )
    for found in pool.run(evaluating, 2, case):
        assert close(found, expected, 1e-12)


def freezing(case: Case) -> tuple[list[bool], list[float]]:
    """Whether each bias moved in a second step, before which they were frozen."""
    with tempfile.TemporaryDirectory() as folder:
        engine = case.engine(folder)
        losses = [engine.step(case.batches()[0]).loss]
        biases = [tensor for name, tensor in engine.parameters.items() if name.endswith("bias")]
        for bias in biases:
            bias.requires_grad_(False)
        losses.append(engine.step(case.batches()[0]).loss)
        engine.close()
    return [bias.requires_grad for bias in biases], losses


@pytest.mark.parametrize("offloaded", [0.0, 1.0])
def test_parameters_may_be_frozen_between_steps(pool: Pool, offloaded: float) -> None:
    for frozen, losses in pool.run(
        freezing, 2, Case(gpt()).under((1, 1), optimizer_offload=offloaded)
    ):
        assert frozen
        assert not any(frozen)
        assert losses[1] < losses[0]


def test_no_target_counts(pool: Pool) -> None:
    # Row 0 is ignored as a whole.
    case = Case(gpt(), loss=Counted(), ignoring=True, sizes=(1,)).under((1, 1))
    for outcome in pool.run(training, 2, case):
        assert outcome.losses == outcome.norms == [0.0]


def test_bf16_autocast(pool: Pool) -> None:
    case = Case(gpt(), dtype=torch.float32, compute="bf16")
    expected = plain_training(case)
    single = pool.run(training, 1, case.under((1,)))
    split = pool.run(training, 3, case.under((1, 2)))
    for outcome in single + split:
        assert all(close(*pair, 2e-3) for pair in zip(outcome.losses, expected.losses))
        assert outcome.losses != expected.losses or outcome.losses == single[0].losses
        assert all(tensor.dtype is torch.float32 for tensor in outcome.weights.values())
    same(pool.run(training, 3, case.under((1, 2), "recompute")), split)
    same(pool.run(training, 3, case.under((1, 2), "offload")), split)


def test_dropout(pool: Pool) -> None:
    case = Case(gpt_with_dropout, dtype=torch.float32, sizes=(8, 8, 8))
    kept = pool.run(training, 2, case.under((1, 1)))
    same(pool.run(training, 2, case.under((1, 1))), kept)
    same(pool.run(training, 2, case.under((1, 1), "recompute")), kept)
    same(pool.run(training, 2, case.under((1, 1), "offload")), kept)
    (single,) = pool.run(training, 1, case.under((1,)))
    assert all(close(*pair, 1e-5) for pair in zip(single.losses, kept[0].losses))
    (without,) = pool.run(
        training, 1, Case(gpt(), dtype=torch.float32, sizes=(8, 8, 8)).under((1,))
    )
    assert without.losses != single.losses


@pytest.mark.parametrize("factory", [half_frozen, with_buffers], ids=lambda f: f.__name__)
def test_frozen_parameters_and_buffers(pool: Pool, factory: Callable[[], nn.Module]) -> None:
    case = Case(factory)
    expected, (_, first) = plain_training(case), plain_blocks(case)
    for replicas in [(1,), (2, 1), (1, 2)]:
        found = pool.run(
            training,
            sum(replicas),
            case.under(replicas, boundaries=[2] if len(replicas) > 1 else None),
        )
        compare(found, expected, 1e-9)
        for name, tensor in ((n, t) for outcome in found for n, t in outcome.weights.items()):
            assert torch.equal(tensor, first[name]) or first[name].requires_grad

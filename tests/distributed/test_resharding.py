"""Any checkpoint resumes under any plan: every kind of plan beside every other, with the same weights and states right
after loading, and the same training from there on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from parallax.runtime.checkpoint import checkpoint_name
from parallax.runtime.optim.emas.off import EmaOff
from parallax.runtime.optim.emas.on import EmaOn
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.custom import CustomOptimizerConfig
from parallax.runtime.optim.kinds.lion import LionConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.runtime.replicas.config import ReplicasConfig
from tests.distributed.pool import Pool
from tests.distributed.test_engine import Case, Scaled
from tests.held import held

HALF, WHOLE = 2, 4
WIDTH = 8


# ---- a model with all that a checkpoint has to keep


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.dropout(self.linear(x)))


class Normed(nn.Module):
    """Statistics of channels, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x.transpose(1, 2))
        return normed.transpose(1, 2)


class PartlyUsed(nn.Module):
    """Parameters that never have a gradient, and ones that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.frozen(torch.tanh(self.used(x))))


def everything(*, tied: bool) -> nn.Module:
    first, last = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64, bias=False)
    if tied:
        last.weight = first.weight
    return nn.Sequential(
        first, Dropping(), Scaled(WIDTH), PartlyUsed(), Normed(), PartlyUsed(), Dropping(), last
    )


# ---- kinds of plans


@dataclass(frozen=True)
class Kind:
    """A plan by what is unlike others in it. ``tied``: it can have a weight that two stages share."""

    replicas: tuple[int, ...]
    options: dict[str, Any]
    tied: bool = True

    @property
    def world(self) -> int:
        return sum(self.replicas)


def offloaded(share: float, tier: str, streamed: float = 0.0) -> dict[str, Any]:
    return {"optimizer_offload": share, "parameter_offload": streamed, "tier": tier}


KINDS = {
    "one rank": Kind((1,), {}),
    "stages": Kind((1, 1), {"schedule": "gpipe", "directive": "offload"}),
    "replicas": Kind((2,), {"directive": "recompute"}),
    "replicas without rows": Kind((3,), {"shard": True}),
    "uneven": Kind((1, 2), {"shard": True}),
    "four ranks": Kind((2, 2), {"schedule": "1f1b"}),
    "deep": Kind((1, 1, 1, 1), {}),
    "interleaved": Kind((1, 1), {"schedule": "interleaved", "interleave": 2}),
    "split backward": Kind((2, 1), {"schedule": "zb-h1"}),
    "V": Kind((1, 1), {"schedule": "zb-v", "interleave": 2}),
    "states on the host": Kind((1, 1), offloaded(1.0, "host")),
    "states on disk, shared": Kind((2,), offloaded(0.5, "disk")),
    "streamed": Kind((1, 1), offloaded(1.0, "disk", 1.0), tied=False),
    "streamed to replicas": Kind((2,), offloaded(1.0, "host", 0.5), tied=False),
}
OPTIMIZERS = {
    "adamw": AdamWConfig(lr=3e-3, clip_norm=0.5),
    "sgd": SGDConfig(lr=3e-2, clip_norm=0.5),
    "lion": LionConfig(lr=1e-3, clip_norm=0.5),
    "adafactor": CustomOptimizerConfig(
        target="torch.optim:Adafactor", lr=1e-2
    ),  # of whole parameters
    "adagrad": CustomOptimizerConfig(target="torch.optim:Adagrad", lr=1e-2),  # states before step 1
    "counting": CustomOptimizerConfig(target=f"{__name__}:Counting", lr=1e-2),
    "averaged": AdamWConfig(lr=3e-3, clip_norm=0.5),
}
AVERAGES = {"averaged": EmaOn(decay=0.9)}
ALIKE = "uneven"  # a kind that is looked at with itself by default
APART = 5  # of the others each with the one so much further on


def looked_at(before: str, after: str, optimizer: str) -> bool:
    """Whether it is by default: each kind once on either side."""
    names = list(KINDS)
    at, there = names.index(before), names.index(after)
    chosen = list(OPTIMIZERS)[at % len(OPTIMIZERS)] == optimizer
    return chosen and ((at + APART) % len(names) == there or before == after == ALIKE)


def case_of(kind: Kind, optimizer: str, *, tied: bool) -> Case:
    case = Case(
        partial(everything, tied=tied),
        sizes=(8, 7, 8, 5),
        optimizer=OPTIMIZERS[optimizer],
        ema=AVERAGES.get(optimizer, EmaOff()),
        together=ReplicasConfig(batchnorm="sync"),
    )
    return case.under(kind.replicas, **{"microbatch": 2, "directive": "keep", **kind.options})


class Counting(torch.optim.SGD):
    """Counts its steps in numbers of its groups and states, as many libraries do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
                p.grad *= 1 / (group["count"] + self.state[p]["seen"])
        super().step(closure)


# ---- jobs


@dataclass
class Part:
    """What one rank has: losses of its steps; tensors, and what is known of parameters, before and after them, as
    bytes, which leave no shared memory behind."""

    losses: list[float]
    before: bytes
    after: bytes


def training(case: Case, folder: Path, first: int, last: int) -> Part:
    """Steps ``first`` to ``last``, from the checkpoint before them, if any, and into one after them."""
    engine = case.engine(folder)
    if first:
        assert engine.load(folder / checkpoint_name(first)) == {"source": {"position": 7}}
        assert engine.completed_steps == first
    before = save(held(engine))
    losses = [engine.step(batch).loss for batch in case.batches()[first:last]]
    after = save(held(engine))
    if not first:
        engine.save(folder, {"source": {"position": 7}})
    engine.close()
    return Part(losses, before, after)


def joined(parts: list[bytes]) -> dict[str, Tensor]:
    """What all ranks have; what several have is the same."""
    found: dict[str, Tensor] = {}
    for part in map(load, parts):
        check_equal(part, {name: found.get(name, tensor) for name, tensor in part.items()})
        found |= part
    return found


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype is expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


def check_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        error = (value.double() - expected[name].double()).norm()
        assert error <= 1e-9 * expected[name].double().norm().clamp(min=1e-3), name


class Table:
    """The first halves of trainings, each run once."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._known: dict[Any, list[Part]] = {}

    def run(self, kind: str, optimizer: str, last: int, *, tied: bool) -> tuple[list[Part], Path]:
        """The first ``last`` steps under a plan; where their checkpoint is."""
        key = (kind, optimizer, last, tied)
        folder = self._folder / "-".join(map(str, key))
        if key not in self._known:
            case = case_of(KINDS[kind], optimizer, tied=tied)
            self._known[key] = self._pool.run(training, KINDS[kind].world, case, folder, 0, last)
        return self._known[key], folder

    def go_on(self, kind: str, optimizer: str, folder: Path, *, tied: bool) -> list[Part]:
        """The other half, from a checkpoint in ``folder``."""
        case = case_of(KINDS[kind], optimizer, tied=tied)
        return self._pool.run(training, KINDS[kind].world, case, folder, HALF, WHOLE)


@pytest.fixture(scope="module")
def table(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(pool, tmp_path_factory.mktemp("table"))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        pytest.param(
            *pair,
            name,
            id=f"{name}: {pair[0]} to {pair[1]}",
            marks=[] if looked_at(*pair, name) else [pytest.mark.thorough],
        )
        for name in OPTIMIZERS
        for pair in itertools.product(KINDS, KINDS)
    ],
)
def test_any_plan_resumes_from_any_other(
    table: Table, before: str, after: str, optimizer: str
) -> None:
    tied = KINDS[before].tied and KINDS[after].tied
    first, folder = table.run(before, optimizer, HALF, tied=tied)
    rest = table.go_on(after, optimizer, folder, tied=tied)
    check_equal(joined([part.before for part in rest]), joined([part.after for part in first]))
    whole, _ = table.run(after if before == after else "one rank", optimizer, WHOLE, tied=tied)
    found, expected = (joined([part.after for part in parts]) for parts in (rest, whole))
    (check_equal if before == after else check_close)(found, expected)
    assert rest[0].losses == pytest.approx(whole[0].losses[HALF:], rel=1e-9)

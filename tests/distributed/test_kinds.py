"""Between stages tensors of any kind, and with any shares of rows, and inputs that are slices of something larger."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parallax.model.describe import Chain, describe
from parallax.model.precision import PrecisionConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import make_plan

WIDTH, ROWS = 8, 5


class Enters(nn.Module):
    """Everything that a mask, a spectrum, a table or a count may be; the last three have no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.price = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.linear(x)
        spectrum = torch.fft.rfft(x).conj()
        short = x.to(torch.bfloat16)
        with_rows = x > 0, (8 * x).to(torch.int8), (x > 0).to(torch.uint8), x[:, :0]
        return x, spectrum, short, *with_rows, self.price * 2, x.new_ones(3, 0), x.new_ones(2) * 1j


class Middle(nn.Module):
    """Passes them on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5 + 0.25j))

    def forward(self, x: Tensor, spectrum: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return x, spectrum * self.weight, *rest


class Ends(nn.Module):
    """Uses them all."""

    def forward(self, x: Tensor, spectrum: Tensor, short: Tensor, *rest: Tensor) -> Tensor:
        positive, steps, ones, nothing, price, empty, units = rest
        assert empty.shape == (3, 0)
        assert not price.dim()
        found: Tensor = torch.fft.irfft(spectrum, n=WIDTH) * positive + short.to(x.dtype) * steps
        return found + price * ones + nothing.sum() + (units.imag.sum() * x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enters, self.middle, self.ends = Enters(), Middle(), Ends()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.ends(*self.middle(*self.enters(x)))
        return found


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def make_chain() -> Chain:
    """Return a chain with block boundaries that all kinds of tensors cross."""
    chain = describe(Model, seed=3, dtype=torch.float64, blocks=("enters", "middle", "ends"))
    enters, middle, ends = chain.blocks
    blocks = *(replace(block, unbatched=frozenset({7, 8, 9})) for block in (enters, middle)), ends
    return replace(chain, blocks=blocks)


def make_batch() -> TensorRows:
    generator = torch.Generator().manual_seed(1)
    return TensorRows(*torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64))


def gradients(replicas: tuple[int, ...], boundary: int) -> dict[str, Tensor]:
    chain = make_chain()
    plan = make_plan(
        chain,
        replicas=replicas,
        boundaries=[boundary] if len(replicas) > 1 else None,
        global_batch=ROWS,
        microbatch=3,
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.build(
            chain,
            plan,
            loss=loss,
            precision=PrecisionConfig(parameters="fp64", compute="fp64"),
            scratch=Path(folder),
        )
        engine.gradients(make_batch())
        found = {name: g.clone() for name, g in engine.gradients_by_name.items()}
        engine.close()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("replicas", [(1, 1), (1, 2), (2, 1), (3, 2)], ids=str)
def test_tensors_of_any_kind_between_stages(pool: Pool, replicas: tuple[int, ...]) -> None:
    """Complex gradients were dropped without a word."""
    (expected,) = pool.run(gradients, 1, (1,), 0)
    for boundary in range(1, len(make_chain().blocks)):
        found: dict[str, Tensor] = {}
        for part in pool.run(gradients, sum(replicas), replicas, boundary):
            found |= part
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 4), nn.Linear(4, 4))


def test_a_slice_of_a_batch_moves_alone(tmp_path: Path) -> None:
    """A slice of a batch once kept the memory of the whole batch, which did not fit."""
    chain = describe(wide, seed=3, dtype=torch.float64)
    plan = make_plan(chain, directive="offload", microbatch=4, swap_limit=4 * 512 * 8 + 4096)
    engine = Engine.build(
        chain,
        plan,
        loss=loss,
        precision=PrecisionConfig(parameters="fp64", compute="fp64"),
        swap=SwapConfig(minimum_bytes=1),
        scratch=tmp_path,
    )
    rows = torch.randn(8, 516, dtype=torch.float64)
    result = engine.step(TensorRows(rows[:, :512], rows[:, 512:]))
    engine.close()
    assert result.swap.high_water <= plan.stages[0].swap_limit_bytes

"""What a block draws depends on step, row and block alone."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from parallax.model.describe import describe
from parallax.model.precision import PrecisionConfig
from parallax.plan.plan import Directive, StagePlan
from parallax.runtime.stage import MicroBatchContext, Stage


class Noise(nn.Module):
    """Draws by itself, from torch's own generator."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.rand_like(x)


def test_each_block_draws_for_itself_and_the_same_again() -> None:
    chain = describe(lambda: nn.Sequential(*(Noise() for _ in range(3))))
    plan = StagePlan(start=0, stop=3, replicas=1, directives=(Directive.KEEP,) * 3)
    stage = Stage(chain, {0: plan}, torch.device("cpu"), PrecisionConfig())

    def draws() -> dict[tuple[int, int, int], float]:
        found = {}
        for step, first, place in itertools.product(range(3), range(8), range(3)):
            (noise,) = stage._run_block(
                place, MicroBatchContext(step, first, 1, 8), None, torch.zeros(1)
            )
            found[step, first, place] = noise.item()
        return found

    once = draws()
    assert len(set(once.values())) == 3 * 8 * 3
    torch.manual_seed(5)
    assert draws() == once

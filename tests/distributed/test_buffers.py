"""A forward that is repeated leaves every buffer as the first one left it, and computes with what the first one saw."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.pool import Pool
from tests.distributed.test_engine import Case, training

WIDTH = 16


class Counts(nn.Module):
    """A counter, and moments of what came by, one changed in place and one put into its place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shifted = torch.tanh(self.linear(x - self.mean)) * self.scale + self.table * self.count
        with torch.no_grad():
            self.count += 1
            self.mean.lerp_(x.flatten(0, -2).mean(0), 0.3)
            self.scale = 0.7 * self.scale + 0.3 * x.flatten(0, -2).std(0)
        return shifted


class Codes(nn.Module):
    """A codebook that follows the data; its averages are written behind autograd's back, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(WIDTH, 8))
        self.register_buffer("sizes", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        flat = x.detach().flatten(0, -2)
        hot = F.one_hot((flat @ self.codes).argmax(1), 8).to(x.dtype)
        found = (hot @ self.codes.t()).view_as(x)
        self.sizes.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        self.codes.data = self.codes * 0.9 + (flat.t() @ hot) / self.sizes * 0.1
        return x + (found - x).detach() + x * 0.5


class Follows(nn.Module):
    """A layer, and one that follows it at a distance."""

    def __init__(self) -> None:
        super().__init__()
        self.leader = nn.Linear(WIDTH, WIDTH)
        self.follower = copy.deepcopy(self.leader).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.follower.parameters(), self.leader.parameters()):
                slow.mul_(0.9).add_(fast + x.mean(), alpha=0.1)
            target = self.follower(x)
        followed: Tensor = self.leader(x) + target
        return followed


class Normed(nn.Module):
    """The largest singular value is one, by a step of the power iteration in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.linear(x)
        return normed


def with_changing_buffers() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, WIDTH), Counts(), Codes(), Follows(), Normed(), nn.Linear(WIDTH, 64)
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        ((1,), {}),
        ((1, 2), {"schedule": "gpipe"}),
        ((1, 1), {"schedule": "zb-v", "interleave": 2}),
    ],
    ids=str,
)
def test_recomputation_changes_buffers_once(
    pool: Pool, replicas: tuple[int, ...], options: dict[str, Any]
) -> None:
    """They were changed by both forwards, and the second saw what the first had left."""
    case = Case(with_changing_buffers)
    kept = case.under(replicas, **options)
    repeated = case.under(replicas, "recompute", **options)
    found, expected = (pool.run(training, kept.world, each) for each in (repeated, kept))
    for a, b in zip(found, expected, strict=True):
        for name, tensor in a.weights.items():
            # Deferred weight-gradient passes are summed in another order.
            torch.testing.assert_close(tensor, b.weights[name], rtol=1e-9, atol=1e-12)
        assert a.losses == pytest.approx(b.losses, rel=1e-12)

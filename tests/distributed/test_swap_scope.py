"""``parallax.swap`` around torch's own DDP: every rank keeps its own limit, and nothing changes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import parallax
from parallax.errors import ConfigError
from tests.distributed.pool import Pool

MIB = 2**20
Found = tuple[list[float], list[Tensor], int, int]


def train(rank: int, directory: Path | None, accumulate: bool) -> Found:
    """A few steps; with a limit where there is a directory."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)]
    model = DistributedDataParallel(
        nn.Sequential(*layers, nn.Linear(128, 4)), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    limit = 2 * sum(p.nbytes for p in model.parameters()) + MIB * 5 // 8
    options = {"directory": directory, "minimum_bytes": 1024, "piece_bytes": MIB // 8}
    scope = (
        parallax.swap(model, limit, optimizer=optimizer, **options)
        if directory
        else contextlib.nullcontext()
    )
    generator = torch.Generator().manual_seed(rank)
    losses = []
    with scope as swapping:
        for number in range(6):
            x = torch.randn(256, 128, generator=generator)
            last = number % 2 == 1 or not accumulate
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    moved = (
        (swapping.statistics.bytes_out, swapping.states[0].bytes_in)
        if swapping is not None
        else (0, 0)
    )
    return losses, [p.detach().clone() for p in model.parameters()], *moved


def both(directory: Path, accumulate: bool) -> tuple[Found, Found]:
    rank = torch.distributed.get_rank()
    return train(rank, None, accumulate), train(rank, directory, accumulate)


def test_ddp(pool: Pool, scratch: Path) -> None:
    for accumulate in (False, True):
        for without, limited in pool.run(both, 2, scratch, accumulate):
            assert limited[0] == without[0]
            assert all(torch.equal(p, q) for p, q in zip(limited[1], without[1]))
            assert limited[2] > 0
            assert limited[3] > 0


def refused(directory: Path) -> str:
    """The error of a scope that offloads the parameters of a module inside DDP."""
    model = nn.Linear(128, 128)
    replica = DistributedDataParallel(model)
    with (
        pytest.raises(ConfigError) as caught,
        parallax.swap(replica.module, directory=directory, parameters=True),
    ):
        pass
    return str(caught.value)


def test_ddp_with_offloaded_parameters_is_refused(pool: Pool, scratch: Path) -> None:
    for message in pool.run(refused, 2, scratch):
        assert "parameters=True: a process group of 2 ranks sums gradients" in message

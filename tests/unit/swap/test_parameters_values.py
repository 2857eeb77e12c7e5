"""Streamed parameters as values: stepped, read, written, restored."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from parallax.errors import SwapError
from parallax.machine.device import CpuCopies
from parallax.swap.optimizer.buckets import Correction
from parallax.swap.optimizer.host import HostOptimizer
from parallax.swap.parameters.offloaded import OffloadedParameters
from parallax.swap.stores.store import DiskStore
from tests.unit.swap.test_parameters import (
    WIDTH,
    Stream,
    assert_same,
    batch,
    forward,
    gpipe,
    gradients,
    model,
    run,
    store,
    stream,
    weights,
)

__all__ = ["store", "stream"]


@pytest.mark.sampled
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("split", [False, True])
def test_steps_are_those_of_a_resident_optimizer(stream: Stream, count: int, split: bool) -> None:
    plain = model()
    for block in plain:
        block.gain.data = block.gain.data.float()
    mine = copy.deepcopy(plain)
    streamed = stream(mine, split=split)

    def optimizer(blocks: nn.ModuleList) -> torch.optim.Optimizer:
        matrices = [p for p in blocks.parameters() if p.dim() > 1]
        vectors = [p for p in blocks.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)

    resident = optimizer(plain)
    host = HostOptimizer(optimizer(mine), [], copies=CpuCopies(), extra=streamed.chunks)
    try:
        for _ in range(3):
            resident.zero_grad(set_to_none=False)
            streamed.zero_gradients()
            for index in range(len(mine)):
                host.ready(streamed.parameters(index))
            assert run(mine, gpipe(count)) == run(plain, gpipe(count))
            found = [p.grad for p in plain.parameters() if p.grad is not None]
            norm = get_total_norm(found)
            assert torch.equal(get_total_norm(streamed.norm_terms(mine.parameters())), norm)
            coefficient = 0.5 / norm
            for gradient in found:
                gradient.mul_(coefficient)
            resident.step()
            host.commit([Correction(coefficient)])
        host.finish()
        assert_same(weights(mine, streamed), [p.detach() for p in plain.parameters()])
        with torch.no_grad():
            assert forward(mine, batch(9)) == forward(plain, batch(9))
    finally:
        host.close()


def test_low_precision_has_master_copies(stream: Stream) -> None:
    mine = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)])
    master = mine[0].weight.detach().clone()
    streamed = stream(mine)
    expected = nn.Parameter(master.float())
    host = HostOptimizer(
        torch.optim.AdamW(mine.parameters(), lr=1e-4), [], copies=CpuCopies(), extra=streamed.chunks
    )
    reference = torch.optim.AdamW([expected], lr=1e-4)
    try:
        for _ in range(20):  # each step alone is lost in bfloat16
            streamed.zero_gradients()
            mine[0](torch.ones(3, WIDTH, dtype=torch.bfloat16)).sum().backward()
            gradient = streamed.read_gradient(mine[0].weight)
            assert gradient is not None
            expected.grad = gradient.float()
            host.commit()
            host.finish()
            reference.step()
        assert torch.equal(streamed.read_full(0)[0], expected.detach().bfloat16())
        assert not torch.equal(streamed.read_full(0)[0], master)
    finally:
        host.close()


def test_values_can_be_read_and_written_whole(stream: Stream) -> None:
    plain, mine = model(), model()
    streamed = stream(mine)
    run(mine, gpipe(1))
    for index in range(len(mine)):
        new = [torch.randn_like(p) for p in plain[index].parameters()]
        streamed.write_full(index, new)
        assert_same(streamed.read_full(index), new)
        with torch.no_grad():
            for parameter, value in zip(plain[index].parameters(), new):
                parameter.copy_(value)
    assert run(mine, gpipe(2)) == run(plain, gpipe(2))
    with pytest.raises(SwapError, match=r"shape \[24\] cannot hold \[3\]"):
        streamed.write_full(0, [torch.ones(3)] * len(list(mine[0].parameters())))


def test_what_is_changed_in_place_is_kept(stream: Stream) -> None:
    mine = model()
    streamed = stream(mine)
    streamed.enter(1)
    with torch.no_grad():
        mine[1].down.fill_(2.0)
    values = dict(zip(streamed.parameters(1), streamed.read_full(1)))
    assert values[mine[1].down].eq(2).all()
    with torch.no_grad():
        mine[1].down.fill_(3.0)
    streamed.enter(3)
    streamed.enter(0)
    assert mine[1].down.isnan().all()
    streamed.enter(1)
    assert mine[1].down.eq(3).all()


def test_what_is_away_is_not_a_number(stream: Stream) -> None:
    mine = model()
    stream(mine)
    assert mine[0].down.isnan().all()
    assert mine[0].up(batch(0)).isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        mine[0].down.copy_(torch.ones_like(mine[0].down))


def test_memory_that_is_handed_out_cannot_be_given_back(stream: Stream) -> None:
    mine = model()
    streamed = stream(mine, window=1)
    streamed.enter(0)
    held = mine[0].down.detach().numpy()
    with pytest.raises(SwapError, match=r"passed to \.numpy\(\)"):
        streamed.enter(1)
    assert held.shape == (WIDTH, 2 * WIDTH)


def test_restored_parameters_are_ordinary_ones(stream: Stream) -> None:
    plain = model()
    mine = copy.deepcopy(plain)
    streamed = stream(mine)
    run(mine, gpipe(1))
    streamed.restore()
    assert run(mine, gpipe(2)) == run(plain, gpipe(2))
    assert_same(gradients(mine), gradients(plain))
    assert_same(list(mine.parameters()), list(plain.parameters()))


def test_values_that_are_set_again_are_not_overtaken_by_older_ones(scratch: Path) -> None:
    """A place was given away while it was still being written: the third values lay there, and the first, late, came on
    top of them with a sum that was right."""
    late = itertools.chain([0.0, 0.1], itertools.repeat(0.0))  # the second write is that of 1.0
    disk = DiskStore(scratch, 2**20, CpuCopies(), threads=2, delay=lambda: next(late))
    with contextlib.closing(disk):
        layer = nn.Linear(16, 16)
        streamed = OffloadedParameters([layer.parameters()], disk)
        for value in (1.0, 2.0, 3.0):
            streamed.write_full(0, [torch.full((16, 16), value), torch.full((16,), value)])
        time.sleep(0.2)  # whatever is late has come
        assert [t.unique().tolist() for t in streamed.read_full(0)] == [[3.0], [3.0]]
        streamed.close()

"""Streamed parameters on a CUDA device, with transfers held up at random to show a missing wait."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from parallax.machine.device import StreamCopies
from parallax.swap.optimizer.host import HostOptimizer
from parallax.swap.parameters.offloaded import OffloadedParameters
from parallax.swap.stores.store import DiskStore, HostStore
from parallax.swap.verify import Delays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20
WIDTH = 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.up(self.norm(x))))


def losses(blocks: nn.ModuleList) -> list[float]:
    """Two micro-batches, both in flight at once."""
    roots = []
    for seed in range(2):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()
        for block in blocks:
            x = block(x)
        roots.append(x.square().mean())
    for root in roots:
        root.backward()
    return [root.item() for root in roots]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_steps_are_those_of_a_resident_model(scratch: Path, tier: str) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList(Block() for _ in range(6)).cuda()
    mine = copy.deepcopy(plain)
    delay = Delays(most_seconds=0.002)
    copies = StreamCopies(torch.device("cuda", 0), delay)
    with contextlib.ExitStack() as stack:
        disk = tier == "disk"
        store = (
            DiskStore(scratch, 256 * MIB, copies, threads=2, delay=delay)
            if disk
            else HostStore(256 * MIB, copies)
        )
        stack.callback(store.close)
        streamed = OffloadedParameters(
            [b.parameters() for b in mine], store, chunk_bytes=MIB, verify=True
        )
        stack.callback(streamed.close)
        for index, block in enumerate(mine):
            streamed.attach(index, block)
        host = HostOptimizer(
            torch.optim.SGD(mine.parameters(), lr=0.5), [], copies=copies, extra=streamed.chunks
        )
        stack.callback(host.close)
        for _ in range(3):
            plain.zero_grad()
            host.finish()
            streamed.zero_gradients(set_to_none=True)
            assert losses(mine) == losses(plain)
            for a, b in zip(mine.parameters(), plain.parameters()):
                found = streamed.read_gradient(a)
                assert found is not None
                assert torch.equal(found, b.grad)
            norms = [
                get_total_norm(terms)
                for terms in (streamed.norm_terms(mine.parameters()), gradients(plain))
            ]
            torch.testing.assert_close(*norms)
            host.commit()
            host.finish()
            new = iter(tensor for index in range(len(mine)) for tensor in streamed.read_full(index))
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.copy_(next(new))  # the step itself is another device's arithmetic
        assert streamed.take_statistics().high_water <= streamed.limit_bytes


def gradients(blocks: nn.ModuleList) -> list[Tensor]:
    return [parameter.grad for parameter in blocks.parameters() if parameter.grad is not None]

"""The swap on a CUDA device: pinned memory of the requested size, and waits that hold although any copy may be late."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallax
from parallax.machine.accelerators import accelerator_named
from parallax.machine.device import copies_for
from parallax.machine.pinned import PINNING_REMEDY
from parallax.model.saved import Selector
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.activations.policy import Policy
from parallax.swap.config import SwapConfig
from tests.unit.swap_fakes import assert_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20


def test_the_arena_is_pinned_and_no_larger_than_requested() -> None:
    count = 5 * MIB + 7
    arena = accelerator_named("cuda").arena(torch.device("cuda", 0), count, PINNING_REMEDY)
    assert arena.data.is_pinned()
    assert arena.allocated_bytes - count < 4096
    device = torch.arange(count, device="cuda").to(torch.uint8)
    arena.data.copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(arena.data, device.cpu())
    view = arena.data[:10]
    arena.close()
    assert not view.is_pinned()
    assert view.eq(device[:10].cpu()).all(), "the pages stay with the last view"


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_late_copies_change_no_gradient(tier: str, eager: bool, scratch: Path) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    model = nn.Sequential(
        *[layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.Tanh())]
    ).to(device)
    rows = torch.randn(4, 256, 512, device=device)
    selector = Selector([*model.parameters()], minimum_bytes=1)

    def gradients(manager: SwapManager | None) -> list[Tensor]:
        model.zero_grad()
        for part in rows:
            if manager is None:
                loss = model(part).square().mean()
            else:
                with offloading(manager, selector, 0):
                    loss = model(part).square().mean()
            loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients(None)
    config = SwapConfig(verify=True)
    store = config.open_store(tier, 64 * MIB, copies_for(device, config.delay()), scratch)
    manager = SwapManager(store, limit_bytes=3 * MIB, policy=Policy(eager=eager), verify=True)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(manager)))
    found = manager.take_statistics()
    assert found.bytes_out > 0
    assert found.transfer_seconds > 0
    assert found.high_water <= 3 * MIB
    assert found.pinned_waste_bytes < 4096
    manager.close()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_offloaded_parameters_change_nothing(tier: str, scratch: Path) -> None:
    """Losses, weights, gradients and states of a loop that clips its gradients."""

    def train(limited: bool) -> list[Any]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512)) for _ in range(8)]
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scope = parallax.swap(
            model, "8MiB", optimizer=optimizer, tier=tier, directory=scratch, parameters=True
        )
        found = []
        with scope if limited else contextlib.nullcontext():
            for _ in range(5):
                optimizer.zero_grad()
                loss = model(torch.randn(64, 512, device="cuda")).square().mean()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                found += [loss.item(), norm.item()]
        return [
            found,
            *model.parameters(),
            *(p.grad for p in model.parameters()),
            optimizer.state_dict(),
        ]

    assert_equal(train(True), train(False))

"""Loops of one's own whose weights and gradients are offloaded (``parallax.swap(parameters=True)``), on the simulated
accelerator: each ends with the weights, gradients and states of the same loop without, to the last bit."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import parallax
from parallax.swap.lms.scope import Swapping
from tests.sim.device import SIM
from tests.sim.swapping import MIB, WIDTH, Block, adamw, rows

LIMIT = 320 * 1024  # two of the six blocks' weights and gradients, and some activations
Loop = Callable[[nn.Module, torch.optim.Optimizer], list[Tensor]]


class Tied(nn.Module):
    """Blocks, of which the first is used again at the end, and attention, whose module gets plain parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        rows = x.view(-1, 4, WIDTH)
        attended: Tensor = self.attention(rows, rows, rows, need_weights=False)[0]
        return x + attended.reshape(x.shape)


def _scope(
    model: nn.Module, optimizer: torch.optim.Optimizer, tier: str, folder: str, *, verify: bool
) -> Swapping:
    return parallax.swap(
        model,
        LIMIT,
        optimizer=optimizer,
        tier=f"strict {tier}",
        tier_bytes=32 * MIB,
        directory=Path(folder) / "s",
        minimum_bytes=128,
        piece_bytes=32768,
        parameters=True,
        verify=verify,
    )


def alike(loop: Loop, tier: str, *, verify: bool = False) -> None:
    """A loop, inside the scope and without it, and a last step after the scope has ended."""
    torch.manual_seed(0)
    model = Tied().to(SIM)
    other = copy.deepcopy(model)
    mine, theirs = adamw(model.parameters()), adamw(other.parameters())
    with (
        tempfile.TemporaryDirectory() as folder,
        _scope(model, mine, tier, folder, verify=verify) as scope,
    ):
        found = loop(model, mine)
        offloaded = scope._offloaded
        assert offloaded is not None
        scope.report()
        assert min(offloaded._moved_in, offloaded._moved_out) > 3 * offloaded._bytes
    wanted = loop(other, theirs)
    for trained, optimizer in ((model, mine), (other, theirs)):
        accumulate(trained, 9)
        optimizer.step()
    pairs = [*zip(found, wanted, strict=True), *zip(model.parameters(), other.parameters())]
    pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters())]
    for one, another in (mine, theirs), (theirs, mine):
        assert len(one.state) == len(another.state)
    for p, q in zip(model.parameters(), other.parameters()):
        pairs += zip(mine.state[p].values(), theirs.state[q].values(), strict=True)
    differing = sum(not torch.equal(a.cpu(), b.cpu()) for a, b in pairs)
    assert not differing, f"{differing} of {len(pairs)} tensors differ"


def accumulate(model: nn.Module, step: int) -> list[Tensor]:
    """The gradients of two micro-batches are added; return the losses."""
    losses = []
    for micro in range(2):
        loss = model(rows(2 * step + micro, 32)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


def clips(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All gradients are read, changed and written between backward and step, and an average of the weights is kept."""
    seen: list[Tensor] = []
    average = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        seen += accumulate(model, step)
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with torch.no_grad():
            for mean, p in zip(average, model.parameters()):
                mean.lerp_(p, 0.1)
    return seen + average


def changes_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights are changed in place and through views, and read and set from a checkpoint, between steps."""
    seen: list[Tensor] = []
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for step in range(4):
        seen += accumulate(model, step)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)
        for p in reversed([*model.parameters()]):
            p.data.add_(0.001)
        if step == 0:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 2:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
    return seen


def holds_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Python variables hold gradients while others take their places; some are assigned, added or set to None."""
    seen: list[Tensor] = []
    parameters = [*model.parameters()]
    for step in range(3):
        seen += accumulate(model, step)
        for p in parameters[1:6]:  # whose gradients are the last that are being written
            p.grad = None
        held = [p.grad for p in parameters[::3]]
        for p in parameters[7::3]:
            assert p.grad is not None
            p.grad = p.grad * 2
        for p in parameters[2::5]:
            p.grad = None
        seen += accumulate(model, step + 3)
        seen += [each.detach().clone() for each in held if each is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    seen += accumulate(model, 8)  # these gradients are there when the scope ends
    return seen


LOOPS = {"clips": clips, "changes weights": changes_weights, "holds gradients": holds_gradients}
SCENARIOS: dict[str, Callable[[], None]] = {
    f"loop {name} {tier}": partial(alike, loop, tier, verify=tier == "disk")
    for name, loop in LOOPS.items()
    for tier in ("host", "disk")
}

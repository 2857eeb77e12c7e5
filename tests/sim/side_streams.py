"""A model that computes a part on another stream, in a ``parallax.swap`` scope on the simulated accelerator."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.sim.device import SIM
from tests.sim.midway import scope_around
from tests.sim.swapping import WIDTH, rows, sgd


class Beside(nn.Module):
    """Two streams at the same time. Synchronisation between the streams is kept: memory that one lets go of while the
    other still reads is the model's own affair."""

    def __init__(self, side: torch.Stream, kept: list[Tensor]) -> None:
        super().__init__()
        self.mine, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.side, self.kept = side, kept

    def forward(self, x: Tensor) -> Tensor:
        here = torch.accelerator.current_stream(SIM)
        self.side.wait_stream(here)
        with self.side:
            beside = torch.tanh(torch.tanh(self.other(x)))
        mine = torch.tanh(torch.tanh(self.mine(x)))
        here.wait_stream(self.side)
        self.kept += [x, beside, mine]
        return torch.tanh(mine + beside)


def _trained(tier: str) -> list[Tensor]:
    torch.manual_seed(0)
    side, kept = torch.Stream(SIM), list[Tensor]()
    model = nn.Sequential(*[Beside(side, kept) for _ in range(4)]).to(SIM)
    optimizer = sgd(model.parameters())

    def steps() -> None:
        for seed in range(4):
            model(rows(seed, 32)).square().mean().backward()
            optimizer.step()
            torch.accelerator.synchronize()  # before gradients of the other stream are let go of
            optimizer.zero_grad()

    if not tier:
        steps()
    else:
        with (
            tempfile.TemporaryDirectory() as folder,
            scope_around(model, optimizer, tier, folder, free_bytes=24 * 1024) as scope,
        ):
            steps()
        assert scope.statistics.bytes_out > 2**17, "little moves"
    return [p.detach().cpu() for p in model.parameters()]


def beside(tier: str) -> None:
    """What is computed there stays; the same weights to the last bit, within yet another stream, too."""
    plain = _trained("")
    assert all(map(torch.equal, plain, _trained(tier))), "weights differ"
    with torch.Stream(SIM):
        assert all(map(torch.equal, plain, _trained(tier))), "weights differ on a stream"


def turned(kind: str) -> None:
    """One scope: after a small step a loop "moves" to another stream for good; or each step "begins" and ends with a
    little on another one. What most is saved on moves."""
    torch.manual_seed(0)
    side = torch.Stream(SIM)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) if i % 2 else nn.Tanh() for i in range(16)])
    model, little = model.to(SIM), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(SIM)
    optimizer = sgd(model.parameters())
    with (
        tempfile.TemporaryDirectory() as folder,
        scope_around(model, optimizer, "host", folder, free_bytes=24 * 1024) as scope,
    ):
        for seed in range(5):
            y, before = rows(seed, 32), scope.statistics.bytes_out
            if kind == "moves":
                with side if seed else contextlib.nullcontext():
                    (model(y) if seed else model[:2](y)).square().mean().backward()
            else:
                with side:
                    first = little(rows(seed, 4))
                loss = model(y).square().mean()
                with side:
                    last = little(rows(seed, 4))
                loss.backward()
                torch.accelerator.synchronize()
                del first, last
            torch.accelerator.synchronize()
            optimizer.zero_grad()
            moved = scope.statistics.bytes_out - before
            assert moved > 2**15 or seed < 2, f"step {seed}: {moved}"


SCENARIOS: dict[str, Callable[[], None]] = {
    "another stream host": lambda: beside("host"),
    "another stream disk": lambda: beside("disk"),
    "moves to another stream": lambda: turned("moves"),
    "begins on another stream": lambda: turned("begins"),
}

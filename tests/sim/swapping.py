"""Parts of the swap on the simulated accelerator: each trains something with and without, and compares."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import parallax
from parallax.machine.device import StreamCopies, copies_for, no_delay
from parallax.model.saved import Selector
from parallax.plan.schedule import Action, Kind
from parallax.runtime.meters.spans import spans_of
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.activations.policy import Policy
from parallax.swap.config import SwapConfig
from parallax.swap.optimizer.host import HostOptimizer
from parallax.swap.parameters.offloaded import OffloadedParameters
from parallax.swap.stores.store import DiskStore, HostStore
from tests.sim.device import SIM, C
from tests.sim.strict import StrictStore

MIB, WIDTH = 2**20, 64
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Block(nn.Module):
    """A residual block with a few kinds of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = x + self.down(torch.sigmoid(self.up(self.norm(x))))
        return changed


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def rows(seed: int, count: int = 16) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(SIM)


def activations(tier: str, *, eager: bool, verify: bool = False) -> None:
    """Gradients are the same to the last bit."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).to(SIM)
    selector = Selector([*model.parameters()], minimum_bytes=1)

    def gradients(manager: SwapManager | None) -> list[Tensor]:
        model.zero_grad()
        for seed in range(4):
            hooks = offloading(manager, selector, 0) if manager else contextlib.nullcontext()
            with hooks:
                loss = model(rows(seed, 32)).square().mean()
            loss.backward()
        return [p.grad.clone().cpu() for p in model.parameters() if p.grad is not None]

    plain = gradients(None)
    with tempfile.TemporaryDirectory() as folder:
        store = SwapConfig(verify=verify).open_store(
            f"strict {tier}", 64 * MIB, copies_for(SIM), Path(folder)
        )
        manager = SwapManager(
            store, limit_bytes=48 * 1024, policy=Policy(eager=eager), verify=verify
        )
        for _ in range(3):
            assert all(map(torch.equal, plain, gradients(manager))), "gradients differ"
        moved = manager.take_statistics()
        manager.close()
    assert moved.bytes_out > 0
    assert moved.bytes_in > 0


def dropped(tier: str) -> None:
    """Graphs are freed while their saved tensors are being offloaded, and the next forward needs the memory at once."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).to(SIM)
    selector = Selector([*model.parameters()], minimum_bytes=1)
    with tempfile.TemporaryDirectory() as folder:
        store = SwapConfig().open_store(f"strict {tier}", 64 * MIB, copies_for(SIM), Path(folder))
        manager = SwapManager(store, limit_bytes=80 * 1024, policy=Policy(eager=True))
        for micro in range(6):
            with offloading(manager, selector, micro):
                model(rows(micro, 32))
        manager.close()


def early(tier: str) -> None:
    """Three micro-batches are requested before the first comes back, which takes their places again; the graph of one
    is dropped instead."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).to(SIM)
    selector = Selector([*model.parameters()], minimum_bytes=1)

    def gradients(manager: SwapManager | None) -> list[Tensor]:
        model.zero_grad()
        losses = []
        for micro in range(4):
            hooks = offloading(manager, selector, micro) if manager else contextlib.nullcontext()
            with hooks:
                losses.append(model(rows(micro, 32)).square().mean())
        if manager is not None:
            torch.accelerator.synchronize()
            for micro in (3,) * 20 + (2, 1):  # the last is written by then, and begins to come
                manager.fetch(micro)
        del losses[1]
        for loss in losses:
            loss.backward()
        return [p.grad.clone().cpu() for p in model.parameters() if p.grad is not None]

    plain = gradients(None)
    with tempfile.TemporaryDirectory() as folder:
        store = SwapConfig(verify=tier == "disk").open_store(
            f"strict {tier}", 64 * MIB, copies_for(SIM), Path(folder)
        )
        for eager in (True, False):
            manager = SwapManager(store, limit_bytes=40 * 1024, policy=Policy(eager=eager))
            for _ in range(2):
                assert all(map(torch.equal, plain, gradients(manager))), "gradients differ"
        manager.close()


def open_tier(
    tier: str, folder: str, copies: StreamCopies, delay: Callable[[], float] = no_delay
) -> StrictStore:
    """A store that minds how it is used; transfers through files are held up by ``delay``."""
    if tier == "host":
        return StrictStore(HostStore(64 * MIB, copies))
    return StrictStore(DiskStore(Path(folder), 64 * MIB, copies, threads=2, delay=delay))


@contextlib.contextmanager
def streaming(
    tier: str, blocks: nn.ModuleList, make: MakeOptimizer, delay: Callable[[], float] = no_delay
) -> Iterator[tuple[OffloadedParameters, HostOptimizer, StrictStore]]:
    """The parameters of ``blocks`` host, with the optimizer that steps them on the host."""
    copies = StreamCopies(SIM)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store = open_tier(tier, folder, copies, delay)
        stack.callback(store.close)
        streamed = OffloadedParameters([b.parameters() for b in blocks], store, chunk_bytes=16384)
        stack.callback(streamed.close)
        for index, block in enumerate(blocks):
            streamed.attach(index, block)
        host = HostOptimizer(make(blocks.parameters()), [], copies=copies, extra=streamed.chunks)
        stack.callback(host.close)
        yield streamed, host, store


def parameters(tier: str, make: MakeOptimizer = sgd, steps: int = 3) -> None:
    """Offloaded weights, stepped on the host: losses, gradients and weights are those of plain training."""
    torch.manual_seed(0)
    plain = nn.ModuleList(Block() for _ in range(6)).to(SIM)
    mine = copy.deepcopy(plain)
    with streaming(tier, mine, make) as (streamed, host, _):
        assert_steps_alike(streamed, host, mine, plain, make(plain.parameters()), steps)


def assert_steps_alike(
    streamed: OffloadedParameters,
    host: HostOptimizer,
    mine: nn.Module,
    plain: nn.Module,
    theirs: torch.optim.Optimizer,
    steps: int,
) -> None:
    """Of each step losses and gradients, and of the last the weights."""
    for _ in range(steps):
        theirs.zero_grad()
        host.finish()
        streamed.zero_gradients(set_to_none=True)
        torch.testing.assert_close(losses(mine), losses(plain), atol=1e-6, rtol=0)
        assert_gradients(streamed, mine, plain)
        host.commit()
        theirs.step()
    host.finish()
    assert_offloaded(streamed, plain)


def assert_gradients(streamed: OffloadedParameters, mine: nn.Module, plain: nn.Module) -> None:
    """Of every parameter, the same."""
    for p, q in zip(mine.parameters(), plain.parameters()):
        torch.testing.assert_close(
            streamed.read_gradient(p), q.grad, atol=1e-6, rtol=1e-5, check_device=False
        )


def assert_offloaded(streamed: OffloadedParameters, plain: nn.ModuleList) -> None:
    """The offloaded weights are those of ``plain``."""
    new = [t for index in range(len(plain)) for t in streamed.read_full(index)]
    for found, q in zip(new, plain.parameters()):
        torch.testing.assert_close(found, q.detach().cpu(), atol=1e-5, rtol=0)


def losses(blocks: Iterable[nn.Module]) -> list[float]:
    """Two micro-batches, forward before backward."""
    roots = []
    for seed in range(2):
        x = rows(seed)
        for block in blocks:
            x = block(x)
        roots.append(x.square().mean())
    for root in roots:
        root.backward()
    return [root.item() for root in roots]


def host_optimizer(steps: int = 4) -> None:
    """Weights on the device, steps on the host, the next forward waiting bucket by bucket."""
    torch.manual_seed(0)
    plain = nn.ModuleList(Block() for _ in range(4)).to(SIM)
    mine = copy.deepcopy(plain)
    host = HostOptimizer(
        adamw(mine.parameters()),
        list(mine.parameters()),
        copies=StreamCopies(SIM),
        bucket_bytes=8192,
    )
    for p in mine.parameters():
        p.register_post_accumulate_grad_hook(host.reduced)
    for module in mine.modules():
        own = list(module.parameters(recurse=False))
        if own:
            module.register_forward_pre_hook(lambda _module, _given, own=own: host.ready(own))
    theirs = adamw(plain.parameters())
    for step in range(steps):
        for blocks in (mine, plain):
            y = rows(step)
            for block in blocks:
                y = block(y)
            y.square().mean().backward()
        # What looks at the weights between backward and step sees the old ones, however late it runs: no code waits
        # for it before the new ones rise.
        seen = [[p.detach().clone() for p in blocks.parameters()] for blocks in (mine, plain)]
        host.commit()
        theirs.step()
        theirs.zero_grad(set_to_none=False)
    host.finish()
    for found, wanted in (*zip(*seen), *zip(mine.parameters(), plain.parameters())):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    host.close()


def scope(tier: str) -> None:
    """``parallax.swap`` around a plain loop: the same weights to the last bit."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)]).to(SIM)
    other = copy.deepcopy(model)
    mine, theirs = adamw(model.parameters()), adamw(other.parameters())
    fixed = 2 * sum(p.nbytes for p in model.parameters())
    reported: list[list[Tensor]] = []

    def train(trained: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            trained(rows(step, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:  # as a checkpoint is written
                states = copy.deepcopy(optimizer.state_dict())
                reported.append([v.cpu() for s in states["state"].values() for v in s.values()])
            if step == 2:  # and read, while newer states leave
                optimizer.load_state_dict(states)

    with (
        tempfile.TemporaryDirectory() as folder,
        parallax.swap(
            model,
            fixed + 160 * 1024,
            optimizer=mine,
            tier=f"strict {tier}",
            tier_bytes=32 * MIB,
            directory=Path(folder) / "s",
            minimum_bytes=1024,
            piece_bytes=32768,
        ),
    ):
        train(model, mine)
    train(other, theirs)
    assert all(map(torch.equal, model.parameters(), other.parameters())), "weights differ"
    assert all(map(torch.equal, *reported)), "states differ"


def first_span() -> None:
    """The device is slow to come to a step's first action, which begins when it has."""
    slow = 0.02
    clock, before = spans_of(SIM, StreamCopies(SIM)), time.perf_counter()
    C.sync_micros(int(1e6 * slow))
    clock.begin()
    C.sync_micros(0)
    clock.end(0, 0, Action(Kind.FORWARD, 0, 0), 0.0)
    torch.accelerator.synchronize()
    (span,) = clock.take()
    assert span.start >= before + slow, "an action began before the device came to it"


SCENARIOS: dict[str, Callable[[], None]] = {
    "activations host eager": lambda: activations("host", eager=True),
    "activations host lazy": lambda: activations("host", eager=False),
    "activations disk eager": lambda: activations("disk", eager=True),
    "activations host verified": lambda: activations("host", eager=True, verify=True),
    "activations early host": lambda: early("host"),
    "activations early disk": lambda: early("disk"),
    "activations dropped host": lambda: dropped("host"),
    "activations dropped disk": lambda: dropped("disk"),
    "parameters host": lambda: parameters("host"),
    "parameters host adamw": lambda: parameters("host", adamw),
    "parameters disk": lambda: parameters("disk"),
    "host optimizer": host_optimizer,
    "first span": first_span,
    "scope host": lambda: scope("host"),
    "scope disk": lambda: scope("disk"),
}

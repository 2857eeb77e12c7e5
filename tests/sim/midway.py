"""What ends, fails or turns in the middle of something, on the simulated accelerator: training that continues has equal
results."""

from __future__ import annotations

import contextlib
import copy
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import parallax
from parallax.errors import SwapError
from parallax.machine.device import StreamCopies
from parallax.model.saved import Selector
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.activations.policy import Policy
from parallax.swap.lms.scope import Swapping
from parallax.swap.verify import Delays
from tests.sim.device import SIM, C
from tests.sim.swapping import (
    MIB,
    WIDTH,
    Block,
    adamw,
    assert_gradients,
    assert_offloaded,
    assert_steps_alike,
    losses,
    open_tier,
    rows,
    sgd,
    streaming,
)
from tests.unit.swap_fakes import full_disk


def twins(count: int, dtype: torch.dtype = torch.float32) -> tuple[nn.ModuleList, nn.ModuleList]:
    """The same blocks twice."""
    torch.manual_seed(0)
    made = nn.ModuleList(Block() for _ in range(count)).to(SIM, dtype)
    return made, copy.deepcopy(made)


# ---- offloaded parameters


def other_orders(tier: str) -> None:
    """Blocks that come are given up where another follows than the step before made expect."""
    mine, plain = twins(6)
    theirs = sgd(plain.parameters())
    with streaming(tier, mine, sgd) as (streamed, host, _):
        for order in ([*range(6)], [0, 3, 1, 5], [4, 2, 0], [*range(6)], [5, 1, 3]):
            theirs.zero_grad()
            host.finish()
            streamed.zero_gradients(set_to_none=True)
            found = [losses([blocks[at] for at in order]) for blocks in (mine, plain)]
            torch.testing.assert_close(*found, atol=1e-6, rtol=0)
            assert_gradients(streamed, mine, plain)
            host.commit()
            theirs.step()
        host.finish()
        assert_offloaded(streamed, plain)


def stops_streaming(tier: str) -> None:
    """Right after a step, while new weights go down and a block comes; training continues on the device."""
    mine, plain = twins(6)
    theirs = sgd(plain.parameters())
    with streaming(tier, mine, sgd) as (streamed, host, _):
        losses(mine)
        losses(plain)
        host.commit()
        theirs.step()
        host.finish()
        streamed.enter(0)
        streamed.restore()
        own = sgd(mine.parameters())
        for optimizer, blocks in ((theirs, plain), (own, mine)):
            optimizer.zero_grad()
            losses(blocks)
            optimizer.step()
        for p, q in zip(mine.parameters(), plain.parameters()):
            torch.testing.assert_close(p, q, atol=1e-5, rtol=0)


def stops_at_once(tier: str) -> None:
    """Nothing is left in the store, though no code has read the new weights."""
    for dtype in (torch.float32, torch.bfloat16):
        mine, _ = twins(3, dtype)
        with streaming(tier, mine, adamw, Delays()) as (streamed, host, store):
            losses_of(mine, dtype)
            host.commit()
            host.finish()
            host.close()
            streamed.close()
            assert store.slots.used_bytes == 0


def written_twice(tier: str) -> None:
    """Chunks get new values while older ones are still being written; few of them wait in host memory."""
    for made in ([nn.Linear(16, 16)], [Block()]):
        blocks = nn.ModuleList(made).to(SIM)
        wanted = [p.detach().cpu() for p in blocks.parameters()]
        with streaming(tier, blocks, sgd, Delays()) as (streamed, _, store):
            most = max(chunk.size for chunk in streamed.chunks)
            for _ in range(3):
                wanted = [value * 0.5 for value in wanted]
                streamed.write_full(0, wanted)
            assert all(map(torch.equal, streamed.read_full(0), wanted))
        assert store.most_behind_bytes <= 3 * most, "more is kept in host memory than promised"


def gradients_read() -> None:
    """Before a step, which gives their places away; they are looked at after it."""
    mine, plain = twins(3)
    with streaming("host", mine, sgd) as (streamed, host, _):
        for _ in range(3):
            host.finish()
            streamed.zero_gradients(set_to_none=True)
            plain.zero_grad()
            losses(mine)
            losses(plain)
            found = [streamed.read_gradient(p) for p in mine.parameters()]
            host.commit()
            host.finish()
            for gradient, q in zip(found, plain.parameters()):
                torch.testing.assert_close(gradient, q.grad, atol=1e-6, rtol=1e-5)
            with torch.no_grad():
                for q in plain.parameters():
                    assert q.grad is not None
                    q.sub_(0.5 * q.grad)


def losses_of(blocks: nn.ModuleList, dtype: torch.dtype = torch.float32) -> float:
    """One micro-batch in a type of its own."""
    x = rows(0).to(dtype)
    for block in blocks:
        x = block(x)
    loss = x.float().square().mean()
    loss.backward()
    return loss.item()


def masters(tier: str) -> None:
    """Weights of two bytes are stepped in fp32 host, and the fp32 ones read at once, and given back."""
    mine, plain = twins(3, torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    theirs = adamw(wide)
    with streaming(tier, mine, adamw, Delays()) as (streamed, host, _):
        for _ in range(3):
            host.finish()
            streamed.zero_gradients(set_to_none=True)
            plain.zero_grad()
            assert losses_of(mine, torch.bfloat16) == losses_of(plain, torch.bfloat16)
            host.commit()
            for p, q in zip(wide, plain.parameters()):
                p.grad = q.grad.float() if q.grad is not None else None
            theirs.step()
            for p, q in zip(wide, plain.parameters()):
                q.data.copy_(p.detach())
            known = [host.states(p) for p in mine.parameters()]
            for states, p in zip(known, wide):
                torch.testing.assert_close(states["master"], p.detach().cpu(), atol=1e-6, rtol=0)
            for states, p in zip(known, mine.parameters()):
                host.restore(p, states)
        host.finish()
        assert_offloaded(streamed, plain)


def gradients_lost() -> None:
    """A disk is full while gradients of several chunks go down: after that a step is as any other."""
    mine, plain = twins(3)
    with streaming("disk", mine, sgd, lambda: 0.01) as (streamed, host, _):
        with full_disk(), contextlib.suppress(SwapError):
            losses(mine)
        assert_steps_alike(streamed, host, mine, plain, sgd(plain.parameters()), 2)


def gradients_cleared() -> None:
    """Gradients are set to None while they are written: writes that have not begun are cancelled, and no later call
    reports that."""
    mine, plain = twins(2)
    with streaming("disk", mine, sgd, lambda: 0.01) as (streamed, host, _):
        for _ in range(2):
            losses_of(mine)
            for p in mine.parameters():
                streamed.clear_gradient(p, to_none=True)
                assert streamed.read_gradient(p) is None
        assert_steps_alike(streamed, host, mine, plain, sgd(plain.parameters()), 1)


def weights_set_while_read() -> None:
    """The host writes new weights to the tier while reads of the old ones are under way: of blocks that are used, and
    of those that were prefetched in vain."""
    C.configure(lateness=9)
    mine, _ = twins(6)
    with streaming("host", mine, sgd) as (streamed, _, _):
        wanted = [streamed.read_full(block) for block in range(6)]
        for used in (0, 3) * 3:
            streamed.enter(used)
            for block in (used, used + 1, 5, 2):
                wanted[block] = [value * 0.5 for value in wanted[block]]
                streamed.write_full(block, wanted[block])
        for block in range(6):
            assert all(map(torch.equal, streamed.read_full(block), wanted[block]))


def owner_fails() -> None:
    """Pinned memory is let go of while a copy goes there, by who cannot wait for it any more."""
    copies = StreamCopies(SIM)
    source = torch.zeros(1000, dtype=torch.uint8, device=SIM)
    arena = copies.arena(1000)
    copies.copy(source, arena.data)
    del arena
    gc.collect()


# ---- activations


def writes_lost() -> None:
    """A failed write raises its own error, and does not count as ended."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)]).to(SIM)
    selector = Selector([*model.parameters()], minimum_bytes=1)
    reported = ""
    with tempfile.TemporaryDirectory() as folder:
        store = open_tier("disk", folder, StreamCopies(SIM))
        manager = SwapManager(store, limit_bytes=MIB, policy=Policy(eager=True))
        try:
            with full_disk():
                with offloading(manager, selector, 0):
                    loss = model(rows(0)).square().mean()
                store.let_end()
            loss.backward()
        except SwapError as error:
            reported = str(error)
        manager.close()
    assert "cannot write" in reported, reported or "no error was raised"


# ---- a scope around a loop


class Stumbling(torch.optim.AdamW):
    """Fails in the middle of the chosen step."""

    calls_left = 0  # of all of this class: a step in pieces is that of several stand-ins; none fails where it is 0

    def step(self, closure: Any = None) -> Any:
        if Stumbling.calls_left:  # one that always counts its calls may not be stepped in pieces
            Stumbling.calls_left -= 1
            if not Stumbling.calls_left:
                raise ArithmeticError("stumbled")
        return super().step(closure)


def _stumbling() -> tuple[nn.Module, Stumbling, nn.Module, Stumbling]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)]).to(SIM)
    other = copy.deepcopy(model)
    made = [Stumbling(each.parameters(), lr=0.01, fused=True) for each in (model, other)]
    return model, made[0], other, made[1]


def scope_around(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tier: str,
    folder: str,
    free_bytes: int = 224 * 1024,
) -> Swapping:
    """A scope with ``free_bytes`` for activations and states."""
    fixed = 2 * sum(p.nbytes for p in model.parameters())
    return parallax.swap(
        model,
        fixed + free_bytes,
        optimizer=optimizer,
        tier=f"strict {tier}",
        tier_bytes=32 * MIB,
        directory=Path(folder) / "s",
        minimum_bytes=1024,
        piece_bytes=32768,
    )


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step of a plain loop."""
    model(rows(seed, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    found: tuple[Any, Any] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return found


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, saved: tuple[Any, Any]) -> None:
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))  # which torch would take for its own
    optimizer.zero_grad()


def _tensors(states: dict[str, Any]) -> list[Tensor]:
    return [value.cpu() for state in states["state"].values() for value in state.values()]


def step_fails(tier: str) -> None:
    """In its second piece, while the states of the third come: who looks at them then sees all, and a checkpoint that
    is loaded is gone on from."""
    model, mine, other, theirs = _stumbling()
    with tempfile.TemporaryDirectory() as folder, scope_around(model, mine, tier, folder):
        for seed in range(2):
            take_step(model, mine, seed)
            take_step(other, theirs, seed)
        saved = _saved(model, mine)
        for calls in (2, 3, 4):
            Stumbling.calls_left = calls
            with contextlib.suppress(ArithmeticError):
                take_step(model, mine, 2)
            assert not Stumbling.calls_left, "no step has so many pieces"
            reported = _tensors(copy.deepcopy(mine.state_dict()))
            torch.accelerator.synchronize()
            assert all(map(torch.equal, reported, _tensors(mine.state_dict()))), "values differ"
            _load(model, mine, saved)
        for seed in range(2, 4):
            take_step(model, mine, seed)
            take_step(other, theirs, seed)
    assert all(map(torch.equal, model.parameters(), other.parameters())), "weights differ"


def scope_ends_midway(tier: str) -> None:
    """By what a step raised: all states are on the device, and a plain loop resumes from a checkpoint."""
    model, mine, other, theirs = _stumbling()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(ArithmeticError),
        scope_around(model, mine, tier, folder),
    ):
        for seed in range(2):
            take_step(model, mine, seed)
            take_step(other, theirs, seed)
        saved = _saved(model, mine)
        Stumbling.calls_left = 3
        take_step(model, mine, 2)
    found = _tensors(mine.state_dict())
    assert len(found) == len(_tensors(saved[1]))
    assert all(value.isfinite().all() for value in found)
    assert all(v.device == SIM for s in mine.state.values() for k, v in s.items() if k != "step")
    _load(model, mine, saved)
    for seed in range(2, 4):
        take_step(model, mine, seed)
        take_step(other, theirs, seed)
    assert all(map(torch.equal, model.parameters(), other.parameters())), "weights differ"


SCENARIOS: dict[str, Callable[[], None]] = {
    "other orders host": lambda: other_orders("host"),
    "other orders disk": lambda: other_orders("disk"),
    "stops streaming host": lambda: stops_streaming("host"),
    "stops streaming disk": lambda: stops_streaming("disk"),
    "stops at once host": lambda: stops_at_once("host"),
    "stops at once disk": lambda: stops_at_once("disk"),
    "written twice disk": lambda: written_twice("disk"),
    "masters host": lambda: masters("host"),
    "masters disk": lambda: masters("disk"),
    "gradients lost": gradients_lost,
    "gradients cleared": gradients_cleared,
    "gradients read": gradients_read,
    "weights set while read": weights_set_while_read,
    "owner fails": owner_fails,
    "writes lost": writes_lost,
    "step fails host": lambda: step_fails("host"),
    "step fails disk": lambda: step_fails("disk"),
    "scope ends midway host": lambda: scope_ends_midway("host"),
    "scope ends midway disk": lambda: scope_ends_midway("disk"),
}

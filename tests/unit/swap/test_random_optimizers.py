"""Optimizers as people write them, under a limit: each loop equals the loop without one, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.errors import BudgetExceeded
from parallax.swap.lms.divisible import is_divisible
from parallax.swap.lms.scope import Swapping
from tests.unit.swap.test_scope import MIB, Optimizer, batches, build, compare, plain_loop, tight
from tests.unit.swap_fakes import assert_equal

__all__ = ["tight"]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware: a step up along all gradients, a second backward, and the step of another optimizer."""

    def __init__(self, params: Any, base: Callable[..., Optimizer], **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        found = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        for p in found:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
            p.grad = None

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:
        closure()
        self.first_step()
        closure()
        self.second_step()


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow those of another optimizer every other step."""

    def __init__(self, base: Optimizer) -> None:
        self.optimizer = base
        super().__init__(base.param_groups, {})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            if not self.state[p]:
                self.state[p]["slow"] = p.clone()
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for p in (p for group in self.param_groups for p in group["params"]):
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))
        return loss


class Ema(torch.optim.AdamW):
    """Averages of all weights, in a list of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.averages = [p.detach().clone() for p in self.parameters]

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for average, p in zip(self.averages, self.parameters):
            average.lerp_(p.detach(), 0.1)
        return found


def by_closure(model: nn.Module, optimizer: Optimizer) -> list[float]:
    """How often the closure runs, and with which weights, is the optimizer's own matter."""
    losses = []
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            with torch.enable_grad():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
    return losses


def by_two_steps(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        optimizer.first_step()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.second_step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sam(model: nn.Module) -> Optimizer:
    return Sam(model.parameters(), torch.optim.SGD, lr=1e-2, momentum=0.9)


WRAPPING: dict[str, tuple[Callable[[nn.Module], Optimizer], Callable[..., list[float]]]] = {
    "sam, two steps": (sam, by_two_steps),
    "sam, closure": (sam, by_closure),
    "sam of adamw": (lambda m: Sam(m.parameters(), torch.optim.AdamW, lr=1e-3), by_closure),
    "lookahead": (lambda m: Lookahead(torch.optim.Adam(m.parameters(), lr=1e-2)), plain_loop),
    "lookahead of sgd": (
        lambda m: Lookahead(torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9)),
        plain_loop,
    ),
    "averages": (lambda m: Ema(m.parameters()), plain_loop),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("optimize", "loop"), WRAPPING.values(), ids=WRAPPING)
def test_optimizers_that_wrap_others(
    optimize: Callable[[nn.Module], Optimizer],
    loop: Callable[..., list[float]],
    tight: Callable[..., Swapping],
) -> None:
    model, other = build(), build()
    plain, swapped = optimize(model), optimize(other)
    expected = loop(model, plain)
    with tight(other, swapped, free_bytes=5 * MIB // 4) as swapping:
        assert loop(other, swapped) == expected
        report = swapping.report()
    assert_equal(other.state_dict(), model.state_dict())
    assert_equal([*swapped.state.values()], [*plain.state.values()])
    inner = getattr(swapped, "base_optimizer", getattr(swapped, "optimizer", None))
    assert swapping.statistics.bytes_out > 0
    assert max(states.bytes_in for states in swapping.states) > 0
    for each in [swapped] if inner is None else [swapped, inner]:
        assert f"{type(each).__name__}: " in report
        assert f"{type(each).__name__}: 0 B of states" not in report


def test_what_a_wrapped_optimizer_counts_is_counted_once(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
    steps: list[int] = []
    optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    with tight(model, optimizer, free_bytes=5 * MIB // 4):
        losses = plain_loop(model, optimizer)
    assert len(steps) == optimizer.count == len(losses)


def test_states_of_a_step_that_is_not_split_must_fit(tight: Callable[..., Swapping]) -> None:
    """Refused before anything is stepped, with the limit that is enough."""
    model = build()
    optimizer = Ema(model.parameters())
    with tight(model, optimizer, free_bytes=MIB) as swapping:
        message = r"a step of Ema needs .* its step in pieces has another result.*nothing was stepped: raise limit by"
        with pytest.raises(BudgetExceeded, match=message):
            plain_loop(model, optimizer)
    assert "Ema: 1.1 MiB of states" in swapping.report()


# ---- random ones


class Written(torch.optim.Optimizer):
    """An optimizer of random ``parts``: rules for each parameter, and what depends on all or counts calls."""

    calls = 0

    def __init__(self, params: Any, parts: frozenset[str], **options: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "k": 0, **options})
        self.parts = parts
        self.count, self.log, self.total = 0, [], torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        parts = self.parts
        everything = [p for group in self.param_groups for p in group["params"]]
        found = [p for p in everything if p.grad is not None]
        scale = 1.0
        if "global norm" in parts:
            norm = float(torch.stack([p.grad.norm() for p in found]).norm())
            scale = min(1.0, 0.5 / norm)
        if "mean of weights" in parts:
            scale *= 1 + float(torch.stack([p.mean() for p in found]).mean())
        if "attribute" in parts:
            self.count += 1
            scale /= self.count**0.5
        if "list" in parts:
            self.log.append(len(found))
            scale /= len(self.log)
        if "tensor" in parts:
            self.total += 1
            scale /= float(self.total)
        if "class" in parts:
            type(self).calls += 1
        for group in self.param_groups:
            if "group" in parts:
                group["k"] += 1
                group["lr"] = 1e-2 / group["k"]
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad * scale, group["lr"])
        return loss

    def update(self, p: Tensor, gradient: Tensor, rate: float) -> None:
        parts, state = self.parts, self.state[p]
        if "noise" in parts:
            gradient = gradient + 1e-3 * torch.randn_like(p)
        if "sign" in parts:
            gradient = gradient.sign()
        if "trust" in parts:
            rate = rate * float(p.norm() / (gradient.norm() + 1))
        if "rows" in parts and p.dim() > 1:
            rows = state.setdefault("rows", torch.zeros_like(p[:, :1]))
            gradient = gradient / (1 + rows.lerp_(gradient.abs().mean(1, keepdim=True), 0.1))
        if "steps" in parts:
            state["step"] = state.get("step", 0) + 1
            rate = rate / state["step"]
        if "momentum" in parts:
            gradient = state.setdefault("m", torch.zeros_like(p)).lerp_(gradient, 0.1)
        if "squares" in parts:
            squares = state.setdefault("v", torch.zeros_like(p)).lerp_(gradient.square(), 0.1)
            gradient = gradient / (squares.sqrt() + 1e-2)
        p.sub_(gradient, alpha=rate)


EACH_BY_ITSELF = "noise", "sign", "trust", "rows", "steps", "momentum", "squares"
OF_THE_STEP = "attribute", "group"
WHOLE = "global norm", "mean of weights", "list", "tensor", "class"


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(10))
def test_random_optimizers(seed: int, tight: Callable[..., Swapping]) -> None:
    draw = random.Random(seed)
    parts = {"momentum", *draw.sample(EACH_BY_ITSELF, 3), *draw.sample(OF_THE_STEP, seed % 3)}
    if seed % 2:
        parts.update(draw.sample(WHOLE, 1 + seed % 3 // 2))
    wraps = seed % 5 == 4

    def optimize(model: nn.Module) -> Optimizer:
        torch.manual_seed(seed)
        Written.calls = 0
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 1e-3},
        ]
        inner = Written(groups, frozenset(parts))
        return Lookahead(inner) if wraps else inner

    swapping = compare(tight, optimize=optimize, loop=plain_loop, free_bytes=5 * MIB // 4)
    assert not (swapping.states[-1].whole and parts.isdisjoint(WHOLE))


@pytest.mark.parametrize("part", [*EACH_BY_ITSELF, *OF_THE_STEP, *WHOLE])
def test_what_can_be_stepped_in_pieces(part: str) -> None:
    model = build()
    optimizer = Written(model.parameters(), frozenset({part, "momentum"}))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    state, weights = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    assert is_divisible(optimizer, ((optimizer,), {})) == (part not in WHOLE)
    assert Written.calls == 0
    assert (optimizer.count, optimizer.log, float(optimizer.total)) == (0, [], 0.0)
    assert_equal([*model.parameters()], [nn.Parameter(w) for w in weights])
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), state)

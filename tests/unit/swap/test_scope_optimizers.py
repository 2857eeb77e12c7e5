"""Optimizers under a limit: what of them moves, and those that are out of the ordinary."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.errors import ConfigError
from parallax.swap.lms.scope import Swapping
from tests.unit.swap.test_scope import (
    LAYERS,
    MIB,
    STEPS,
    WIDTH,
    Layers,
    Optimizer,
    adamw,
    assert_moved,
    batches,
    build,
    compare,
    plain_loop,
    tight,
)
from tests.unit.swap_fakes import assert_equal

__all__ = ["tight"]


def test_gan(tight: Callable[..., Swapping]) -> None:
    """Two models, one in the other's block: the inner scope has the activations, each the states of its own."""

    def models() -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
        torch.manual_seed(0)
        one = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        )
        two = Layers()
        return one, two, adamw(one), adamw(two, lr=1e-3)

    def loop(one: nn.Module, two: nn.Module, first: Optimizer, second: Optimizer) -> list[float]:
        losses = []
        for x, y in batches():
            fake = one(x)
            loss = F.cross_entropy(two(fake.detach()), y)
            loss.backward()
            second.step()
            second.zero_grad()
            other = -F.cross_entropy(two(fake), y)
            other.backward()
            first.step()
            first.zero_grad()
            losses += [loss.item(), other.item()]
        return losses

    expected = loop(*models())
    one, two, first, second = models()
    with tight(one, first) as outer, tight(two, second, free_bytes=MIB) as inner:
        assert loop(one, two, first, second) == expected
    assert_moved(inner)
    assert outer.states[0].bytes_out > 0
    one, two, first, second = models()
    with tight(nn.ModuleList([one, two]), [first, second], free_bytes=MIB) as both:
        assert loop(one, two, first, second) == expected
    assert_moved(both)


def test_states_too_small_to_move_stay(tight: Callable[..., Swapping]) -> None:
    """Adafactor has rows and columns only; plain SGD has nothing."""
    kinds: list[Callable[..., Optimizer]] = [torch.optim.Adafactor, torch.optim.SGD]
    for kind in kinds:
        model, other = build(), build()
        expected = plain_loop(model, kind(model.parameters(), lr=1e-2))
        optimizer = kind(other.parameters(), lr=1e-2)
        with tight(other, optimizer) as swapping:
            assert plain_loop(other, optimizer) == expected
        assert swapping.statistics.bytes_out > 0
        assert swapping.states[0].bytes_out == 0


def test_optimizer_left_out(tight: Callable[..., Swapping]) -> None:
    model, other = build(), build()
    expected = plain_loop(model, adamw(model))
    with tight(other) as swapping:
        assert plain_loop(other, adamw(other)) == expected
    assert_moved(swapping)


# ---- optimizers out of the ordinary


class Counting(torch.optim.SGD):
    """Keeps a counter in its groups and one in itself, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 1e-2 / group["k"]
        return super().step(closure)


class Together(torch.optim.SGD):
    """The rate of every parameter depends on all."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = float(sum(p.grad.abs().sum() for p in group["params"]))
        return super().step(closure)


def test_counters_of_the_optimizer_count_steps_not_pieces(tight: Callable[..., Swapping]) -> None:
    made: list[Counting] = []

    def optimize(model: nn.Module) -> Optimizer:
        made.append(Counting(model.parameters(), momentum=0.9))
        return made[-1]

    compare(tight, optimize=optimize)
    assert made[0].steps == made[1].steps == STEPS


def test_lbfgs_is_refused(tight: Callable[..., Swapping]) -> None:
    model = build()
    with (
        pytest.raises(ConfigError, match="LBFGS"),
        tight(model, torch.optim.LBFGS(model.parameters())),
    ):
        pass


def test_an_optimizer_that_reads_all_parameters_is_stepped_whole(
    tight: Callable[..., Swapping],
) -> None:
    swapping = compare(tight, optimize=lambda m: Together(m.parameters(), momentum=0.9))
    assert "Together: 389.0 KiB of states" in swapping.report()
    assert "stepped whole" in swapping.report()


class Lamb(torch.optim.Optimizer):
    """Clips by the norm of all gradients inside ``step``, as timm's Lamb and Adan do."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 1e-2, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.stack([p.grad.norm() for p in found]).norm())
        for group in self.param_groups:
            most = group.get("max_grad_norm")
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad * min(1.0, most / norm) if most else p.grad, 0.1)
                state["v"].lerp_(state["m"].square(), 0.1)
                p.addcdiv_(state["m"], state["v"].sqrt() + 1e-3, value=-group["lr"])


class FusedLamb(Lamb):
    """Only its name tells."""


class NormedLamb(Lamb):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.max_grad_norm = 1.0


def test_an_optimizer_that_clips_inside_step_is_refused(tight: Callable[..., Swapping]) -> None:
    """The norm of a piece is not the norm of all: plain and swapped losses would part without a word."""
    model = build()
    weights, biases = (
        [p for p in model.parameters() if p.dim() > 1],
        [p for p in model.parameters() if p.dim() == 1],
    )
    refused = [
        (
            Lamb(model.parameters(), max_grad_norm=1.0),
            "Lamb: max_grad_norm=1.0 takes the norm of all.*clip_grad_norm_",
        ),
        (Lamb(model.parameters(), pre_norm=True), "pre_norm=True"),
        (
            Lamb([{"params": weights}, {"params": biases, "max_grad_norm": 2.0}]),
            r"max_grad_norm=2\.0",
        ),
        (NormedLamb(model.parameters()), r"NormedLamb: max_grad_norm=1\.0"),
        (FusedLamb(model.parameters()), "FusedLamb updates all parameters together"),
    ]
    for optimizer, message in refused:
        with pytest.raises(ConfigError, match=message), tight(model, optimizer):
            pass
    compare(tight, optimize=lambda m: Lamb(m.parameters(), max_grad_norm=None))


def test_an_optimizer_that_clips_later_is_refused_then(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = Lamb(model.parameters(), max_grad_norm=0.0)
    with tight(model, optimizer):
        plain_loop(model, optimizer)
        before = copy.deepcopy(model.state_dict())
        optimizer.param_groups[0]["max_grad_norm"] = 1.0
        with pytest.raises(ConfigError, match="max_grad_norm"):
            plain_loop(model, optimizer)
        assert_equal(model.state_dict(), before)


def test_hooks_of_the_optimizer_run_once_and_see_all(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = adamw(model)
    seen: list[int] = []

    def hook(found: Optimizer, args: Any, kwargs: Any) -> None:
        assert found is optimizer
        seen.append(len(found.param_groups[0]["params"]))

    handles = [optimizer.register_step_pre_hook(hook), optimizer.register_step_post_hook(hook)]
    with tight(model, optimizer):
        plain_loop(model, optimizer)
    assert seen == [2 * LAYERS + 2] * 2 * STEPS
    for handle in handles:
        handle.remove()


def test_offloaded_states_are_fetched_for_readers(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = adamw(model)
    with tight(model, optimizer):
        plain_loop(model, optimizer)
        state = optimizer.state[model.layers[3][0].weight]
        assert state["step"] == STEPS
        assert isinstance(state["exp_avg"], Tensor)
        with pytest.raises(KeyError):
            state["no such state"]
        copy.deepcopy(optimizer)
    assert isinstance(optimizer.state[model.layers[3][0].weight]["exp_avg"], Tensor)
    copy.deepcopy(optimizer)


@pytest.mark.parametrize("scheduled", [False, True], ids=["plain", "with a schedule"])
def test_a_compiled_step_runs_uncompiled_inside(
    scheduled: bool, tight: Callable[..., Swapping]
) -> None:
    """A step in pieces is never compiled, even if it was wrapped before; outside it is, as before."""
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    model, other = build(), build()
    expected = plain_loop(model, adamw(model))
    optimizer = adamw(other)
    if scheduled:
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    step = torch.compile(optimizer.step, backend=backend)

    def loop() -> list[float]:
        losses = []
        for x, y in batches():
            loss = F.cross_entropy(other(x), y)
            loss.backward()
            step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with tight(other, optimizer) as swapping:
        assert loop() == expected
    assert not compiled
    assert swapping.states[0].bytes_in > 0
    loop()
    assert compiled

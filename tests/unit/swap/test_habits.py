"""What loops do to optimizers between and around steps: the same with and without a scope."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from parallax.swap.lms.scope import Swapping
from tests.unit.swap.test_states import WIDTH, build, offloaded_states, tight
from tests.unit.swap_fakes import assert_equal

__all__ = ["tight"]
Optimizer = torch.optim.Optimizer
Step = Callable[[int], None]


class Loop:
    """Six steps; a habit looks in after the backward and after the step of each."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer, self.found = model, optimizer, list[Any]()
        self.generator = torch.Generator().manual_seed(1)

    def run(
        self, before: Step = lambda number: None, after: Step = lambda number: None, steps: int = 6
    ) -> None:
        for number in range(steps):
            self.backward()
            before(number)
            self.optimizer.step()
            self.optimizer.zero_grad()
            after(number)

    def backward(self) -> Tensor:
        loss = self.model(torch.randn(128, WIDTH, generator=self.generator)).square().mean()
        loss.backward()
        self.found.append(loss.item())
        return loss

    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def halving_hook(loop: Loop) -> None:
    """Registered in the block: it was called after most parameters had been stepped."""

    def hook(optimizer: Optimizer, *_: Any) -> None:
        for parameter in loop.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        loop.found.append(len(optimizer.param_groups[0]["params"]))

    handle = loop.optimizer.register_step_pre_hook(hook)
    loop.run()
    handle.remove()
    loop.run()


def failing_hook(loop: Loop) -> None:
    def hook(*_: Any) -> None:
        raise ValueError

    def before(number: int) -> None:
        if number == 3:
            handle = loop.optimizer.register_step_pre_hook(hook)
            with pytest.raises(ValueError):  # noqa: PT011
                loop.optimizer.step()
            handle.remove()

    loop.run(before)


def failing_last_hook(loop: Loop) -> None:
    def hook(*_: Any) -> None:
        raise ValueError

    handle = loop.optimizer.register_step_post_hook(hook)
    loop.backward()
    with pytest.raises(ValueError):  # noqa: PT011
        loop.optimizer.step()
    handle.remove()
    loop.run()


def reading_hooks(loop: Loop) -> None:
    def hook(optimizer: Optimizer, *_: Any) -> None:
        states = [state for state in optimizer.state.values() if state]
        loop.found += [
            value.sum().item() for state in states for value in state.values() if value is not None
        ]

    handles = [
        loop.optimizer.register_step_pre_hook(hook),
        loop.optimizer.register_step_post_hook(hook),
    ]
    loop.run()
    for handle in handles:
        handle.remove()


def another_weight(loop: Loop) -> None:
    """As who prunes or splits does: the state moves to a parameter that takes the place of the first."""

    def after(number: int) -> None:
        if number % 2:
            return
        module = loop.model[number // 2][0]  # type: ignore[index]
        old, new = module.weight, nn.Parameter(module.weight.detach() * 0.5)
        loop.optimizer.state[new] = loop.optimizer.state.pop(old)
        for group in loop.optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        module.weight = new

    loop.run(after=after)


def another_weight_and_state(loop: Loop) -> None:
    """As who makes points denser does."""

    def after(number: int) -> None:
        module = loop.model[number][0]  # type: ignore[index]
        old, new = module.weight, nn.Parameter(module.weight.detach() * 0.5)
        state = loop.optimizer.state.get(old)
        assert state
        for key in [
            key for key, value in state.items() if isinstance(value, Tensor) and value.dim()
        ]:
            state[key] = state[key] * 0.5
        del loop.optimizer.state[old]
        loop.optimizer.state[new] = state
        group = loop.optimizer.param_groups[0]
        group["params"] = [new if p is old else p for p in group["params"]]
        module.weight = new

    loop.run(after=after)


def swapped_states(loop: Loop) -> None:
    """Two parameters change states, after one was kept for a while."""
    kept: list[Any] = []

    def after(number: int) -> None:
        first, other = loop.parameters()[0], loop.parameters()[4]
        state = loop.optimizer.state
        if number == 2:
            state[first], state[other] = state[other], state[first]
        if number == 3:
            kept.append(state.pop(first))
        if number == 4:
            state[first] = kept.pop()

    loop.run(after=after)


def fresh_states(loop: Loop) -> None:
    def after(number: int) -> None:
        if number == 2:
            loop.optimizer.state = defaultdict(dict)
        if number == 4:
            loop.optimizer.state.clear()

    loop.run(after=after)


def edited_groups(loop: Loop) -> None:
    extra = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def before(number: int) -> None:
        extra.grad = torch.full_like(extra, 0.1 * number)
        for group in loop.optimizer.param_groups:
            group["lr"] *= 0.9
            group["mine"] = number
        if number == 2:
            loop.optimizer.add_param_group({"params": [extra], "lr": 0.1})
        if number == 3:
            loop.optimizer.param_groups[0]["params"].reverse()
        if number == 4:
            loop.optimizer.param_groups[0]["params"].pop()

    loop.run(before)
    loop.found.append(extra.sum().item())


def missing_gradients(loop: Loop) -> None:
    def before(number: int) -> None:
        for place, parameter in enumerate(loop.parameters()):
            if (number + place) % 3 == 0:
                parameter.grad = None

    loop.run(before)
    loop.optimizer.step()


def averages(loop: Loop) -> None:
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    scheduler = SWALR(loop.optimizer, swa_lr=0.005)

    def after(_: int) -> None:
        average.update_parameters(loop.model)
        scheduler.step()
        loop.found.append(average(torch.ones(2, WIDTH)).sum().item())

    loop.run(after=after)


def loading(loop: Loop) -> None:
    file = io.BytesIO()

    def after(number: int) -> None:
        if number == 1:
            torch.save([loop.model.state_dict(), loop.optimizer.state_dict()], file)
        if number == 3:
            file.seek(0)
            model, optimizer = torch.load(file)
            loop.model.load_state_dict(model)
            loop.optimizer.load_state_dict(optimizer)

    loop.run(after=after)


HABITS = [
    halving_hook,
    failing_hook,
    failing_last_hook,
    reading_hooks,
    another_weight,
    another_weight_and_state,
    swapped_states,
    fresh_states,
    edited_groups,
    missing_gradients,
    averages,
    loading,
]
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


@pytest.mark.sampled
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_habits(habit: Callable[[Loop], None], kind: Any, tight: Callable[..., Swapping]) -> None:
    loops = []
    for limited in (False, True):
        model = build()
        loop = Loop(model, kind(list(model.parameters())))
        if limited:
            with tight(model, loop.optimizer) as swapping:
                habit(loop)
            assert swapping.states[0].bytes_out > 0
            assert not offloaded_states(loop.optimizer)
        else:
            habit(loop)
        loops.append(loop)
    plain, swapped = loops
    assert_equal(swapped.found, plain.found)
    assert_equal(swapped.model.state_dict(), plain.model.state_dict())
    states = [[dict(loop.optimizer.state[p]) for p in loop.parameters()] for loop in loops]
    assert_equal(states[1], states[0])


def test_states_that_are_replaced_are_not_read(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = KINDS["adamw"](model.parameters())
    with tight(model, optimizer) as swapping:
        Loop(model, optimizer).run()
        assert offloaded_states(optimizer) > 2
        states = copy.deepcopy(optimizer.state_dict())
        before, leaving = swapping.states[0].bytes_in, swapping.states[0]._store.slots.used_bytes
        optimizer.load_state_dict(states)
        assert swapping.states[0].bytes_in == before
        assert leaving > 0


def test_the_optimizer_is_as_before(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = KINDS["adamw"](model.parameters())
    before = {*vars(optimizer)}
    with tight(model, optimizer):
        handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert {*vars(optimizer)} == before
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    handle.remove()

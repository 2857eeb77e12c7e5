"""Offloaded optimizer states: copied, saved, read, edited and held on to, as without a scope."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallax
from parallax.errors import BudgetExceeded
from parallax.swap.lms.offloaded_states import OffloadedStates
from parallax.swap.lms.scope import Swapping
from tests.unit.swap_fakes import assert_equal

WIDTH = 64
Optimizer = torch.optim.Optimizer


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)])


def steps(model: nn.Module, optimizer: Optimizer, count: int = 3, seed: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(count):
        loss = model(torch.randn(128, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


@pytest.fixture
def tight(scratch: Path) -> Callable[..., Swapping]:
    """Activations and states must be offloaded: each is several times the free bytes."""

    def make(model: nn.Module, optimizer: Any = (), free_bytes: int = 2**17) -> Swapping:
        limit = 2 * sum(p.nbytes for p in model.parameters()) + free_bytes
        options = {"minimum_bytes": 1024, "piece_bytes": 2**15, "directory": scratch}
        return parallax.swap(model, limit, optimizer=optimizer, **options)

    return make


def offloaded_states(optimizer: Optimizer) -> int:
    return sum(isinstance(state, OffloadedStates) for state in optimizer.state.values())


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_is_an_ordinary_optimizer(
    copied: Callable[[Any], Any], tight: Callable[..., Swapping]
) -> None:
    """A copy of model and optimizer trains as the first would, in the scope and after it."""
    other = build()
    same = adam(other)
    expected = [steps(other, same), steps(other, same, seed=2)]
    model = build()
    optimizer = adam(model)
    with tight(model, optimizer):
        losses = [steps(model, optimizer)]
        assert offloaded_states(optimizer) > 2
        found, twin = copied((model, optimizer))
        assert offloaded_states(optimizer) > 2
        assert not offloaded_states(twin)
        assert all(type(state) is dict for state in twin.state.values())
        assert_equal(twin.state_dict(), optimizer.state_dict())
        assert [*twin.state] == [*found.parameters()]
        inside = steps(found, twin, seed=2)
        assert not offloaded_states(twin)
        losses.append(steps(model, optimizer, seed=2))
    assert losses == expected
    assert inside == expected[1]
    assert_equal(twin.state_dict(), same.state_dict())
    assert_equal(optimizer.state_dict(), same.state_dict())
    steps(found, twin)


def test_a_copy_of_the_best(tight: Callable[..., Swapping]) -> None:
    """Kept over the end of the scope, and loaded again in a second."""
    model = build()
    optimizer = adam(model)
    with tight(model, optimizer):
        steps(model, optimizer)
        best = copy.deepcopy(optimizer)
        states = saved(optimizer.state_dict())
        expected = copy.deepcopy(best.state_dict())
        steps(model, optimizer)
    assert_equal(best.state_dict(), expected)
    assert_equal(states, expected)
    with tight(model, optimizer):
        optimizer.load_state_dict(copy.deepcopy(best.state_dict()))
        assert_equal(optimizer.state_dict(), expected)
        steps(model, optimizer)
    assert_equal(best.state_dict(), expected)


def norms(optimizer: Optimizer) -> list[float]:
    return [v.norm().item() for state in optimizer.state.values() for v in state.values()]


def by_get(optimizer: Optimizer) -> list[float]:
    return [
        state.get("exp_avg").sum().item()
        for state in optimizer.state.values()
        if "exp_avg" in state
    ]


def by_names(optimizer: Optimizer) -> list[Any]:
    return [
        (
            len(state),
            list(state),
            list(state.keys()),
            state.get("none", 1),
            bool(state),
            "step" in state,
        )
        for state in optimizer.state.values()
    ]


def as_dicts(optimizer: Optimizer) -> list[float]:
    found: list[float] = []
    for state in optimizer.state.values():
        for other in (
            {**state},
            dict(state),
            state.copy(),
            copy.copy(state),
            state | {},
            {} | state,
        ):
            found += [v.sum().item() for v in other.values()]
    return found


def halved(optimizer: Optimizer) -> list[float]:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
    return []


def replaced(optimizer: Optimizer) -> list[float]:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        state.update(more=1.0)
        state.setdefault("other", 2.0)
    return [state.pop("more") for state in optimizer.state.values()]


def all_at_once(optimizer: Optimizer) -> list[float]:
    """Held together, then changed; bytes without another reference are lost if their copy is used."""
    torch._foreach_zero_([state["exp_avg_sq"] for state in optimizer.state.values()])
    return []


def begun_anew(optimizer: Optimizer) -> list[float]:
    optimizer.state.clear()
    return []


def one_forgotten(optimizer: Optimizer) -> list[float]:
    optimizer.state.pop(next(iter(optimizer.state)))
    return []


def compared(optimizer: Optimizer) -> list[bool]:
    return [state == {"step": 1} for state in optimizer.state.values()]


HABITS = [
    norms,
    by_get,
    by_names,
    as_dicts,
    halved,
    replaced,
    all_at_once,
    begun_anew,
    one_forgotten,
    compared,
]


@pytest.mark.sampled
@pytest.mark.parametrize("habit", HABITS)
def test_reading_and_editing_states(
    habit: Callable[[Optimizer], list[Any]], tight: Callable[..., Swapping]
) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Any]:
        found: list[Any] = []
        for number in range(4):
            found += [steps(model, optimizer, 2, seed=number), habit(optimizer)]
        return found

    model, other = build(), build()
    optimizer, same = adam(model), adam(other)
    expected = loop(other, same)
    with tight(model, optimizer) as swapping:
        assert loop(model, optimizer) == expected
    assert swapping.states[0].bytes_out > 0
    assert_equal(optimizer.state_dict(), same.state_dict())
    assert_equal(model.state_dict(), other.state_dict())


def test_reading_with_a_full_store(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = adam(model)
    with tight(model, optimizer):
        steps(model, optimizer)
        loss = model(torch.ones(480, WIDTH)).sum()
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(
            BudgetExceeded,
            match=r"reading a state of AdamW needs .*raise limit, or read state_dict",
        ):
            norms(optimizer)
        assert_equal(optimizer.state_dict(), before)
        loss.backward()
        optimizer.step()


HOLDERS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "tensor": lambda state: state["exp_avg"],
    "view": lambda state: state["exp_avg"].view(-1),
    "array": lambda state: state["exp_avg"].numpy(),
    "state": lambda state: state,
}


@pytest.mark.sampled
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("inside", [False, True])
def test_a_held_state_sees_its_changes(
    hold: Any, inside: bool, tight: Callable[..., Swapping]
) -> None:
    """It stays where it is for as long; a change that is made there counts."""
    model, other = build(), build()
    optimizer, same = adam(model), adam(other)
    steps(model, optimizer), steps(other, same)
    weight, twin = model[3][0].weight, other[3][0].weight

    def tensor(held: Any) -> Tensor:
        return torch.as_tensor(held["exp_avg"] if isinstance(held, dict) else held).view(-1)

    kept = hold(optimizer.state[weight])
    with tight(model, optimizer) as swapping:
        if inside:
            kept = steps(model, optimizer) and None
            kept = hold(optimizer.state[weight])
        else:
            steps(model, optimizer)
        steps(other, same)
        assert torch.equal(tensor(kept), same.state[twin]["exp_avg"].view(-1))
        tensor(kept).mul_(0.5)
        same.state[twin]["exp_avg"].mul_(0.5)
        assert steps(model, optimizer) == steps(other, same)
        assert torch.equal(tensor(kept), same.state[twin]["exp_avg"].view(-1))
        kept = None
        before = offloaded_states(optimizer)
        assert steps(model, optimizer) == steps(other, same)
        assert offloaded_states(optimizer) >= before
    assert swapping.states[0].bytes_out > 0
    assert_equal(optimizer.state_dict(), same.state_dict())


def test_a_state_changed_while_it_leaves(tight: Callable[..., Swapping]) -> None:
    """By who lets go of it before the write has ended."""
    model, other = build(), build()
    optimizer, same = adam(model), adam(other)
    steps(model, optimizer), steps(other, same)
    with tight(model, optimizer) as swapping:
        states = swapping.states[0]
        for weight, twin in zip(model.parameters(), other.parameters()):
            held = optimizer.state[weight]["exp_avg"]
            states._offload(weight)
            held.mul_(0.5)
            del held
            same.state[twin]["exp_avg"].mul_(0.5)
        while states._writing:
            states._finish_oldest_write()
        assert_equal(optimizer.state_dict(), same.state_dict())
        assert steps(model, optimizer) == steps(other, same)

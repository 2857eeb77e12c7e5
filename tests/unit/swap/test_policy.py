"""What leaves first, what stays by preference, how early it comes back: on a store that obeys the test."""

from __future__ import annotations

import contextlib
import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import BudgetExceeded, ConfigError, SwapError
from parallax.model.saved import Selector
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.activations.policy import Policy
from parallax.swap.activations.records import Entry
from parallax.swap.config import SwapConfig
from tests.unit.swap_fakes import ManualStore, making

LAZY = Policy(eager=False)


def tensor(size: int, value: int = 1) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def value(storage: torch.UntypedStorage) -> int:
    (found,) = torch.empty(0, dtype=torch.uint8).set_(storage).unique().tolist()
    return int(found)


def manager_of(
    policy: Policy, limit: int = 1000, capacity: int = 2**40
) -> tuple[SwapManager, ManualStore]:
    store = ManualStore(capacity)
    return SwapManager(store, limit_bytes=limit, policy=policy), store


def add(manager: SwapManager, *sizes: int, micro: int = 0) -> list[Entry]:
    return [manager.save(tensor(size, i), micro)[0] for i, size in enumerate(sizes)]


def use(manager: SwapManager, entries: list[Entry]) -> None:
    """What a backward does: each is used, last first, and let go of."""
    while entries:
        manager.load(entries.pop())


# ----------------------------------------------------------------------------------------------------- lazy


def test_nothing_moves_where_all_fits() -> None:
    manager, store = manager_of(LAZY)
    use(manager, add(manager, 400, 300, 300))
    statistics = manager.take_statistics()
    assert store.transfers == []
    assert (statistics.bytes_out, statistics.bytes_in, statistics.bytes_cancelled) == (0, 0, 0)
    assert statistics.decisions == {"kept within the limit": (3, 1000)}
    assert manager.resident_bytes == 0


def test_the_oldest_of_all_micro_batches_leaves_first() -> None:
    manager, store = manager_of(LAZY)
    entries = [*add(manager, 301, 302, micro=1), *add(manager, 303, micro=0)]
    entries += add(manager, 304, micro=2)
    assert store.log == ["write 301"]
    entries += add(manager, 305, micro=2)
    assert store.log == ["write 301", "write 302"]
    assert [value(manager.load(entry)) for entry in entries] == [0, 1, 0, 0, 0]


def test_an_eighth_of_the_limit_leaves_ahead_of_need() -> None:
    """Otherwise each new record would wait for a whole write."""
    manager, store = manager_of(LAZY, limit=800)
    entries = add(manager, *[50] * 17)
    assert store.log == ["write 50"]
    assert len([t for t in store.transfers if not t.finished]) == 2
    store.finish(9)
    store.log.clear()
    entries += add(manager, 50, 50)
    assert store.log == [], "memory was freed before it was needed"
    del entries


def test_a_lead_is_a_wish_where_the_tier_is_full() -> None:
    manager, _ = manager_of(LAZY, limit=8000, capacity=4096)
    entries = add(manager, *[1000] * 9)
    assert manager.resident_bytes == 8000
    with pytest.raises(SwapError, match="manual tier is full"):
        manager.save(tensor(1000), 0)[0]
    use(manager, entries)
    assert manager.stored_bytes == 0


def test_kept_records_are_evicted_for_those_needed_sooner() -> None:
    manager, store = manager_of(LAZY)
    first = add(manager, 501, 502, 503, micro=0)
    later = add(manager, 400, micro=1)
    store.finish(9)
    manager.fetch(0)  # 501 and 502 are offloaded
    store.finish(9)
    assert "write 400" in store.log
    use(manager, first)
    use(manager, later)
    assert manager.take_statistics().high_water <= 1000


def outcome(policy: Policy, limit: int, seed: int) -> list[Any]:
    """What a manager does, call by call, in steps at random: some drop their graphs, some tensors share a storage."""
    draw, (manager, store) = random.Random(seed), manager_of(policy, limit)
    found: list[Any] = []
    alive: list[tuple[Entry, Tensor]] = []
    operation = 0

    def note() -> None:
        found.append((tuple(store.log), manager.resident_bytes, len(store.transfers)))
        store.log.clear()

    for _ in range(4):
        for micro in range(draw.randint(1, 3)):
            for _ in range(draw.randint(1, 14)):
                operation += draw.random() < 0.7
                again = alive and draw.random() < 0.2
                saved = draw.choice(alive)[1] if again else tensor(draw.randint(1, 200), 7)
                with contextlib.suppress(BudgetExceeded):
                    alive.append((manager.save(saved, micro, operation)[0], saved))
                note()
                store.finish(draw.choice([0, 0, 0, 1, 3]))
                if draw.random() < 0.1:
                    manager.settle()
                    operation += 1
                if draw.random() < 0.1 and alive:
                    alive.pop(draw.randrange(len(alive)))
            first = 0 if draw.random() < 0.8 else len(alive) // 2
            for entry in dict.fromkeys(entry for entry, _ in reversed(alive[first:])):
                with contextlib.suppress(BudgetExceeded):
                    assert value(manager.load(entry)) == 7
                note()
            del entry, alive[first if draw.random() < 0.8 else len(alive) :]
        if draw.random() < 0.7:
            alive.clear()
            store.finish(99)
        statistics = manager.take_statistics()
        kept = [v for reason, v in statistics.decisions.items() if reason.startswith("kept")]
        found += [sum(size for _, size in kept), statistics.decisions.get("moved")]
        found += [statistics.high_water, statistics.bytes_out, statistics.bytes_in]
    del saved, alive[:]
    assert (manager.resident_bytes, manager.stored_bytes) == (0, 0)
    return found


@pytest.mark.parametrize("limit", [300, 800, 2000])
def test_late_accounting_equals_immediate_accounting(limit: int) -> None:
    """A number of tensors that is never reached prefers nothing, but disables the fast path from the beginning."""
    from_the_beginning = Policy(eager=False, n_tensors=2**40)
    for seed in range(40):
        assert outcome(LAZY, limit, seed) == outcome(from_the_beginning, limit, seed), seed


def test_what_fits_takes_few_calls() -> None:
    """Of Python, with nothing but the manager between autograd and the tensors; they were 40."""
    manager, _ = manager_of(LAZY)
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    saved = [tensor(1) for _ in range(100)]
    sys.setprofile(count)
    try:
        use(manager, [manager.save(each, 0, i)[0] for i, each in enumerate(saved)])
        assert manager.resident_bytes == 0
    finally:
        sys.setprofile(None)
    assert calls / len(saved) < 25


@pytest.mark.parametrize("policy", [LAZY, Policy(n_tensors=1), Policy(eager=False, n_tensors=1)])
def test_the_limit_is_the_rule(policy: Policy) -> None:
    manager, _ = manager_of(policy)
    entries = add(manager, *[130 + i for i in range(30)])
    statistics = manager.take_statistics()
    assert 800 < statistics.high_water <= 1000
    with pytest.raises(BudgetExceeded):
        manager.save(tensor(1001), 0)[0]
    for i in reversed(range(30)):
        assert value(manager.load(entries.pop())) == i


# --------------------------------------------------------------------------------------------------- stays


def test_only_the_first_tensors_are_offloaded() -> None:
    manager, store = manager_of(Policy(n_tensors=2))
    for micro in range(3):
        entries = add(manager, 101, 102, 103, 104, micro=micro)
        store.finish(9)
        assert store.log == ["write 101", "write 102"]
        assert manager.resident_bytes == 207
        use(manager, entries)
        store.log.clear()
    assert manager.take_statistics().decisions == {"moved": (6, 609), "kept by policy": (6, 621)}


def test_what_stays_by_preference_leaves_before_the_budget_is_exceeded() -> None:
    manager, store = manager_of(Policy(n_tensors=0))
    entries = add(manager, 400, 500, 300)
    assert store.log == ["write 400"]
    use(manager, entries)
    assert manager.take_statistics().decisions == {"moved": (1, 400), "kept by policy": (2, 800)}


def test_lazy_lets_the_preferred_leave_last() -> None:
    manager, store = manager_of(Policy(eager=False, n_tensors=2))
    entries = [*add(manager, 300, 10, 320, micro=0), *add(manager, 330, micro=1)]
    entries += add(manager, 350, micro=1)
    assert store.log[0] == "write 300"
    assert "write 320" not in store.log
    del entries


@pytest.mark.parametrize("eager", [True, False])
def test_what_is_used_again_soon_stays_once_that_is_known(eager: bool) -> None:
    """The last two saved are used before two others are saved."""
    manager, store = manager_of(Policy(eager=eager, swapout_threshold=2))
    entries = add(manager, 101, 102, 103, 104)
    store.finish(9)
    assert store.log == [f"write {size}" for size in (101, 102, 103, 104) if eager]
    use(manager, entries)
    store.log.clear()
    manager.take_statistics()
    entries = add(manager, 101, 102, 103, 104)
    store.finish(9)
    assert store.log == [f"write {size}" for size in (101, 102) if eager]
    use(manager, entries)
    assert manager.take_statistics().decisions["kept by policy"] == (2, 207)


def test_another_size_is_another_tensor() -> None:
    manager, store = manager_of(Policy(swapout_threshold=9))
    use(manager, add(manager, 101, 102))
    entries = add(manager, 101, 112, 103)
    store.finish(9)
    assert store.log == ["write 112", "write 103"]
    use(manager, entries)


def test_micro_batches_in_between_count() -> None:
    """The same place in a micro-batch is used late where others run forward before its backward."""
    manager, store = manager_of(Policy(swapout_threshold=2))
    pairs = [add(manager, 101, 102, micro=micro) for micro in range(2)]
    use(manager, pairs[0])  # three, and two, were saved before their uses
    entries = add(manager, 101, 102, micro=2)
    store.finish(9)
    assert store.log.count("write 102") >= 2
    use(manager, entries)
    use(manager, pairs[1])


def test_a_step_that_never_saw_its_backward_teaches_nothing() -> None:
    manager, store = manager_of(Policy(swapout_threshold=9))
    use(manager, add(manager, 101, 102))
    add(manager, 77, 78, 79)  # dropped
    entries = add(manager, 101, 102)
    store.finish(9)
    assert store.log == []
    use(manager, entries)


# --------------------------------------------------------------------------------------------- comes back


def test_the_first_use_brings_back_the_rest_in_the_order_of_need() -> None:
    """A training loop that never says what is next."""
    manager, store = manager_of(Policy())
    for _ in range(3):
        entries = add(manager, 101, 102, 103, 104)
        store.finish(9)
        store.log.clear()
        manager.load(entries.pop())
        store.finish(9)
        assert store.log == ["read 104", "read 103", "read 102", "read 101"]
        use(manager, entries)


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_so_many_ahead_of_need(ahead: int, reported: bool) -> None:
    manager, store = manager_of(Policy(swapin_ahead=ahead))
    entries = add(manager, *range(101, 108))
    store.finish(9)
    store.log.clear()
    if reported:
        manager.fetch(0)
        store.finish(9)
        assert len(store.log) == ahead
    for used in range(7):
        assert value(manager.load(entries.pop())) == 6 - used
        store.finish(9)
        assert store.log == [f"read {107 - i}" for i in range(min(7, used + 1 + ahead))]


def test_a_group_comes_back_together() -> None:
    manager, store = manager_of(Policy(swapin_ahead=1, swapin_groupby=3))
    entries = add(manager, *range(101, 108))
    store.finish(9)
    store.log.clear()
    arrived = []
    while entries:
        manager.load(entries.pop())
        store.finish(9)
        arrived.append(len(store.log))
    assert arrived == [3, 3, 6, 6, 6, 7, 7]


def test_a_group_waits_until_it_fits_unless_nothing_is_on_its_way() -> None:
    manager, store = manager_of(Policy(swapin_groupby=2), limit=350)
    entries = add(manager, 100, 100, 100, 100)
    store.finish(9)
    store.log.clear()
    manager.fetch(0)
    store.finish(9)
    assert len(store.log) == 2, "a third fits, but not the fourth"
    manager.load(entries.pop())
    manager.load(entries.pop())
    store.finish(9)
    manager.fetch(0)
    assert manager.take_statistics().high_water <= 350
    manager, store = manager_of(Policy(swapin_groupby=4), limit=350)
    kept = add(manager, 100, 100, 100, 100)
    store.finish(9)
    store.log.clear()
    manager.fetch(0)
    store.finish(9)
    assert store.log == ["read 100"], "a group larger than the limit comes one by one"
    use(manager, kept)


def test_an_abandoned_micro_batch_holds_up_no_other() -> None:
    manager, store = manager_of(Policy(swapin_ahead=1))
    abandoned, entries = add(manager, 101, 102, 103, micro=0), add(manager, 201, 202, micro=1)
    store.finish(9)
    manager.fetch(0)
    manager.fetch(1)
    store.finish(9)
    assert store.log[-2:] == ["read 103", "read 202"]
    use(manager, entries)
    use(manager, abandoned)


# ------------------------------------------------------------------------------------------ whole and keys

POLICIES = [
    Policy(eager=False),
    Policy(n_tensors=3),
    Policy(swapout_threshold=4),
    Policy(swapin_ahead=2, swapin_groupby=3),
    Policy(eager=False, n_tensors=5, swapout_threshold=2, swapin_ahead=0),
]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["disk", "late host"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_do_not_depend_on_the_policy(policy: Policy, kind: str, scratch: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(40, 40), nn.Tanh())])
    inputs = torch.randn(3, 50, 40)
    held = Selector([*model.parameters()], minimum_bytes=1)

    def gradients(manager: SwapManager | None) -> list[Tensor]:
        model.zero_grad()
        for rows in inputs:  # a loop of one's own: no micro-batch has a name
            if manager is None:
                loss = model(rows).square().mean()
            else:
                with offloading(manager, held, 0):
                    loss = model(rows).square().mean()
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients(None)
    with making(kind, scratch) as build:
        for limit in (30_000, 60_000, 2**20):
            manager = build(limit, policy=policy)
            for _ in range(3):
                assert all(torch.equal(a, b) for a, b in zip(plain, gradients(manager)))
            found = manager.take_statistics()
            assert found.high_water <= limit
            assert limit == 2**20 or found.bytes_out > 0
            assert policy.eager or limit < 2**20 or found.bytes_out == 0


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("n_tensors", -1, "numbers from 0"),
        ("swapout_threshold", -1, "numbers from 0"),
        ("swapin_ahead", -2, "numbers from 0"),
        ("swapin_groupby", 0, "numbers above 0"),
    ],
)
def test_a_wrong_preference_is_named(key: str, value: Any, accepted: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}={value}: accepted are {accepted}"):
        Policy(**{key: value})


@pytest.mark.parametrize("value", ["many", True])
def test_a_wrong_size_is_named(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^swap\.minimum_bytes={value}: accepted are auto or"):
        SwapConfig(minimum_bytes=value)


def test_what_is_too_small_depends_on_who_copies() -> None:
    """With each tensor goes Python that takes longer than an accelerator's copy of some hundred KiB."""
    assert SwapConfig().smallest_bytes("cpu") == 2**16
    assert SwapConfig().smallest_bytes("cuda") == SwapConfig().smallest_bytes("xpu") == 2**20
    assert SwapConfig(minimum_bytes=5).smallest_bytes("cuda") == 5

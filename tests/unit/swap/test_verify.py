"""swap.verify finds each wait that is missing, and nothing where none is."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import SwapError
from parallax.machine.device import CpuCopies, DoneEvent, Event, StagingRing, no_delay
from parallax.model.saved import Selector
from parallax.swap.activations.accounting import MemoryAccounting
from parallax.swap.activations.evictor import Evictor
from parallax.swap.activations.hooks import offloading
from parallax.swap.activations.manager import SwapManager
from parallax.swap.activations.policy import Policy
from parallax.swap.activations.records import Entry, Record
from parallax.swap.activations.transfers import Transfers
from parallax.swap.config import SwapConfig
from parallax.swap.stores.store import DiskStore, Pending
from parallax.swap.verify import Delays, checksum
from tests.unit.swap_fakes import KINDS, MIB, LateCopies, LateEvent, settle, storing

# ---------------------------------------------------------------------------------------------------- sums

TENSORS: dict[str, Callable[[], Tensor]] = {
    "float": lambda: torch.randn(33, 7),
    "half": lambda: torch.randn(33, 7).half(),
    "bfloat16": lambda: torch.randn(5).bfloat16(),
    "double": lambda: torch.randn(4, dtype=torch.double),
    "bool": lambda: torch.rand(100) > 0.5,
    "complex": lambda: torch.randn(9, dtype=torch.cfloat),
    "conjugate": lambda: torch.randn(9, dtype=torch.cfloat).conj(),
    "bytes at an odd place": lambda: torch.randint(0, 256, (100,), dtype=torch.uint8)[3:],
    "transposed": lambda: torch.randn(6, 8).t(),
    "expanded": lambda: torch.randn(1, 8).expand(5, 8),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0),
    "parameter": lambda: nn.Parameter(torch.randn(10)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_sum_is_of_the_values_and_tells_of_one_bit(name: str) -> None:
    tensor = TENSORS[name]()
    copy = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj()
    assert checksum(tensor) == checksum(copy)
    data = copy.reshape(-1).view(torch.uint8)
    for at in {0, data.numel() // 2, data.numel() - 1} if data.numel() else ():
        data[at] ^= 64
        assert checksum(copy) != checksum(tensor)
        data[at] ^= 64


def test_delays_are_those_of_the_seed() -> None:
    first, second = Delays(7), Delays(7)
    drawn = [first() for _ in range(100)]
    assert drawn == [second() for _ in range(100)]
    assert 0 <= min(drawn) < max(drawn) <= 0.003


@pytest.mark.parametrize("verify", [False, True])
def test_the_key_holds_transfers_up(verify: bool, scratch: Path) -> None:
    config = SwapConfig(verify=verify)
    assert isinstance(config.delay(), Delays) == verify
    assert verify or config.delay() is no_delay
    store = config.open_store("disk", MIB, CpuCopies(), scratch)
    start = time.perf_counter()
    pending = [store.write(torch.zeros(10, dtype=torch.uint8))[1] for _ in range(40)]
    for transfer in pending:
        transfer.wait()
    elapsed = time.perf_counter() - start
    assert not verify or elapsed > 0.01, "two threads, 1.5 ms each time"
    store.close()


# --------------------------------------------------------------------------------------------------- waits


PAGE = 4096
LIMIT = 4 * PAGE


def churn(manager: SwapManager, seed: int) -> None:
    """What saves, graphs that die early and backwards do to a manager; raises where bytes come back changed."""
    generator = random.Random(seed)
    bytes_of = torch.Generator().manual_seed(seed)

    def add(pages: int) -> Entry:
        data = torch.randint(0, 256, (pages * PAGE,), dtype=torch.uint8, generator=bytes_of)
        return manager.save(data, 0)[0]

    # One dies while it is written, the next takes its slot in the tier, a third drives it out.
    for _ in range(4):
        add(3)
        second, third = add(3), add(3)
        manager.load(second)
        del second, third
    held: list[Entry] = []
    for _ in range(30):
        draw = generator.random()
        if draw < 0.6 or not held:
            held.append(add(generator.randint(1, 3)))
        elif draw < 0.8:
            del held[generator.randrange(len(held))]
        else:
            manager.load(held[generator.randrange(len(held))])
    while held:
        manager.load(held.pop())


def no_arrival(self: Transfers, record: Record) -> None:
    record.transfer = None


def no_end_of_write(self: SwapManager) -> None:
    """Written as soon as it began."""
    for record in [r for r in self._evictor.writing if r.transfer is not None]:
        record.transfer.done = lambda: True  # type: ignore[method-assign]
    REAP(self)


def no_end_of_the_dead(self: Transfers, record: Record) -> bool:
    return True


def no_wait_for_the_dead(self: Transfers, record: Record, micro: int) -> None:
    record.transfer = None


def no_wait_before_the_file(self: StagingRing, data: Tensor, ready: Event) -> Iterator[Tensor]:
    buffer = self._free.get()
    for piece in data.split(self._piece):
        self._copies.copy(piece, buffer[: piece.numel()], DoneEvent())
        yield buffer[: piece.numel()]
    self._free.put(buffer)


def no_wait_before_the_next_piece(
    self: StagingRing, target: Tensor, ready: Event
) -> Iterator[Tensor]:
    buffer = self._free.get()
    for piece in target.split(self._piece):
        yield buffer[: piece.numel()]
        self._copies.copy(buffer[: piece.numel()], piece, DoneEvent())
    self._free.put(buffer)


def no_stall(self: MemoryAccounting, transfer: Pending, micro: int) -> None:
    return


REAP = SwapManager._collect_ended
WAITS: list[tuple[str, str, type, str, Any]] = [
    ("the arrival of a read", "disk", Transfers, "wait_for_read", no_arrival),
    ("the arrival of a read", "late disk", Transfers, "wait_for_read", no_arrival),
    ("the arrival of a read", "late host", Transfers, "wait_for_read", no_arrival),
    ("a copy up, before it is used", "late host", LateEvent, "wait_stream", lambda self: None),
    (
        "the end of a write, before its bytes go",
        "disk",
        SwapManager,
        "_collect_ended",
        no_end_of_write,
    ),
    (
        "the end of a write, before its bytes go",
        "late disk",
        SwapManager,
        "_collect_ended",
        no_end_of_write,
    ),
    (
        "the end of a write, before its bytes go",
        "late host",
        SwapManager,
        "_collect_ended",
        no_end_of_write,
    ),
    (
        "the end of a dead write, before its place is reused",
        "disk",
        Transfers,
        "is_finished",
        no_end_of_the_dead,
    ),
    (
        "the end of a dead write, before its place is reused",
        "late disk",
        Transfers,
        "is_finished",
        no_end_of_the_dead,
    ),
    (
        "the end of a dead write, before its place is reused",
        "late host",
        Transfers,
        "is_finished",
        no_end_of_the_dead,
    ),
    (
        "a dead write, when memory is needed",
        "disk",
        Transfers,
        "wait_ignoring_errors",
        no_wait_for_the_dead,
    ),
    (
        "a dead write, when memory is needed",
        "late host",
        Transfers,
        "wait_ignoring_errors",
        no_wait_for_the_dead,
    ),
    (
        "a copy down, before the file is written",
        "late disk",
        StagingRing,
        "to_host",
        no_wait_before_the_file,
    ),
    (
        "a copy up, before the buffer is filled again",
        "late disk",
        StagingRing,
        "to_device",
        no_wait_before_the_next_piece,
    ),
    ("every wait of the training thread", "disk", MemoryAccounting, "wait_for", no_stall),
]


def runs(kind: str, folder: Path, seeds: range) -> tuple[str, int]:
    """The first complaint of ``seeds``, and how many writes went into blocks that were let go of."""
    strays = 0
    for seed in seeds:
        with storing(kind, folder, delay=Delays(seed)) as (store, copies):
            manager = SwapManager(store, limit_bytes=LIMIT, verify=True)
            try:
                churn(manager, seed)
            except SwapError as error:
                return str(error), strays
            finally:
                manager.close()
        strays += copies.strays if isinstance(copies, LateCopies) else 0
    return "", strays


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found_where_no_wait_is_missing(kind: str, scratch: Path) -> None:
    assert runs(kind, scratch, range(8)) == ("", 0)


@pytest.mark.parametrize(
    ("name", "kind", "owner", "method", "without"),
    WAITS,
    ids=[f"{name}-{kind}" for name, kind, *_ in WAITS],
)
def test_a_missing_wait_is_found(
    name: str,
    kind: str,
    owner: type,
    method: str,
    without: Any,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, method, without)
    complaint, _ = runs(kind, scratch, range(200))
    # The file tells of some first: what is read before it was written is not there, or was never summed.
    assert re.search("came back changed|are not what was written|ends .* too early", complaint), (
        name,
        complaint,
    )


def test_a_read_into_a_block_that_was_given_up_is_a_stray(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sum can tell: the bytes belong to someone else. The copies of these tests can."""
    monkeypatch.setattr(Evictor, "drop_upcoming", give_up_without_waiting)
    found = 0
    for seed in range(30):
        with storing("late host", scratch, delay=Delays(seed)) as (store, copies):
            manager = SwapManager(store, limit_bytes=40_000, verify=True)
            entries = [
                manager.save(torch.full((8192,), i, dtype=torch.uint8), 0)[0] for i in range(6)
            ]
            settle(manager)
            manager.fetch(0)
            manager.save(torch.zeros(30_000, dtype=torch.uint8), 1)[0]
            del entries
            manager.close()
            assert isinstance(copies, LateCopies)
        found += copies.strays
    assert found


def give_up_without_waiting(self: Evictor) -> bool:
    if not self._queues.upcoming:
        return False
    record, _ = self._queues.upcoming.popitem()
    record.transfer = None
    self.free_copy(record)
    return True


def test_the_complaint_names_bytes_micro_batch_shape_and_remedy(scratch: Path) -> None:
    with storing("host", scratch) as (store, _):
        manager = SwapManager(store, limit_bytes=MIB, verify=True)
        entry = manager.save(torch.ones(30, 100), 3)[0]
        settle(manager)
        store._slabs[0].data[:12000:5] += 1  # type: ignore[attr-defined]
        for _ in range(2):
            with pytest.raises(
                SwapError,
                match=r"swap.verify: 11\.7 KiB that micro-batch 3 saved with a tensor of shape \[30, 100\] came back "
                r"changed \(sum \w+, saved \w+\): test this machine's memory and disk; .*swap=off",
            ):
                manager.load(entry)
        del entry
        manager.close()


# ---------------------------------------------------------------------------------------------- many seeds


class Chain(nn.Module):
    """Saves tensors of several sizes, among them one storage twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * x.sigmoid()
        return x.square().mean()


def step(model: Chain, rows: Tensor, manager: SwapManager | None, seed: int) -> list[Tensor]:
    """Gradients of two micro-batches, forward and backward in an order that the seed chooses."""
    generator = random.Random(seed)
    selector = Selector([*model.parameters()], minimum_bytes=1)
    roots: dict[int, Tensor] = {}
    model.zero_grad()
    waiting = [0, 1]
    while waiting or roots:
        if waiting and (not roots or generator.random() < 0.6):
            micro = waiting.pop(0)
            if manager is None:
                roots[micro] = model(rows[micro])
            else:
                with offloading(manager, selector, micro):
                    roots[micro] = model(rows[micro])
            continue
        micro = generator.choice(sorted(roots))
        reported, again = generator.random() < 0.5, generator.random() < 0.2
        if reported and manager is not None:
            manager.fetch(micro)
        roots[micro].backward(retain_graph=again)
        if again:
            roots[micro].backward()
        del roots[micro]
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups", [range(5), pytest.param(range(5, 20), marks=pytest.mark.thorough)], ids=str
)
def test_a_thousand_seeds(scratch: Path, groups: range) -> None:
    """Transfers late by up to 0.3 ms, at any limit, in any order, under any policy."""
    torch.manual_seed(0)
    model, rows = Chain(), torch.randn(2, 32, 16)
    moved = 0
    for group in groups:
        store = DiskStore(scratch, MIB, CpuCopies(), threads=2, delay=Delays(group, 0.0003))
        try:
            for seed in range(50 * group, 50 * group + 50):
                generator = random.Random(seed)
                policy = Policy(
                    eager=generator.random() < 0.5,
                    n_tensors=generator.choice([None, None, 0, 3, 7]),
                    swapout_threshold=generator.choice([0, 0, 1, 4]),
                    swapin_ahead=generator.choice([None, None, 0, 1, 3]),
                    swapin_groupby=generator.choice([1, 1, 2, 5]),
                )
                limit = generator.choice([9_000, 12_000, 15_000])
                manager = SwapManager(store, limit_bytes=limit, policy=policy, verify=True)
                plain = [gradient.clone() for gradient in step(model, rows, None, seed)]
                found = step(model, rows, manager, seed)
                assert all(torch.equal(a, b) for a, b in zip(plain, found)), (
                    f"seed {seed}: {policy}"
                )
                while manager.resident_bytes or manager.stored_bytes:
                    time.sleep(0.0001)
                statistics = manager.take_statistics()
                assert statistics.high_water <= limit
                moved += statistics.bytes_in
        finally:
            store.close()
    assert moved > len(groups) * MIB / 4

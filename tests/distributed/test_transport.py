"""Channels carry whatever a block returns, however it changes from one message to the next, and end with their peer."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.errors import TransportError
from parallax.machine.device import CpuCopies
from parallax.mesh import Mesh, Route
from parallax.model.describe import describe
from parallax.plan.edge import Edge
from parallax.plan.plan import Plan
from parallax.runtime.channels.group_channel import (
    Address,
    GroupSender,
)
from parallax.runtime.channels.shared_channel import SharedSender
from parallax.runtime.channels.staging import NoStaging, PinnedStaging
from parallax.runtime.channels.transport import Channels, Receiver, Sender
from tests.distributed.pool import Pool
from tests.plans import make_plan

Spec = tuple[torch.dtype, tuple[int, ...]]
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I64, I32, I8, U8, BOOL = torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool
COMPLEX = torch.complex64, torch.complex128
KINDS = ("shared", "group", "staged")
EDGE = Edge(0, 1, 0)
FORTH, BACK = Route(0, 1, EDGE, backward=False), Route(1, 0, EDGE, backward=True)


def make(specs: Sequence[Spec], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 100, shape, generator=generator).to(dtype) for dtype, shape in specs]


def same(found: Sequence[Tensor], due: Sequence[Tensor]) -> bool:
    return len(found) == len(due) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, due)
    )


@functools.cache
def two_stages() -> Plan:
    return make_plan(
        describe(lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))), replicas=(1, 1)
    )


def make_mesh() -> Mesh:
    return Mesh.create(two_stages(), torch.device("cpu"), {})


@contextmanager
def open_channels(kind: str) -> Iterator[Channels]:
    """``group``: as on a system without files in memory; ``staged``: as between devices that need the host's memory,
    with the null objects of a CPU."""
    create = os.memfd_create
    try:
        if kind != "shared":
            del os.memfd_create
        channels = Channels(make_mesh(), CpuCopies())
    finally:
        os.memfd_create = create
    if kind == "staged":
        channels._staging = PinnedStaging(torch.device("cpu"), CpuCopies())
    try:
        yield channels
    finally:
        dist.barrier()
        channels.close()


def ends(channels: Channels, ahead: int) -> tuple[Sender, Receiver]:
    """Of this rank; the receiver first, on both."""
    mine, other = (FORTH, BACK) if dist.get_rank() == 0 else (BACK, FORTH)
    receiver = channels.receiver(other)
    return channels.sender(mine, ahead), receiver


def exchange(kind: str, messages: list[list[Spec]], posted: bool, ahead: int, both: bool) -> bool:
    """Rank 0 sends all messages to rank 1, which keeps and compares them; the other way as well where ``both``."""
    rank, kept = dist.get_rank(), []
    with open_channels(kind) as channels:
        sender, receiver = ends(channels, ahead)
        assert isinstance(sender, SharedSender) == (kind == "shared")
        for number, specs in enumerate(messages):
            rows = specs[0][1][0] if specs and specs[0][1] else 1
            if posted and (rank == 1 or both):
                receiver.post(rows)
            if rank == 0 or both:
                sender.send(make(specs, number), rows)
            if rank == 1 or both:
                kept.append(receiver.receive(rows))
        channels.drain()
        sender.flush()
    return all(
        same(found, make(specs, number))
        for number, (found, specs) in enumerate(zip(kept, messages))
    )


def exchanges(
    kind: str, messages: list[list[Spec]], variants: list[tuple[bool, int, bool]]
) -> list[bool]:
    """One after the other, in one world: making one takes longer than most exchanges."""
    return [exchange(kind, messages, *variant) for variant in variants]


SEQUENCES: dict[str, list[list[Spec]]] = {
    "rows": [[(F32, (rows, 5))] for rows in (4, 4, 3, 1, 7, 4, 2, 9)],
    "other dimensions": [[(F32, (4, n))] for n in (5, 5, 1, 300, 2, 300, 0, 5)],
    "number of dimensions": [
        [(F32, (4, *rest))] for rest in ((), (2,), (2, 3), (2, 3, 1, 2), (3,), ())
    ],
    "type": [
        [(dtype, (4, 5))]
        for dtype in (F32, F64, BF16, F16, I64, I32, torch.int16, I8, U8, BOOL, *COMPLEX, F32)
    ],
    "number of tensors": [[(F32, (3, 2))] * n for n in (1, 2, 5, 1, 9, 3)],
    "many tensors": [[(F32, (3, 2))] * n for n in (1, 40, 200, 40, 3)],
    "several types": [
        [(F32, (rows, 3)), (I64, (rows,)), (BOOL, (rows, 7)), (U8, (rows, 1)), (BF16, (rows, 2, 3))]
        for rows in (2, 2, 5, 1, 3)
    ],
    "without size": [
        [(F32, (rows, 0)), (BOOL, (rows, width))]
        for rows, width in ((2, 0), (2, 3), (3, 0), (1, 1))
    ],
    "scalar beside rows": [[(F32, (rows, 2)), (F64, ())] for rows in (2, 3, 1)],
    "unbatched beside rows": [
        [(F32, (rows, 2)), (F32, (7, 3)), (F32, (2,))] for rows in (2, 3, 1, 7, 2)
    ],
    "nothing": [[], [(F32, (2, 2))], [], [], [(F32, ())], []],
    "larger than thought": [
        [(F32, (2, 10))],
        [(F32, (2, 100000))],
        [(F32, (2, 10))],
        [(F64, (5, 70000))],
    ],
    "more layouts than are kept": [[(F32, (2, n))] for n in (*range(1, 80), *range(1, 80))],
    "more messages than slots": [[(F32, (2, 20000))]] * 50,
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.thorough] if i % 2 == j else [])
        for i, name in enumerate(SEQUENCES)
        for j, kind in enumerate(("group", "staged", "shared"))
    ],  # all in shared memory, and in turn with one of the other transports
)
def test_messages_that_change(pool: Pool, name: str, kind: str) -> None:
    variants = [
        (posted, ahead, False) for posted, ahead in itertools.product((True, False), (1, 3))
    ] + [(True, 2, True)]
    for found in pool.run(exchanges, 2, kind, SEQUENCES[name], variants):
        assert all(found), [variant for variant, good in zip(variants, found) if not good]


def test_a_large_message(pool: Pool) -> None:
    large = [[(F32, (5, 1_000_000))], [(F32, (2, 3))], [(F32, (5, 1_000_001))]]
    assert all(pool.run(exchange, 2, "shared", large, True, 2, False))


def first_message(kind: str, tensors: list[Tensor]) -> list[Tensor]:
    """What arrives of ``tensors``."""
    with open_channels(kind) as channels:
        sender, receiver = ends(channels, 2)
        if dist.get_rank() == 0:
            sender.send(tensors, len(tensors[0]))
            channels.drain()
            sender.flush()
            return []
        return list(receiver.receive(len(tensors[0])))


@pytest.mark.parametrize("kind", KINDS)
def test_views_and_gradients(pool: Pool, kind: str) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    for first, second in [
        (base.t(), base.t()[:, 1:]),
        (base[1:3], base[:1].expand(2, 6)),
        (base[:, ::2], base.flip(1)),
        (nn.Parameter(base), base),
    ]:
        _, (a, b) = pool.run(first_message, 2, kind, [first, second])
        assert torch.equal(a, first)
        assert torch.equal(b, second)
        assert not a.requires_grad
        a.add_(1)  # each has memory of its own to change
        assert torch.equal(b, second)


def in_place(kind: str) -> bool:
    """A received tensor counts its own changes: autograd's check must not see those of its neighbour."""
    with open_channels(kind) as channels:
        sender, receiver = ends(channels, 1)
        if dist.get_rank() == 0:
            sender.send([torch.ones(3, 2), torch.ones(3, 2)], 3)
            channels.drain()
            sender.flush()
            return True
        a, b = receiver.receive(3)
        weight = torch.ones(2, requires_grad=True)
        product = (a * weight).sum()
        b.zero_()
        product.backward()
        return weight.grad is not None and torch.equal(weight.grad, torch.full((2,), 3.0))


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_changes_of_a_neighbour(pool: Pool, kind: str) -> None:
    assert all(pool.run(in_place, 2, kind))


def test_what_cannot_be_sent() -> None:
    sender = GroupSender(Address(None, 1, 0), NoStaging(), 1)
    with pytest.raises(TransportError, match="float8_e4m3fn"):
        sender.send([torch.ones(2, dtype=torch.float8_e4m3fn)], 2)


def waits(ahead: int, seconds: float) -> bool:
    """Return whether the message after ``ahead`` unreceived ones is still being sent some seconds later."""
    with open_channels("shared") as channels:
        sender, receiver = ends(channels, ahead)
        message = [torch.ones(2, 20000)]
        if dist.get_rank() == 0:
            for _ in range(ahead):
                sender.send(message, 2)
            dist.barrier()  # none was received
            one_more = threading.Thread(target=sender.send, args=(message, 2))
            one_more.start()
            one_more.join(seconds)
            found = one_more.is_alive()
            dist.barrier()
            one_more.join()
            return found
        dist.barrier()
        dist.barrier()
        for _ in range(ahead + 1):
            receiver.receive(2)
        return True


@pytest.mark.parametrize("ahead", [1, 4])
def test_a_send_waits_only_for_a_peer_that_is_far_behind(pool: Pool, ahead: int) -> None:
    assert pool.run(waits, 2, ahead, 0.3) == [True, True]


def shared_bytes() -> int:
    """Shared memory that this process has touched and still maps."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem"))


def touched(count: int, messages: int) -> int:
    """Bytes of the ring that messages of ``count`` bytes have touched, each answered before the next."""
    before = shared_bytes()
    with open_channels("shared") as channels:
        sender, receiver = ends(channels, 8)
        for _ in range(messages):
            if dist.get_rank() == 0:
                sender.send([torch.ones(count // 4)], 1)
                receiver.receive(1)
            else:
                receiver.receive(1)
                sender.send([torch.ones(count // 4)], 1)
        found = shared_bytes() - before
    del sender, receiver, channels
    gc.collect()
    assert shared_bytes() - before < 2**20  # and all is given back
    return found


def test_a_ring_takes_the_memory_of_what_is_under_way(pool: Pool) -> None:
    for found in pool.run(touched, 2, 8 * 2**20, 30):
        assert found <= 2 * 2 * 8 * 2**20  # two slots at most, in each direction


def leftover_warning(closed: bool) -> tuple[int, int, int]:
    """Descriptors, threads and mapped rings that many channels have left behind."""

    def count() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            maps.count("parallax-ring"),
        )

    rank, where = dist.get_rank(), make_mesh()
    before = count()
    for number in range(30):
        channels = Channels(where, CpuCopies())
        sender, receiver = ends(channels, 2)
        if number % 3:  # some are never used
            for rows in (1, 3000):
                sender.send([torch.full((rows, 3), float(rank))], rows)
                receiver.receive(rows)
        dist.barrier()
        if closed:
            channels.close()
            channels.close()
        del channels, sender, receiver
    after = count()
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_is_left_over(pool: Pool, closed: bool) -> None:
    for found in pool.run(leftover_warning, 2, closed):
        assert max(found) <= 0  # what earlier jobs had left may have gone meanwhile


def given_up() -> str:
    """Return rank 1's error when rank 0 has closed its channels while rank 1 waits for a message."""
    channels = Channels(make_mesh(), CpuCopies())
    sender, receiver = ends(channels, 1)
    try:
        if dist.get_rank() == 0:
            sender.send([torch.ones(1)], 1)
            time.sleep(0.2)
        else:
            receiver.receive(1)
            receiver.receive(1)
    except TransportError as error:
        return str(error)
    finally:
        channels.close()
    return ""


def test_a_peer_that_gives_up_says_so(pool: Pool) -> None:
    assert pool.run(given_up, 2) == ["", "rank 0 has ended or given up: its own messages say why"]

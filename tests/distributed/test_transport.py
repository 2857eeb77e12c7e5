"""Channels carry whatever a block returns, however it changes from one message to the next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallax.errors import TransportError
from parallax.runtime.transport import Address, DirectStaging, Receiver, Sender
from tests.distributed.pool import Pool

Spec = tuple[torch.dtype, tuple[int, ...]]
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I64, I32, I8, U8, BOOL = torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool


def make(specs: Sequence[Spec], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 100, shape, generator=generator).to(dtype) for dtype, shape in specs]


def wait_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def channel(messages: list[list[Spec]], posted: bool, ahead: int, backwards: bool) -> bool:
    """Rank 0 sends all messages to rank 1, which compares them; the other way as well where ``backwards``."""
    rank, group = dist.get_rank(), wait_group()
    sender = Sender(Address(group, 1 - rank, 10 + rank), DirectStaging(torch.device("cpu")), ahead)
    receiver = Receiver(Address(group, 1 - rank, 11 - rank), DirectStaging(torch.device("cpu")))
    good = True
    for number, specs in enumerate(messages):
        rows = specs[0][1][0]
        sends, receives = rank == 0 or backwards, rank == 1 or backwards
        if receives and posted:
            receiver.post(rows)
        if sends:
            sender.send(make(specs, number), rows)
        if receives:
            found, due = receiver.receive(rows), make(specs, number)
            good &= len(found) == len(due)
            good &= all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, due))
    sender.flush()
    return good


SEQUENCES: dict[str, list[list[Spec]]] = {
    "rows": [[(F32, (rows, 5))] for rows in (4, 4, 3, 1, 7, 4, 2, 9)],
    "other dimensions": [[(F32, (4, n))] for n in (5, 5, 1, 300, 2, 300, 0, 5)],
    "number of dimensions": [[(F32, (4, *rest))] for rest in ((), (2,), (2, 3), (2, 3, 1, 2), (3,), ())],
    "type": [[(dtype, (4, 5))] for dtype in (F32, F64, BF16, F16, I64, I32, torch.int16, I8, U8, BOOL, F32)],
    "number of tensors": [[(F32, (3, 2))] * n for n in (1, 2, 5, 1, 9, 3)],
    "several types": [
        [(F32, (rows, 3)), (I64, (rows,)), (BOOL, (rows, 7)), (U8, (rows, 1)), (BF16, (rows, 2, 3))]
        for rows in (2, 2, 5, 1, 3)
    ],
    "without size": [[(F32, (rows, 0)), (BOOL, (rows, width))] for rows, width in ((2, 0), (2, 3), (3, 0), (1, 1))],
    "scalar beside rows": [[(F32, (rows, 2)), (F64, ())] for rows in (2, 3, 1)],
    "larger than thought": [[(F32, (2, 10))], [(F32, (2, 100000))], [(F32, (2, 10))], [(F64, (5, 70000))]],
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_messages_that_change(pool: Pool, name: str) -> None:
    for posted, ahead in itertools.product((True, False), (1, 3)):
        assert all(pool.run(channel, 2, SEQUENCES[name], posted, ahead, False))
    assert all(pool.run(channel, 2, SEQUENCES[name], True, 2, True))


def unlike(first: Tensor, second: Tensor) -> list[Tensor]:
    """What arrives of tensors that are no plain memory."""
    rank, group = dist.get_rank(), wait_group()
    if rank == 0:
        sender = Sender(Address(group, 1, 3), DirectStaging(torch.device("cpu")), 2)
        sender.send([first, second], len(first))
        sender.flush()
        return []
    return list(Receiver(Address(group, 0, 3), DirectStaging(torch.device("cpu"))).receive(len(first)))


def test_views_and_gradients(pool: Pool) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    for first, second in [
        (base.t(), base.t()[:, 1:]),
        (base[1:3], base[:1].expand(2, 6)),
        (base[:, ::2], base.flip(1)),
    ]:
        _, (a, b) = pool.run(unlike, 2, first, second)
        assert torch.equal(a, first)
        assert torch.equal(b, second)
        assert not a.requires_grad
        a.add_(1)  # each has memory of its own to change
        assert torch.equal(b, second)


def in_place(rows: int) -> bool:
    """A received tensor counts its own changes: autograd's check must not see those of its neighbour."""
    rank, group = dist.get_rank(), wait_group()
    if rank == 0:
        sender = Sender(Address(group, 1, 4), DirectStaging(torch.device("cpu")), 1)
        sender.send([torch.ones(rows, 2), torch.ones(rows, 2)], rows)
        sender.flush()
        return True
    a, b = Receiver(Address(group, 0, 4), DirectStaging(torch.device("cpu"))).receive(rows)
    weight = torch.ones(2, requires_grad=True)
    product = (a * weight).sum()
    b.zero_()
    product.backward()
    return weight.grad is not None and torch.equal(weight.grad, torch.full((2,), float(rows)))


def test_in_place_changes_of_a_neighbour(pool: Pool) -> None:
    assert all(pool.run(in_place, 2, 3))


def refused(tensors: list[Tensor], rows: int, due: int) -> str:
    """What the receiver says of a message with other rows than due."""
    rank, group = dist.get_rank(), wait_group()
    try:
        if rank == 0:
            sender = Sender(Address(group, 1, 5), DirectStaging(torch.device("cpu")), 1)
            sender.send(tensors, rows)
            sender.flush()
        else:
            Receiver(Address(group, 0, 5), DirectStaging(torch.device("cpu"))).receive(due)
    except TransportError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("tensors", "said"), [([torch.ones(3, 2)], "sent 3 rows where 4"), ([torch.ones(())], "sent no rows where 4")]
)
def test_wrong_rows(pool: Pool, tensors: list[Tensor], said: str) -> None:
    messages = pool.run(refused, 2, tensors, 4, 4)
    assert messages[0] == ""
    assert said in messages[1]
    assert "first dimension" in messages[1]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [([torch.ones(2, dtype=torch.complex64)], "complex64"), ([torch.ones(2)] * 40, "does not fit a header")],
)
def test_what_cannot_be_sent(tensors: list[Any], said: str) -> None:
    sender = Sender(Address(None, 1, 0), DirectStaging(torch.device("cpu")), 1)  # type: ignore[arg-type]
    with pytest.raises(TransportError, match=said):
        sender.send(tensors, 2)

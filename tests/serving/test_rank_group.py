"""The server's side of ranks, with ranks that are threads at the other ends of sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parallax.run.rank_group import RankGroup, RanksLost, introduced
from parallax.serve.model import DTYPES, ModelFailed
from parallax.serve.wire import receive, send

Respond = Callable[[dict[str, Any], list[Tensor]], tuple[dict[str, Any], list[Tensor]] | None]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*DTYPES.values(), torch.complex64]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=4,
    ),
    st.dictionaries(st.text(), st.text()),
)
def test_a_message_and_its_tensors_arrive_as_they_were(
    kinds: list[tuple[torch.dtype, list[int]]], message: dict[str, str]
) -> None:
    tensors = [(torch.rand(shape) * 100).to(dtype) for dtype, shape in kinds]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, message, tensors)
        found, arrived = receive(theirs)
    assert found == message
    assert all(map(torch.equal, arrived, tensors))
    assert [(each.dtype, each.shape) for each in arrived] == [(t.dtype, t.shape) for t in tensors]


def group(*ranks: tuple[bool, Respond]) -> tuple[RankGroup, threading.Event]:
    """A group of ranks that read inputs or not, and what they answer; None ends a rank."""
    links = []

    def work(link: socket.socket, reads: bool, respond: Respond) -> None:
        with link, contextlib.suppress(ConnectionError):
            send(link, {"reads": reads, "step": 3})
            while (got := receive(link))[0]["do"] != "end":
                if (found := respond(*got)) is None:
                    return
                send(
                    link, {"number": got[0]["number"], "error": "", "step": 3} | found[0], found[1]
                )

    for reads, respond in ranks:
        ours, theirs = socket.socketpair()
        threading.Thread(target=work, args=(theirs, reads, respond), daemon=True).start()
        links.append(introduced(ours))
    lost = threading.Event()
    made = RankGroup(links, lost.set)
    made.start()
    return made, lost


def end(made: RankGroup, lost: threading.Event) -> None:
    made.end()
    assert lost.wait(60)


def silent(message: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    assert not tensors
    return {}, []


def test_parts_of_replicas_are_joined_in_the_order_of_rows() -> None:
    seen: list[Tensor] = []

    def reads(
        message: dict[str, Any], tensors: list[Tensor]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        seen.extend(tensors)
        return {"fetched": 5, "step": 4}, []

    def replica(*first: int) -> Respond:
        def respond(
            message: dict[str, Any], tensors: list[Tensor]
        ) -> tuple[dict[str, Any], list[Tensor]]:
            parts = [torch.tensor([row, row + 1]) for row in first]
            outputs = [each for part in parts for each in (part, -part)]
            return {"names": ["a", "b"], "first": [*first], "step": 4}, outputs

        return respond

    made, lost = group((True, reads), (False, replica(2, 6)), (False, replica(0, 4)))
    rows = torch.arange(8.0).reshape(8, 1)
    named, step = made.run([rows])
    assert step == made.step == 4
    assert made.fetched_bytes == 5
    assert [name for name, _ in named] == ["a", "b"]
    assert torch.equal(named[0][1], torch.arange(8))
    assert torch.equal(named[1][1], -torch.arange(8))
    assert torch.equal(seen[0], rows)
    end(made, lost)


def test_a_models_exception_fails_its_batch_alone() -> None:
    def fails(
        message: dict[str, Any], tensors: list[Tensor]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        error = "ValueError: no" if tensors[0][0] < 0 else ""
        return {"error": error, "names": ["x"], "first": [0]}, [] if error else tensors

    made, lost = group((True, fails), (False, silent))
    with pytest.raises(ModelFailed, match="ValueError: no"):
        made.run([torch.tensor([-1.0])])
    assert made.run([torch.tensor([1.0])])[0][0][1] == 1
    end(made, lost)


def test_a_rank_that_ends_fails_all_batches_and_later_ones() -> None:
    made, lost = group((True, lambda message, tensors: None), (False, silent))
    with pytest.raises(RanksLost):
        made.run([torch.ones(1)])
    assert lost.wait(60)
    with pytest.raises(RanksLost):
        made.run([torch.ones(1)])


def test_a_checkpoint_that_one_rank_cannot_load_is_refused() -> None:
    def loads(
        message: dict[str, Any], tensors: list[Tensor]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        return {"error": "" if message["checkpoint"] == "good" else "damaged", "step": 9}, []

    made, lost = group((True, loads), (True, loads))
    made.load(Path("good"), averaged=False)
    assert made.step == 9
    with pytest.raises(ModelFailed, match="damaged"):
        made.load(Path("bad"), averaged=False)
    end(made, lost)

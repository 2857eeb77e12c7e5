"""Ranks in a store that outlives them do not take for present what those before them have left."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from parallax.nodes.joining import wait_for_all
from parallax.nodes.meeting import OpenMeeting, ask

RANKS = 3
SECONDS = 20.0


def meet(store: Any) -> list[Any]:
    """Each rank's part of ``store``, when all have come."""

    def come(rank: int) -> Any:
        meeting = None if rank else OpenMeeting(store)
        part = meeting.part if meeting else ask(store, SECONDS)
        answer = meeting.answer if meeting else int
        wait_for_all(part, rank, RANKS, join_seconds=SECONDS, meanwhile=answer)
        return part

    with ThreadPoolExecutor(RANKS) as threads:
        return [*threads.map(come, range(RANKS))]


def test_each_meeting_has_a_part_of_its_own() -> None:
    """Also of a rank that sent a request, died, and is back."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    for number in range(3):
        with pytest.raises(TimeoutError, match="no rank 0 has answered within 0 s"):
            ask(store, 0.0)
        parts = meet(store)
        assert not any(part.check(["number"]) for part in parts)
        parts[number].set("number", str(number))
        assert [part.get("number") for part in parts] == [str(number).encode()] * RANKS


def test_a_late_rank_is_answered_by_a_living_rank_0() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    meeting = OpenMeeting(store)
    with ThreadPoolExecutor(1) as thread:
        for rank in range(1, RANKS):
            asks = thread.submit(ask, store, SECONDS)
            while not asks.done():
                meeting.answer()
            asks.result().set(f"rank {rank}", "")
    assert meeting.part.check(["rank 1", "rank 2"])
    with pytest.raises(TimeoutError):
        ask(store, 0.1)

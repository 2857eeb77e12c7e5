"""Restarted ranks join in a store that still has the entries of their predecessors."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallax.errors import ParallaxError
from parallax.nodes.joining import start_processes
from tests.distributed.agent import agents_store, running

SECONDS = 60.0
LATE_SECONDS = 1.0


def rank(connection: Connection, number: int, counted: int, variables: dict[str, str]) -> None:
    """Return the sum of the ranks' numbers by torch, or why the ranks have not joined."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "RANK": str(number),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PARALLAX_JOIN_SECONDS": "30",
        **variables,
    }
    try:
        start_processes()
    except ParallaxError as error:
        connection.send(str(error))
        return
    sum_of_all = torch.tensor(counted)
    dist.all_reduce(sum_of_all)
    connection.send(int(sum_of_all))
    connection.recv()  # until it is killed


def answers(
    counted: int, port: int, size: int = 2, late: int | None = None, **variables: str
) -> set[Any]:
    """Of all ranks, before they are killed; ``late`` joins when the others have had time to continue without it."""
    where = {"MASTER_PORT": str(port), "WORLD_SIZE": str(size), **variables}
    with ExitStack() as stack:
        ranks = []
        for number in sorted(range(size), key=lambda number: number == late):
            if number == late:
                time.sleep(LATE_SECONDS)
            ranks.append(stack.enter_context(running(rank, number, counted, where)))
        return {each.recv() for each in ranks if each.poll(SECONDS)}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("before", "count", "late"),
    [(2, "0", 0), (2, "1", 1), (3, "0", 1)],
    ids=["a host was done without for a moment", "a rank was killed", "a host has gone"],
)
def test_ranks_meet_again(before: int, count: str, late: int) -> None:
    """Torchrun counts no restart where hosts join or leave."""
    with agents_store() as port:
        assert answers(1, port, before) == {before}
        again = answers(10, port, late=late, TORCHELASTIC_RESTART_COUNT=count)
        assert again == {20}


def test_a_dead_rank_that_joined_before_rank_0_is_not_waited_for() -> None:
    """The next to come as rank 1 is another."""
    with agents_store() as port:
        where = {"MASTER_PORT": str(port), "WORLD_SIZE": "2", "PARALLAX_JOIN_SECONDS": "1"}
        with running(rank, 1, 1, where) as gone:
            assert f"rank 0 of 2 has not joined at 127.0.0.1:{port} within 1 s" in gone.recv()
        assert answers(10, port) == {20}

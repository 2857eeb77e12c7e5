"""The store of torchrun's agent, which outlives its ranks, and processes that are killed at the end of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from tests.alone import CONTEXT, begin


@contextmanager
def running(function: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """``function(connection, *args)`` in a process of its own, which is killed at the end; the connection with it."""
    mine, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=function, args=(theirs, *args))
    begin(process)
    theirs.close()
    try:
        yield mine
    finally:
        process.kill()
        process.join()
        process.close()
        mine.close()


@contextmanager
def agents_store() -> Iterator[int]:
    """Its port at the loopback address."""
    with running(_serve) as connection:
        yield connection.recv()


def _serve(connection: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    connection.send(store.port)
    connection.recv()

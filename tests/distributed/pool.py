"""A pool of gloo workers that lasts as long as the test session: a job on it costs milliseconds, a start seconds.

Workers are forked from one server that has imported what most jobs need, once for all of them.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing  # tensors in answers travel by shared memory

from tests.alone import CONTEXT, ROOT, begin
from tests.leaks import lasting

TIMEOUT_SECONDS = 120
CAUSE_SECONDS = 10  # for the cause, once a rank has failed because another one did
CONSEQUENCE = "has ended or given up: its own messages say why"


def _worker(connection: Connection, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    connection.send(True)
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    # Processes of its own cost more than they compile.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    while True:
        # Describing a model visits every object of the garbage collector. Objects of libraries and of earlier jobs are
        # frozen, because they made each job slower than the one before.
        gc.collect()
        gc.freeze()
        job = connection.recv()
        if job is None:
            return
        call, args, rank, world, name = job
        try:
            if world > 1:
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(name, store),
                    rank=rank,
                    world_size=world,
                    timeout=timedelta(seconds=60),
                )
                dist.barrier()  # a short job might end before all are connected
            try:
                result = call(*args)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
            connection.send((True, result))
        except BaseException as error:
            connection.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class WorkerError(AssertionError):
    """The error of the rank that failed first; not of one that only lost its peer, where another says why."""


class Pool:
    """``run(call, world, *args)``: ``call(*args)`` on ``world`` ranks; the results by rank."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._workers: list[tuple[Any, Connection]] = []
        with lasting():
            # Ranks that wait for a file look for it every ten milliseconds, some times for each group of a job.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ForkingPickler.dumps(torch.zeros(1))  # begins the thread that hands tensors to workers

    def run(self, call: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        while len(self._workers) < world:
            self._start()
        name = uuid.uuid4().hex
        used = self._workers[:world]
        for rank, (_, connection) in enumerate(used):
            connection.send((call, args, rank, world, name))
        results: dict[Connection, Any] = {}
        open_ends = [connection for _, connection in used]
        consequence: str | None = None
        while open_ends:
            ready = wait(open_ends, CAUSE_SECONDS if consequence else TIMEOUT_SECONDS)
            if not ready and consequence:
                break
            if not ready:
                self.close()
                raise WorkerError(
                    f"no answer within {TIMEOUT_SECONDS} s from {len(open_ends)} of {world} ranks"
                )
            for connection in ready:
                good, value = connection.recv()
                open_ends.remove(connection)
                if not good and CONSEQUENCE in value:
                    consequence = value
                elif not good:
                    self.close()  # its peers wait for it: restart the pool
                    raise WorkerError(value)
                results[connection] = value
        if consequence:
            self.close()
            raise WorkerError(consequence)
        return [results[connection] for _, connection in used]

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.terminate()
        for process, _ in self._workers:
            process.join(10)
        self._workers.clear()

    def _start(self) -> None:
        with lasting():
            mine, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_worker, args=(theirs, self._store.port), daemon=True)
        begin(process)
        theirs.close()
        with lasting():
            mine.recv()  # its connection to the store is open
        self._workers.append((process, mine))

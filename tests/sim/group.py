"""Process groups whose tensors lie on the simulated accelerator, with the habits of NCCL.

An operation is put on the group's own stream, after the work that the current stream was given before, by a thread of
the group's own, in the order of the calls; gloo carries the bytes. The two ends of a group meet at its first operation,
which blocks the host until all have come: what NCCL does where it connects. Waiting for an operation makes the current
stream wait; the host waits too, which NCCL's would not.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallax.machine.device import own_handle
from tests.sim.device import C

NAME = "sim"
CONNECT = datetime.timedelta(seconds=20)


class SimWork(dist.Work):
    """An operation under way, and the event at its end."""

    def __init__(
        self, done: Future[torch.Event], stream: torch.Stream, tensors: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._done, self._stream, self._tensors = done, stream, list(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """The current stream continues when it has ended."""
        torch.accelerator.current_stream(self._stream.device).wait_event(self._done.result())
        return True

    def is_completed(self) -> bool:
        return self._done.done() and self._done.result().query()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return its result, ordered on the caller's stream."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(
            devices=[self._stream.device]
        )

        def ended(done: Future[torch.Event]) -> None:
            try:
                done.result()
            except BaseException as error:
                future.set_exception(error)
                return
            with own_handle(self._stream):  # where it ended
                future.set_result(self._tensors)

        self._done.add_done_callback(ended)
        return future


class SimGroup(dist.ProcessGroup):
    """One group of ranks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._store, self._rank, self._size, self._met = store, rank, size, False
        self._name = ""
        self._device = torch.device("sim", C.current_device())
        self._stream = torch.Stream(self._device)
        self._thread = ThreadPoolExecutor(1, "sim-group", initializer=self._enter)

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> SimWork:
        return self._begin(
            tensors,
            tensors,
            lambda hosts: self._gloo.allreduce(hosts, options or dist.AllreduceOptions()),
        )

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> SimWork:
        return self.allreduce(tensors, options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> SimWork:
        return self._begin(tensors, tensors, lambda hosts: self._gloo.broadcast(hosts, options))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> SimWork:
        return self._begin(tensors, [], lambda hosts: self._gloo.send(hosts, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> SimWork:
        return self._begin([], tensors, lambda hosts: self._gloo.recv(hosts, peer, tag))

    def barrier(self, options: Any = None) -> SimWork:
        return self._begin([], [], lambda _: self._gloo.barrier())

    def shutdown(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _enter(self) -> None:
        C.quiet(True)
        C.set_device(self._device.index)

    def _begin(
        self,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        call: Callable[[list[Tensor]], Any],
    ) -> SimWork:
        """``call`` with host copies of ``read``, or buffers for what will be ``written``."""
        self._meet()
        before = torch.Event(self._device)
        before.record(torch.accelerator.current_stream(self._device))
        tensors = list(read or written)

        def run() -> torch.Event:
            self._stream.wait_event(before)
            with own_handle(self._stream):
                hosts = [
                    tensor.cpu() if read else torch.empty_like(tensor, device="cpu")
                    for tensor in tensors
                ]
                call(hosts).wait()
                for tensor, host in zip(written, hosts):
                    tensor.copy_(host)
            ended = torch.Event(self._device)
            ended.record(self._stream)
            return ended

        return SimWork(self._thread.submit(run), self._stream, tensors)

    def _meet(self) -> None:
        if self._met:
            return
        self._store.set(f"here {self._rank}", "")
        for rank in range(self._size):
            self._store.wait([f"here {rank}"], CONNECT)
        self._met = True


def _create(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> SimGroup:
    return SimGroup(store, rank, size, timeout)


dist.Backend.register_backend(NAME, _create, devices=["sim"])

"""Serve a run with the ranks that torchrun or Slurm has started: rank 0 also listens for requests."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallax.nodes.places import Nodes
from parallax.nodes.together import broadcast_result
from parallax.run.inference import ForwardJob
from parallax.run.job import build_chain
from parallax.run.processes.answering import answer_batches
from parallax.run.rank_group import Named, RankGroup, RankLink, introduced
from parallax.run.serving import RunModel
from parallax.runtime.failure.links import addresses, listen_at, reach, welcome
from parallax.runtime.failure.watch import Watch
from parallax.serve.model import ModelFailed

Front = Callable[[RunModel], None]
"""A function that serves a model, and returns when the server ends."""


class StartedModel(RunModel):
    """The model of ``job``, computed by ranks that torchrun or Slurm has started. If one rank fails, all of them
    end."""

    def __init__(self, job: ForwardJob, links: Sequence[RankLink]) -> None:
        super().__init__(job, build_chain(job.config))
        self.capacity = len(job.plan.stages)
        self._group = RankGroup(links, self._lost)
        self._group.start()

    @property
    def step(self) -> int:
        return self._group.step

    def compute(self, tensors: Sequence[Tensor]) -> tuple[Named, int]:
        return self._group.run(tensors)

    def load(self, job: ForwardJob) -> str:
        try:
            self._group.load(job.checkpoint, averaged=job.averaged)
        except ModelFailed as failed:
            return str(failed)
        return ""

    def close(self) -> None:
        self._group.end()

    def _lost(self) -> None:
        self.capacity = self.ready = 0


def serve_together(job: ForwardJob, watch: Watch, front: Front) -> None:
    """Run one rank of ``job`` until the server ends. Every rank of torch's default group must call this function. Rank
    0 also calls ``front``, in a thread, with the model to serve."""
    rank, nodes = dist.get_rank(), Nodes.gather()
    listener: socket.socket | None = None
    invitation: Any = None
    if rank == 0:
        where = addresses(not nodes.several)
        listener = listen_at(where)
        invitation = where, listener.getsockname()[1], secrets.token_hex()
    where, port, token = broadcast_result(lambda: invitation)
    errors = list[BaseException]()
    thread = None
    if listener is not None:
        given = job, listener, token, front, errors
        thread = threading.Thread(target=_serve, args=given, daemon=True)
        thread.start()
    link = reach(where, port, token, rank).socket
    link.settimeout(None)
    with contextlib.closing(link):
        answer_batches(job, watch, lambda: contextlib.nullcontext(link))
    if thread is not None:
        thread.join()
    if errors:
        raise errors[0]


def _serve(
    job: ForwardJob,
    listener: socket.socket,
    token: str,
    front: Front,
    errors: list[BaseException],
) -> None:
    """Wait until all ranks have connected, and call ``front`` with their model. Afterwards end the ranks. An exception
    is added to ``errors``."""
    try:
        with _ranks(listener, token, job.plan.world_size) as links:
            model = StartedModel(job, [introduced(link) for link in links])
            try:
                front(model)
            finally:
                model.close()
    except BaseException as error:
        errors.append(error)


@contextlib.contextmanager
def _ranks(listener: socket.socket, token: str, count: int) -> Iterator[list[socket.socket]]:
    """Yield the connections of all ``count`` ranks, which present ``token`` when they connect. At the end of the
    context the connections are closed, which ends the ranks."""
    with listener:
        links = [link.socket for link in welcome(listener, token, count).values()]
    try:
        for link in links:
            link.settimeout(None)
        yield links
    finally:
        for link in links:
            link.close()

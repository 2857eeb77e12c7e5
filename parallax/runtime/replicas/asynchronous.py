"""Asynchronous replicas: whole pipelines that train on one state of each stage, without waiting for each other.

Replicas that sum gradients in every step are as fast as the slowest of them. Here each stage has one state, weights and
optimizer states, on its owner, which is the stage's rank in replica 0. The rows of each update are divided into one
share for each replica, as in synchronous training, but shares are handed out in order to the replica that asks next. So
a fast replica computes more of them::

    replica 0 (owner)   share 0 ─────┐ update 0  share 3 ─────┐ update 1  share 5 ...
                              weights│ ^ gradients            │ ^
    replica 1 (fast)    share 1 ─┐ share 2 ─┐ share 4 ─┐ ...
                                 └──────────┴──────────┴─ gradients to the owner, newest weights back

Update n uses the gradients of its own shares alone, summed, so an update is always one global batch, with the learning
rate of its step. A share of update n is computed with weights that have version n − s or later, where version v is the
state after v updates and s is the staleness. This bounds the staleness of each gradient, and how far a replica is ahead
of the slowest one, as in stale synchronous parallel training (Ho et al. 2013). Gradients that arrive early are added to
the sum of their update, which waits for the missing shares.

The owner's main thread computes shares too. Between two of them it makes the updates whose shares are complete. It has
a thread for each other replica, which receives gradients and sends weights.

A replica without a state may be lost, because one of its processes has ended. The others continue to the end of the
interval, and replica 0 computes the share that the lost one had. With several stages, some owners may have the
gradients of this share already. The owner of the first stage counts a share when the replica asks for the next one,
which it does when all stages have confirmed its gradients. So an update is never complete on the first stage alone.
Another stage that gets gradients of a share twice drops the second ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.mesh import Mesh
from parallax.runtime.failure.exit_report import follows

_ASK, _GRADIENT, _ROWS_END = range(3)  # kinds of messages to the owner
_END, _WAIT = -1, -2  # in place of the number of a share
_POLL_SECONDS = 1.0
_LOSS_SECONDS = 10.0  # in which the watch finds the end of a process whose connection has broken
Gradients = Sequence[Tensor | None]


class BatchShare(NamedTuple):
    """The rows of the batch of ``update`` that replica ``part`` computes in synchronous training."""

    update: int
    part: int


class Use(NamedTuple):
    """The use of a gradient in an update: ``replica`` has computed ``share`` with weights of ``version``."""

    share: BatchShare
    replica: int
    version: int

    @property
    def staleness(self) -> int:
        """The updates between the weights of the gradient and the update that uses it."""
        return self.share.update - self.version


class StateExchange(Protocol):
    """One rank's part in the exchange of gradients and weights, between two meetings of all ranks."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent."""

    lost: bool
    """Whether a replica was lost in the last interval, so that the ranks cannot meet."""

    def begin(self, start: int, stop: int, *, outlives: bool) -> None:
        """Begin an interval with the updates ``start`` to ``stop`` − 1. All ranks have the same weights. ``outlives``:
        :meth:`lose` is called for a replica that ends, so that its broken connections are no error."""

    def next_share(self, *, ends: bool) -> BatchShare | None:
        """Set the weights for the share that this rank computes next, and return this share; None after the last
        update. ``ends``: this rank requests that no further updates begin. All ranks of a replica call this method."""

    def give(self, share: BatchShare, loss: float) -> None:
        """Give the gradients of ``share`` to the owner of the stage, with this rank's part of the loss."""

    def end_rows(self, share: BatchShare) -> None:
        """Announce that the data has no rows for ``share``, so that its update and all later updates are left out."""

    def lose(self, replica: int) -> bool:
        """Continue without ``replica``, one of whose processes has ended. Return False if this is not possible: outside
        of an interval, or if this rank is not the owner of the first stage. Any thread may call this method. It does
        not wait for an update."""

    def end(self) -> list[Use]:
        """End the interval after the last update, with equal weights on all ranks. Return the uses of gradients on this
        rank, if it is an owner. If a replica was :attr:`lost`, only owners return."""


@dataclass
class _Sum:
    """The gradients of one update. ``parts``: the sum for each parameter; None without a gradient. ``known``: the
    indices of the shares whose gradients this rank has received; those of ``shares`` shares are added."""

    parts: list[Tensor | None]
    loss: float = 0.0
    shares: int = 0
    known: set[int] = field(default_factory=set)


class StateOwner:
    """The :class:`StateExchange` of a rank of replica 0, which has the state of its stage.

    ``parameters`` are the trained parameters. ``apply(update, gradients, loss)`` makes an update with the summed
    gradient of each parameter, which is None if no share has one. It returns False if the run must end without this
    update. The owners of all stages call it together.
    """

    def __init__(
        self,
        mesh: Mesh,
        staleness: int,
        parameters: Sequence[nn.Parameter],
        apply: Callable[[int, Gradients, float], bool],
    ) -> None:
        self._mesh, self._staleness, self._apply = mesh, staleness, apply
        self._parameters, self._links = parameters, _Links(mesh, parameters)
        self._leads, self._replicas = mesh.pipeline_rank == 0, mesh.replica_count
        self._changed = threading.Condition()
        self._losing = threading.Condition()
        self._begin(0, 0)

    def _begin(self, start: int, stop: int) -> None:
        self._start = self._version = start
        self._limit = stop
        self._handed = start * self._replicas  # the number of the next share
        self._mine: list[int] = []  # the shares that only this rank computes next
        self._given: dict[int, int] = {}  # the share that each other replica computes
        self._received: dict[int, Callable[[], None]] = {}  # count the last share of each replica
        self._lost: set[int] = set()
        self._outlives = self._may_lose = self.lost = False
        self._sums: dict[int, _Sum] = {}
        self._uses: list[Use] = []
        self._refused = False
        self._error: BaseException | None = None
        self._snapshot: list[Tensor] = []
        self._threads: list[threading.Thread] = []

    @property
    def sent_bytes(self) -> int:
        return self._links.sent_bytes

    def begin(self, start: int, stop: int, *, outlives: bool) -> None:
        self._begin(start, stop)
        self._outlives, self._may_lose = outlives, outlives and self._leads
        for replica in range(1, self._replicas):
            name = f"replica-{replica}"
            thread = threading.Thread(target=self._serve, args=(replica,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def next_share(self, *, ends: bool) -> BatchShare | None:
        if self._links.any_of_pipeline(ends) and self._leads:
            self._end_soon()
        while not self._refused:
            number, version = self._links.agreed(self._decide() if self._leads else (0, 0))
            self._update_to(version)
            if number == _END:
                return None
            if number != _WAIT and not self._refused:
                return BatchShare(*divmod(number, self._replicas))
        return None

    def give(self, share: BatchShare, loss: float) -> None:
        gradients = [
            (index, parameter.grad.detach())
            for index, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        ]
        self._count(Use(share, 0, self._version), loss, gradients)

    def end_rows(self, share: BatchShare) -> None:
        with self._changed:
            self._limit = min(self._limit, share.update)
            self._changed.notify_all()

    def lose(self, replica: int) -> bool:
        with self._losing:
            if self._may_lose and replica > 0:
                self._lost.add(replica)
                self._losing.notify_all()
            return replica in self._lost

    def end(self) -> list[Use]:
        for thread in self._threads:
            thread.join()
        self._check()
        with self._losing:
            self._may_lose = bool(self._lost)
        count, _ = self._links.agreed((len(self._lost), 0))
        self.lost = count > 0
        for replica in () if self.lost else range(1, self._replicas):
            self._links.confirm(replica)  # all ranks meet
        self._sums, self._snapshot = {}, []
        return [use for use in self._uses if use.share.update < self._version]

    # ---- the main thread

    def _decide(self) -> tuple[int, int]:
        """Wait until this rank has work, and return two numbers: the number of the share that it computes next, and the
        version up to which the owners of all stages make updates before it.

        The first number is ``_END`` after the last share, and ``_WAIT`` if the next share cannot begin yet.
        """
        with self._changed:
            if not self._mine and (number := self._hand_out()) != _END:
                self._mine.append(number)
            self._wait_for(
                lambda: self._complete > self._version or self._can_begin(self._next, self._version)
            )
            version, number = self._complete, self._next
            if not self._can_begin(number, version):
                return _WAIT, version
            if number != _END:
                self._mine.remove(number)
            return number, version

    @property
    def _next(self) -> int:
        """The number of this rank's next share, or that there is none."""
        stop = self._limit * self._replicas
        return min((number for number in self._mine if number < stop), default=_END)

    def _can_begin(self, number: int, version: int) -> bool:
        if number == _END:
            return version >= self._limit
        return number // self._replicas - version <= self._staleness

    @property
    def _complete(self) -> int:
        """The version after all updates whose shares have arrived."""
        version = self._version
        while version in self._sums and self._sums[version].shares == self._replicas:
            version += 1
        return version

    def _update_to(self, version: int) -> None:
        """Wait until the gradients of all updates before ``version`` have arrived on this stage, and make these
        updates."""
        with self._changed:
            self._wait_for(lambda: self._complete >= version)
            while self._version < version and not self._refused:
                found = self._sums.pop(self._version)
                self._snapshot = []
                self._refused = not self._apply(self._version, found.parts, found.loss)
                self._version += not self._refused
                self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # ---- all threads

    def _wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds()`` returns True. The caller holds the lock. If a thread has failed, raise its error."""
        while self._error is None and not holds():
            self._changed.wait(_POLL_SECONDS)  # regular signs of life for the watch
        self._check()

    def _hand_out(self) -> int:
        """Assign the next share, and return its number; ``_END`` if there is none."""
        if self._handed >= self._limit * self._replicas:
            return _END
        self._handed += 1
        return self._handed - 1

    def _end_soon(self) -> None:
        """End the interval with the updates that have already begun."""
        with self._changed:
            begun = max(self._start + 1, -(-self._handed // self._replicas))
            self._limit = min(self._limit, begun)
            self._changed.notify_all()

    def _add(self, update: int, index: int, gradient: Tensor) -> None:
        """Add ``gradient`` to the sum of ``update`` for parameter ``index``."""
        with self._changed, torch.no_grad():
            parts = self._sum(update).parts
            known = parts[index]
            parts[index] = (
                gradient.to("cpu", copy=True) if known is None else known.add_(gradient.cpu())
            )

    def _count(self, use: Use, loss: float, gradients: list[tuple[int, Tensor]]) -> None:
        """Add the ``gradients`` of a share, each with the index of its parameter, and count the share. Drop them if
        this rank has gradients of the share, from a replica that is lost. The list is emptied, to free memory."""
        share = use.share
        with self._changed:
            self._given.pop(use.replica, None)
            if share.update < self._version or share.part in self._sum(share.update).known:
                return
            found = self._sum(share.update)
            found.known.add(share.part)
        while gradients:
            self._add(share.update, *gradients.pop())
        with self._changed:
            found.loss += loss
            found.shares += 1
            self._uses.append(use)
            self._changed.notify_all()

    def _sum(self, update: int) -> _Sum:
        return self._sums.setdefault(update, _Sum([None] * len(self._parameters)))

    # ---- one thread for each other replica

    def _serve(self, replica: int) -> None:
        """Answer the messages of ``replica`` until it has got the weights after the last update, or is lost. This rank
        computes the share that a lost replica had."""
        failure: BaseException | None = None
        try:
            while self._answer(replica):
                pass
        except BaseException as error:
            failure = None if self._is_loss(replica, error) else error
        with self._changed:
            self._error = self._error or failure
            self._mine += [self._given.pop(replica)] if replica in self._given else []
            self._changed.notify_all()

    def _is_loss(self, replica: int, error: BaseException) -> bool:
        """Return whether ``error`` means that ``replica`` is lost, and the others continue. Another owner than that of
        the first stage cannot know: the watch ends all ranks if the others do not continue."""
        if not self._outlives or not follows(error):
            return False
        with self._losing:
            return not self._leads or self._losing.wait_for(
                lambda: replica in self._lost, _LOSS_SECONDS
            )

    def _answer(self, replica: int) -> bool:
        kind, number, version, loss, ends, *present = self._links.receive_header(replica)
        self._received.pop(replica, lambda: None)()
        share = BatchShare(*divmod(int(number), self._replicas))
        if kind == _ROWS_END:
            self.end_rows(share)
        elif kind == _GRADIENT:
            gradients = [*self._links.receive_gradients(replica, present)]
            self._links.confirm(replica)
            count = partial(self._count, Use(share, replica, int(version)), loss, gradients)
            if self._leads:
                self._received[replica] = count
            else:
                count()
        else:
            if ends:
                self._end_soon()
            return self._send_weights(replica, int(number), int(version))
        return True

    def _send_weights(self, replica: int, number: int, least: int) -> bool:
        """Send weights of version ``least`` or later to ``replica``, with the number of the share that it computes with
        them; return whether there is such a share.

        The owner of the first stage chooses share and version. Other owners get its choice as ``number`` and ``least``.
        """
        with self._changed:
            if self._leads:
                number = self._hand_out()
                least = number // self._replicas - self._staleness
                if number != _END:
                    self._given[replica] = number
            self._wait_for(
                lambda: self._refused or replica in self._lost or self._may_send(number, least)
            )
            if replica in self._lost:
                return False
            if self._leads and self._refused:
                number = _END
            if not self._snapshot:
                self._snapshot = [p.detach().to("cpu", copy=True) for p in self._parameters]
            version, weights = self._version, self._snapshot
        self._links.send_weights(replica, number, version, weights)
        return number != _END

    def _may_send(self, number: int, least: int) -> bool:
        final = self._leads and number == _END
        return self._version >= (self._limit if final else least)


class StateClient:
    """The :class:`StateExchange` of a rank of another replica, whose weights are copies of the owner's."""

    def __init__(self, mesh: Mesh, parameters: Sequence[nn.Parameter]) -> None:
        self._links, self._parameters = _Links(mesh, parameters), parameters
        self._leads, self._replicas = mesh.pipeline_rank == 0, mesh.replica_count
        self._version, self.lost = 0, False

    @property
    def sent_bytes(self) -> int:
        return self._links.sent_bytes

    def begin(self, start: int, stop: int, *, outlives: bool) -> None:
        del start, stop, outlives

    def next_share(self, *, ends: bool) -> BatchShare | None:
        ends = self._links.any_of_pipeline(ends)
        if self._leads:
            self._links.send_header(_ASK, ends=ends)
            number, self._version = self._links.receive_weights()
            self._links.agreed((number, self._version))
        else:
            number, version = self._links.agreed((0, 0))
            self._links.send_header(_ASK, number, version)
            _, self._version = self._links.receive_weights()
        return None if number == _END else BatchShare(*divmod(number, self._replicas))

    def give(self, share: BatchShare, loss: float) -> None:
        given = [parameter.grad for parameter in self._parameters]
        present = [gradient is not None for gradient in given]
        self._links.send_header(
            _GRADIENT, self._number(share), self._version, loss, present=present
        )
        self._links.send_gradients([gradient for gradient in given if gradient is not None])
        self._links.wait_for_owner()

    def end_rows(self, share: BatchShare) -> None:
        if self._leads:
            self._links.send_header(_ROWS_END, self._number(share))

    def lose(self, replica: int) -> bool:
        del replica
        return False

    def end(self) -> list[Use]:
        self._links.wait_for_owner()
        return []

    def _number(self, share: BatchShare) -> int:
        return share.update * self._replicas + share.part


class _Links:
    """Messages between the owner of a stage and the stage's other replicas, and between the ranks of one replica."""

    def __init__(self, mesh: Mesh, parameters: Sequence[nn.Parameter]) -> None:
        self._group, self._pipeline = mesh.outer_host, mesh.pipeline
        self._parameters = parameters
        self.sent_bytes = 0
        self._counting = threading.Lock()

    # ---- in the pipeline of one replica

    def any_of_pipeline(self, flag: bool) -> bool:
        """Return whether ``flag`` is set on any rank of this replica."""
        if self._pipeline is None:
            return flag
        found = torch.tensor([flag], dtype=torch.int64)
        dist.all_reduce(found, group=self._pipeline)
        return bool(found.item())

    def agreed(self, numbers: tuple[int, int]) -> tuple[int, int]:
        """Return the ``numbers`` that the first stage's rank passes, on all ranks of this replica."""
        if self._pipeline is None:
            return numbers
        found = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(found, group=self._pipeline, group_src=0)
        first, second = found.tolist()
        return first, second

    # ---- from other replicas to the owner

    def send_header(
        self,
        kind: int,
        number: int = 0,
        version: int = 0,
        loss: float = 0.0,
        *,
        ends: bool = False,
        present: Sequence[bool] = (),
    ) -> None:
        header = torch.zeros(5 + len(self._parameters), dtype=torch.float64)
        values = [kind, number, version, loss, ends, *present]
        header[: len(values)] = torch.tensor(values, dtype=torch.float64)
        self._send(header, 0)

    def receive_header(self, replica: int) -> list[float]:
        header = torch.empty(5 + len(self._parameters), dtype=torch.float64)
        self._receive(header, replica)
        return header.tolist()

    def send_gradients(self, gradients: Sequence[Tensor]) -> None:
        for gradient in gradients:
            self._send(gradient.detach().cpu().contiguous(), 0)

    def receive_gradients(
        self, replica: int, present: Sequence[float]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (index of the parameter, gradient) for each parameter that ``present`` marks."""
        for index, (parameter, is_present) in enumerate(zip(self._parameters, present)):
            if is_present:
                found = torch.empty(parameter.shape, dtype=parameter.dtype)
                self._receive(found, replica)
                yield index, found

    # ---- from the owner to another replica

    def confirm(self, replica: int) -> None:
        """Let ``replica`` return from :meth:`wait_for_owner`."""
        self._send(torch.zeros(1), replica)

    def wait_for_owner(self) -> None:
        """Wait until the owner has received the gradients of a share, or until all ranks meet."""
        self._receive(torch.empty(1), 0)

    def send_weights(
        self, replica: int, number: int, version: int, weights: Sequence[Tensor]
    ) -> None:
        self._send(torch.tensor([number, version]), replica)
        for tensor in weights:
            self._send(tensor.contiguous(), replica)

    def receive_weights(self) -> tuple[int, int]:
        """Set the parameters to the weights that the owner sends. Return the number of the share to compute with them,
        and their version."""
        header = torch.empty(2, dtype=torch.int64)
        self._receive(header, 0)
        with torch.no_grad():
            for parameter in self._parameters:
                found = torch.empty(parameter.shape, dtype=parameter.dtype)
                self._receive(found, 0)
                parameter.copy_(found)
        number, version = header.tolist()
        return number, version

    def _send(self, tensor: Tensor, replica: int) -> None:
        dist.send(tensor, group=self._group, group_dst=replica)
        with self._counting:
            self.sent_bytes += tensor.nbytes

    def _receive(self, tensor: Tensor, replica: int) -> None:
        dist.recv(tensor, group=self._group, group_src=replica)

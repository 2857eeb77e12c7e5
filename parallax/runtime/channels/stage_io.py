"""What crosses the cuts around one rank's stages: which rows go to and come from whom, and in what form.

Replicas of neighbour stages share a micro-batch's rows in different ways, so a channel carries the overlap of two row
intervals (:mod:`parallax.plan.rows`). What has no rows, such as a table of positions, is sent whole to every peer; the
first peer's copy is used, and gradients are added up instead of laid one after the other. A gradient that
there is not, because the loss ignores a tensor, travels as none: a parameter without a gradient is not updated at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallax.errors import TransportError
from parallax.mesh import Edge, Mesh
from parallax.model.block import has_gradient
from parallax.model.describe import Chain
from parallax.plan.rows import Interval, micro_batch_rows, peers, replica_rows
from parallax.plan.schedule import Action, Kind
from parallax.runtime.channels.message import Copy, Gradients, Tensors, packed, unpacked
from parallax.runtime.channels.transport import Channels, Receiver, Sender

Shares = list[tuple[int, Interval]]
_GRADIENTS = (Kind.RECEIVE_GRADIENT, Kind.SEND_GRADIENT)
_ABOVE = (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT)  # between a stage and the one after it


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of the micro-batches of one size: its first row, counted from theirs, how many it has, and by
    stage the rows that it shares with each replica below, and above, counted from this rank's first."""

    start: int
    rows: int
    below: dict[int, Shares]
    above: dict[int, Shares]


class StageIO:
    """The channels of one rank, and the rows that they carry. :meth:`begin` says what a step's micro-batches are."""

    def __init__(self, chain: Chain, mesh: Mesh, channels: Channels) -> None:
        self._mesh, self._channels = mesh, channels
        self._last_stage = len(mesh.plan.stages) - 1
        self._receivers: dict[tuple[Kind, int], list[Receiver]] = {}
        self._senders: dict[tuple[Kind, int], list[Sender]] = {}
        # Of what leaves a stage.
        self._rowless = [chain.blocks[stage.stop - 1].unbatched for stage in mesh.plan.stages]
        self._summed: dict[
            int, frozenset[int]
        ] = {}  # stage before a cut → which of its gradients have no rows
        self._sizes: list[int] = []
        self._parts: list[tuple[int, _Part]] = []
        self._parts_by_size: dict[int, _Part] = {}
        for stage in mesh.stages:
            self._open(stage)

    def _open(self, stage: int) -> None:
        plan, mine = self._mesh.plan, self._mesh.rank
        if stage > 0 and not plan.hands_over(stage - 1):
            below = plan.ranks(stage - 1)
            self._receivers[Kind.RECEIVE_ACTIVATION, stage] = [
                self._channels.receiver(Edge(rank, mine, stage - 1, backward=False))
                for rank in below
            ]
            self._senders[Kind.SEND_GRADIENT, stage] = [
                self._channels.sender(
                    Edge(mine, rank, stage - 1, backward=True), self._ahead(stage - 1)
                )
                for rank in below
            ]
        if stage < self._last_stage and not plan.hands_over(stage):
            above = plan.ranks(stage + 1)
            self._receivers[Kind.RECEIVE_GRADIENT, stage] = [
                self._channels.receiver(Edge(rank, mine, stage, backward=True)) for rank in above
            ]
            self._senders[Kind.SEND_ACTIVATION, stage] = [
                self._channels.sender(Edge(mine, rank, stage, backward=False), self._ahead(stage))
                for rank in above
            ]

    def _ahead(self, cut: int) -> int:
        """Messages that may be under way across a cut: no more than micro-batches are in flight before it, so that a
        send does not wait. Where all are in flight, as many as there are stages."""
        plan = self._mesh.plan
        count, most = len(plan.stages), plan.micro_batches(plan.global_batch)
        if plan.schedule.holds_all:
            return count
        return 1 + plan.schedule.in_flight(count, cut, most, plan.interleave)

    def begin(self, rows: int, micro_batches: int) -> None:
        """A step over ``rows`` rows begins."""
        bounds = [micro_batch_rows(rows, micro_batches, micro) for micro in range(micro_batches)]
        self._sizes = [high - low for low, high in bounds]
        self._parts = [(low, self._part(high - low)) for low, high in bounds]

    def rows(self, micro: int) -> tuple[int, int]:
        """The first row of a micro-batch that this rank computes on, counted from the batch's, and their number."""
        low, part = self._parts[micro]
        return low + part.start, part.rows

    def size(self, micro: int) -> int:
        """Rows of a micro-batch over all replicas."""
        return self._sizes[micro]

    @property
    def posts(self) -> bool:
        """Whether any channel makes room for messages ahead."""
        return any(receiver.posts for ends in self._receivers.values() for receiver in ends)

    def post(self, action: Action) -> None:
        """Make room for a message that will be received."""
        ends = self._receivers[action.kind, action.stage]
        for other, (low, high) in self._shares(action):
            ends[other].post(high - low)

    def receive(self, action: Action, copy: Copy = torch.clone) -> Tensors | None:
        """Wait for what ``action`` brings; None where this rank has no rows. What comes from one peer alone has been
        through ``copy``, which makes the caller's tensor of the channel's."""
        ends, shares = self._receivers[action.kind, action.stage], self._shares(action)
        if not shares:
            return None
        unbatched = self._without_rows(action)
        if len(shares) == 1:
            other, (low, high) = shares[0]
            alone = ends[other].receive(high - low, copy)
            _check_rows(action, alone, high - low, unbatched)
            return alone
        pieces = [ends[other].receive(high - low) for other, (low, high) in shares]
        for tensors, (_, (low, high)) in zip(pieces, shares):
            _check_rows(action, tensors, high - low, unbatched)
        return tuple(
            [
                parts[0] if index in unbatched else _laid_together(action, parts)
                for index, parts in enumerate(zip(*pieces))
            ]
        )

    def receive_gradients(self, action: Action) -> Gradients | None:
        """The same of gradients. Where rows of one peer have none and rows of another have, the former are zeros."""
        ends, shares = self._receivers[action.kind, action.stage], self._shares(action)
        if not shares:
            return None
        unbatched = self._without_rows(action)
        pieces = []
        for other, (low, high) in shares:
            pieces.append(unpacked(ends[other].receive(high - low)))
            _check_rows(action, pieces[-1], high - low, unbatched)
        if len(shares) == 1:
            return pieces[0]
        counts = [high - low for _, (low, high) in shares]
        return tuple(
            [
                _summed(parts) if index in unbatched else _joined(parts, counts)
                for index, parts in enumerate(zip(*pieces))
            ]
        )

    def send(self, action: Action, tensors: Tensors) -> None:
        """Hand over what ``action`` sends."""
        ends, shares = self._senders[action.kind, action.stage], self._shares(action)
        if len(shares) == 1:
            other, (low, high) = shares[0]
            ends[other].send(tensors, high - low)
            return
        unbatched = self._without_rows(action)
        for other, (low, high) in shares:
            pieces = [
                tensor if index in unbatched else tensor[low:high]
                for index, tensor in enumerate(tensors)
            ]
            ends[other].send(pieces, high - low)

    def send_gradients(self, action: Action, gradients: Gradients) -> None:
        """The same of gradients; without rows, only to the first peer: the others' copies were not those used."""
        ends, shares = self._senders[action.kind, action.stage], self._shares(action)
        if len(shares) == 1:
            other, (low, high) = shares[0]
            ends[other].send(packed(gradients), high - low)
            return
        unbatched = self._without_rows(action) if shares else frozenset()
        for count, (other, (low, high)) in enumerate(shares):
            pieces: list[Tensor | None] = []
            for index, gradient in enumerate(gradients):
                if index in unbatched:
                    pieces.append(None if count else gradient)
                else:
                    pieces.append(None if gradient is None else gradient[low:high])
            ends[other].send(packed(tuple(pieces)), high - low)

    def floating(self, cut: int, tensors: Tensors) -> list[Tensor]:
        """Those of the ``tensors`` that cross the cut after a stage whose gradients come back."""
        places = [index for index, tensor in enumerate(tensors) if has_gradient(tensor)]
        if cut not in self._summed:
            self._summed[cut] = frozenset(
                n for n, index in enumerate(places) if index in self._rowless[cut]
            )
        return [tensors[index] for index in places]

    def flush(self) -> None:
        """Return when every message has been taken, or cannot change any more."""
        self._channels.drain()
        for senders in self._senders.values():
            for sender in senders:
                sender.flush()

    def _shares(self, action: Action) -> Shares:
        part = self._parts[action.micro][1]
        return (part.above if action.kind in _ABOVE else part.below)[action.stage]

    def _without_rows(self, action: Action) -> frozenset[int]:
        """Which of the tensors that a send or receive is about have no rows."""
        cut = action.stage if action.kind in _ABOVE else action.stage - 1
        if action.kind in _GRADIENTS:  # none are known, nor come back, where no forward has run
            return self._summed.get(cut, frozenset())
        return self._rowless[cut]

    def _part(self, size: int) -> _Part:
        """This rank's part of a micro-batch of ``size`` rows; a step has micro-batches of two sizes at most."""
        if size not in self._parts_by_size:
            count, replica, plan = self._mesh.replica_count, self._mesh.replica, self._mesh.plan
            start, stop = replica_rows(size, count, replica)

            def cut(stage: int) -> Shares:
                return peers(size, count, replica, plan.stages[stage].replicas)

            below = {stage: cut(stage - 1) for stage in self._mesh.stages if stage > 0}
            above = {
                stage: cut(stage + 1) for stage in self._mesh.stages if stage < self._last_stage
            }
            self._parts_by_size[size] = _Part(start, stop - start, below, above)
        return self._parts_by_size[size]


def _laid_together(action: Action, parts: Sequence[Tensor]) -> Tensor:
    """Rows of several peers, one after the other."""
    sizes = list(dict.fromkeys(tuple(part.shape[1:]) for part in parts))
    if len(sizes) > 1:
        raise TransportError(
            f"{action}: rows of sizes {sizes[0]} and {sizes[1]} arrived from two replicas, and those of a micro-batch "
            "are one tensor: pad them to one size for the whole batch (pad_packed_sequence(total_length=...), or the "
            "batch's longest), or use plan.replicas=1"
        )
    return torch.cat(list(parts))


def _joined(parts: Gradients, counts: Sequence[int]) -> Tensor | None:
    """Gradients of so many rows each, one after the other; zeros where one has none and another has."""
    known = next((part for part in parts if part is not None), None)
    if known is None:
        return None
    shape = known.shape[1:]
    return torch.cat(
        [
            known.new_zeros((count, *shape)) if part is None else part
            for part, count in zip(parts, counts)
        ]
    )


def _summed(parts: Gradients) -> Tensor | None:
    """Of what has no rows."""
    there = [part for part in parts if part is not None]
    return torch.stack(there).sum(0) if there else None


def _check_rows(action: Action, tensors: Gradients, rows: int, unbatched: frozenset[int]) -> None:
    for index, tensor in enumerate(tensors):
        if tensor is None or index in unbatched:
            continue
        if not tensor.dim() or tensor.shape[0] != rows:
            raise TransportError(
                f"{action}: a tensor of shape {tuple(tensor.shape)} arrived where {rows} rows were due: every tensor "
                "between blocks must have the micro-batch's rows in its first dimension"
            )

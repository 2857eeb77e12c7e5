"""Exchange tensors between the stages of one rank and adjacent stages on other ranks.

The replicas of two adjacent stages may divide a micro-batch's rows differently, so a channel carries the overlap of two
row intervals (:mod:`parallax.plan.rows`). A tensor without rows, such as a table of positions, is sent whole to every
peer. The receiver uses the copy of its first peer, and gradients are summed instead of concatenated. The gradient of a
tensor that the loss ignores is None, and is sent as None, so that a parameter without a gradient is not updated at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallax.errors import TransportError
from parallax.mesh import Mesh, Route
from parallax.model.block import can_require_grad
from parallax.model.describe import Chain
from parallax.plan.edge import Edge
from parallax.plan.rows import Interval, micro_batch_rows, peers, replica_rows
from parallax.plan.schedule import Action, Kind
from parallax.runtime.channels.message import Copy, Gradients, Tensors, packed, unpacked
from parallax.runtime.channels.transport import Channels, Receiver, Sender

Shares = list[tuple[int, Interval]]
_GRADIENTS = (Kind.RECEIVE_GRADIENT, Kind.SEND_GRADIENT)


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows that this rank computes of a micro-batch; they are the same for all micro-batches of one size.

    ``start`` is the first of these rows, counted from the start of the micro-batch, and ``rows`` is their number.
    ``shares`` maps each adjacent stage to pairs: a replica of that stage, and the rows that this rank exchanges with
    it, counted from ``start``.
    """

    start: int
    rows: int
    shares: dict[int, Shares]


class StageIO:
    """The channels of one rank's stages, and the rows that are sent through each channel. Call :meth:`begin` before
    each step."""

    def __init__(self, chain: Chain, mesh: Mesh, channels: Channels) -> None:
        self._mesh, self._channels = mesh, channels
        self._receivers: dict[tuple[Kind, int], list[Receiver]] = {}
        self._senders: dict[tuple[Kind, int], list[Sender]] = {}
        self._edges: dict[tuple[Kind, int], Edge] = {}
        self._rowless = {edge: chain.blocks[edge.block].unbatched for edge in mesh.plan.edges()}
        self._summed: dict[Edge, frozenset[int]] = {}  # indices of its gradients without rows
        self._sizes: list[int] = []
        self._parts: list[tuple[int, _Part]] = []
        self._parts_by_size: dict[tuple[int, int | None], _Part] = {}
        for edge in mesh.plan.edges():
            if mesh.plan.is_local(edge):
                continue
            if edge.receiver in mesh.stages:
                self._open(edge, edge.receiver, Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT)
            if edge.sender in mesh.stages:
                self._open(edge, edge.sender, Kind.RECEIVE_GRADIENT, Kind.SEND_ACTIVATION)

    def _open(self, edge: Edge, stage: int, receives: Kind, sends: Kind) -> None:
        """Open the channels of ``edge`` for ``stage``, which is the sender or the receiver of the edge.

        ``receives`` and ``sends`` are the kinds of actions by which ``stage`` uses these channels: receive gradients
        and send activations if it is the edge's sender, receive activations and send gradients otherwise.
        """
        mine, backward = self._mesh.rank, sends is Kind.SEND_GRADIENT
        others = self._mesh.plan.ranks(_other_end(edge, stage))
        self._edges[receives, stage] = self._edges[sends, stage] = edge
        self._receivers[receives, stage] = [
            self._channels.receiver(Route(other, mine, edge, backward=not backward))
            for other in others
        ]
        self._senders[sends, stage] = [
            self._channels.sender(
                Route(mine, other, edge, backward=backward),
                self._mesh.plan.messages_ahead(edge.sender),
            )
            for other in others
        ]

    def begin(self, rows: int, micro_batches: int, share: int | None = None) -> None:
        """Start a step over ``rows`` rows, which are divided into ``micro_batches`` micro-batches.

        By default, this rank computes the rows of its own replica. If ``share`` is given, as for asynchronous replicas,
        it computes the rows of the replica with this index. Then its peers are the ranks that have the same replica
        index as this rank in the adjacent stages.
        """
        bounds = [micro_batch_rows(rows, micro_batches, micro) for micro in range(micro_batches)]
        self._sizes = [high - low for low, high in bounds]
        self._parts = [(low, self._part(high - low, share)) for low, high in bounds]

    def rows(self, micro: int) -> tuple[int, int]:
        """Return the rows of micro-batch ``micro`` that this rank computes: the index of the first row in the global
        batch, and the number of rows."""
        low, part = self._parts[micro]
        return low + part.start, part.rows

    def size(self, micro: int) -> int:
        """Return the number of rows of a micro-batch over all replicas."""
        return self._sizes[micro]

    @property
    def posts(self) -> bool:
        """Whether any channel can post a receive before the message is needed."""
        return any(receiver.posts for ends in self._receivers.values() for receiver in ends)

    def post(self, action: Action) -> None:
        """Post the receives that the receive ``action`` will wait for: one from each peer that shares rows with this
        rank."""
        ends = self._receivers[action.kind, action.stage]
        for other, (low, high) in self._shares(action):
            ends[other].post(high - low)

    def receive(self, action: Action, copy: Copy = torch.clone) -> Tensors | None:
        """Wait for the tensors of the receive ``action`` and return them: None if this rank has no rows, an empty tuple
        if a peer sent no tensors.

        If the tensors come from a single peer, ``copy`` copies them out of the channel's memory. Tensors from several
        peers are copied by their concatenation instead.
        """
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
        if not all(pieces):
            return ()
        for tensors, (_, (low, high)) in zip(pieces, shares):
            _check_rows(action, tensors, high - low, unbatched)
        return tuple(
            [
                parts[0] if index in unbatched else _concatenated(action, parts)
                for index, parts in enumerate(zip(*pieces))
            ]
        )

    def receive_gradients(self, action: Action) -> Gradients | None:
        """Wait for the gradients of the receive ``action`` and return them; None if this rank has no rows.

        If one peer sent None for a tensor and another peer sent a gradient, None counts as zeros.
        """
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
        """Run the send ``action``: send ``tensors``, the outputs of its stage, to all peers. Each peer gets the rows
        that both ranks compute."""
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
        """Run the send ``action``: send ``gradients``, those of its stage's inputs, to all peers. The gradient of a
        tensor without rows is sent only to the first peer, whose copy of the tensor was used."""
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

    def floating(self, edge: Edge, tensors: Tensors) -> list[Tensor]:
        """Return the tensors for which the receiver sends back gradients. ``tensors`` is the message on ``edge``."""
        places = [index for index, tensor in enumerate(tensors) if can_require_grad(tensor)]
        if edge not in self._summed:
            self._summed[edge] = frozenset(
                n for n, index in enumerate(places) if index in self._rowless[edge]
            )
        return [tensors[index] for index in places]

    def flush(self) -> None:
        """Wait until each sent message has been received, or copied to memory that the sender does not change."""
        self._channels.drain()
        for senders in self._senders.values():
            for sender in senders:
                sender.flush()

    def _shares(self, action: Action) -> Shares:
        edge = self._edges[action.kind, action.stage]
        return self._parts[action.micro][1].shares[_other_end(edge, action.stage)]

    def _without_rows(self, action: Action) -> frozenset[int]:
        """Return the indices of the tensors without rows in the message of ``action``."""
        edge = self._edges[action.kind, action.stage]
        if action.kind in _GRADIENTS:  # found by the forward, which precedes its gradients
            return self._summed.get(edge, frozenset())
        return self._rowless[edge]

    def _part(self, size: int, share: int | None) -> _Part:
        """Return the rows that this rank computes of a micro-batch of ``size`` rows. ``share``: see :meth:`begin`.
        Results are cached by size and share, since the micro-batches of a step have at most two sizes."""
        if (size, share) not in self._parts_by_size:
            count, replica, plan = self._mesh.replica_count, self._mesh.replica, self._mesh.plan
            start, stop = replica_rows(size, count, replica if share is None else share)
            others = {_other_end(edge, stage) for (_, stage), edge in self._edges.items()}
            own: Shares = [(replica, (0, stop - start))] if stop > start else []
            shares = {
                other: own
                if share is not None
                else peers(size, count, replica, plan.stages[other].replicas)
                for other in others
            }
            self._parts_by_size[size, share] = _Part(start, stop - start, shares)
        return self._parts_by_size[size, share]


def _other_end(edge: Edge, stage: int) -> int:
    return edge.sender if stage == edge.receiver else edge.receiver


def _concatenated(action: Action, parts: Sequence[Tensor]) -> Tensor:
    """Return ``parts``, the rows from several peers, concatenated. Raises :class:`TransportError`, which names
    ``action``, if the rows have different shapes."""
    sizes = list(dict.fromkeys(tuple(part.shape[1:]) for part in parts))
    if len(sizes) > 1:
        raise TransportError(
            f"{action}: rows of sizes {sizes[0]} and {sizes[1]} arrived from two replicas, and a micro-batch's rows "
            "must have one size: pad them to one size for the whole batch (pad_packed_sequence(total_length=...), or "
            "the batch's longest), or use plan.replicas=1"
        )
    return torch.cat(list(parts))


def _joined(parts: Gradients, counts: Sequence[int]) -> Tensor | None:
    """Return the concatenation of gradients, of ``counts`` rows each. A gradient of None counts as zeros. If all are
    None, return None."""
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
    """Return the summed gradients of a tensor without rows; None if all are None."""
    present = [part for part in parts if part is not None]
    return torch.stack(present).sum(0) if present else None


def _check_rows(action: Action, tensors: Gradients, rows: int, unbatched: frozenset[int]) -> None:
    for index, tensor in enumerate(tensors):
        if tensor is None or index in unbatched:
            continue
        if not tensor.dim() or tensor.shape[0] != rows:
            raise TransportError(
                f"{action}: a tensor of shape {tuple(tensor.shape)} arrived where {rows} rows were expected: every "
                "tensor between blocks must have the micro-batch's rows in its first dimension"
            )

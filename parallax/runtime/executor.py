"""Runs a rank's action list: the same list that the simulator ran on predicted costs.

Between stages only gradients of tensors that can have one travel back. A stage's output does not stay alive for
its backward: the graph's edge does. The input enters the graph through :class:`_Entrance`, which hands its
gradient over instead of keeping the input for it, so a received activation lives only as long as a block has
saved it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallax.events import Span
from parallax.mesh import Edge, Mesh
from parallax.model.describe import as_tuple
from parallax.model.precision import PrecisionConfig
from parallax.model.saved import Selector
from parallax.plan.rows import Interval, micro_batch_rows, peers, replica_rows
from parallax.plan.schedule import Action, Kind
from parallax.runtime.batch import Rows
from parallax.runtime.replicate import GradientSync
from parallax.runtime.stage import Stage, private_random_state
from parallax.runtime.transport import Address, Receiver, Sender, Staging
from parallax.swap.manager import SwapManager

Loss = Callable[[Any, Tensor], Tensor]
_End = TypeVar("_End", Sender, Receiver)


class _Entrance(torch.autograd.Function):
    """Identity whose backward drops the gradients into a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrived: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        del anchor  # requires a gradient, and so the result does
        ctx.arrived = arrived
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.arrived.extend(gradients)
        return (None,) * (2 + len(gradients))


@dataclass
class _Flight:
    """What a micro-batch leaves on a rank between its forward and its backward: the roots of its graph, and of its
    floating inputs the shapes and, after the backward, the gradients."""

    roots: list[Tensor | GradientEdge | None]
    entered: list[tuple[torch.dtype, torch.Size]]
    arrived: list[Tensor]


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of the micro-batches of one size: its first row, counted from theirs, how many it has, and
    the channels they come and go by, each with the rows it carries, counted from this rank's first."""

    start: int
    rows: int
    receivers: dict[Kind, list[tuple[Receiver, Interval]]]
    senders: dict[Kind, list[tuple[Sender, Interval]]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one run of an action list is about. The loss is divided by ``denominator``: the rows of the whole
    batch, or its counted targets."""

    index: int
    batch: Rows
    micro_batches: int
    denominator: float
    training: bool


class Executor:
    """One rank's interpreter of action lists."""

    def __init__(
        self,
        stage: Stage,
        mesh: Mesh,
        loss: Loss,
        precision: PrecisionConfig,
        sync: GradientSync,
        staging: Staging,
        swap: tuple[SwapManager, Selector] | None,
        stall_seconds: Callable[[], float],
    ) -> None:
        self._stage, self._mesh, self._loss, self._precision = stage, mesh, loss, precision
        self._stall_seconds = stall_seconds
        self._sync, self._staging, self._swap = sync, staging, swap
        self._anchor = torch.empty(0, device=mesh.device, requires_grad=True)
        self._losses: list[Tensor] = []
        self._received: dict[int, tuple[Tensor, ...]] = {}
        self._outgoing: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[int, tuple[Tensor, ...]] = {}
        self._flights: dict[int, _Flight] = {}
        self._parts: list[tuple[int, _Part]] = []
        self._parts_by_size: dict[int, _Part] = {}
        ahead = len(mesh.plan.stages)  # 1F1B has no more in flight, so it never waits to send
        below, above = self._ranks(mesh.stage - 1), self._ranks(mesh.stage + 1)

        def edge(sender: int, receiver: int) -> Edge:
            ends = mesh.plan.locate(sender)[0], mesh.plan.locate(receiver)[0]
            return Edge(sender, receiver, min(ends), backward=ends[0] > ends[1])

        def receivers(ranks: tuple[int, ...]) -> dict[int, Receiver]:
            return {r: Receiver(Address(*mesh.channel(edge(r, mesh.rank))), staging) for r in ranks}

        def senders(ranks: tuple[int, ...]) -> dict[int, Sender]:
            return {r: Sender(Address(*mesh.channel(edge(mesh.rank, r))), staging, ahead) for r in ranks}

        self._receivers = {Kind.RECEIVE_ACTIVATION: receivers(below), Kind.RECEIVE_GRADIENT: receivers(above)}
        self._senders = {Kind.SEND_ACTIVATION: senders(above), Kind.SEND_GRADIENT: senders(below)}

    def run(self, actions: Sequence[Action], step: Step, update: Callable[[float], None]) -> list[Span]:
        """Execute ``actions``; at UPDATE call ``update`` with this rank's share of the loss. The spans of it all."""
        spans: list[Span] = []
        self._losses.clear()
        bounds = [micro_batch_rows(len(step.batch), step.micro_batches, m) for m in range(step.micro_batches)]
        self._parts = [(low, self._part(high - low)) for low, high in bounds]
        backwards = [a.micro for a in actions if a.kind is Kind.BACKWARD]
        self._armed = backwards[-1] if backwards and self._all_have_rows(*bounds[backwards[-1]]) else None
        first, following = _posts(actions)
        with private_random_state(self._mesh.device), torch.set_grad_enabled(step.training):
            for receive in first:
                self._post(receive)
            for action, receives in zip(actions, following):
                start = time.perf_counter()
                try:
                    waited = self._execute(action, step, update)
                except Exception as error:
                    error.add_note(f"action {action}")
                    raise
                end = time.perf_counter()
                kind, stage, micro = str(action.kind), action.stage, action.micro
                spans.append(Span(self._mesh.rank, step.index, kind, stage, micro, start, end, waited))
                for receive in receives:
                    self._post(receive)
        self._staging.drain()
        for channels in self._senders.values():
            for channel in channels.values():
                channel.flush()
        return spans

    @property
    def loss_share(self) -> float:
        """This rank's part of the last run's loss; the sum over all ranks is the loss."""
        return float(torch.stack(self._losses).sum(dtype=torch.float64)) if self._losses else 0.0

    def abandon(self) -> None:
        """Forget micro-batches in flight, so that their graphs and swapped data are released."""
        for held in (self._received, self._outgoing, self._gradients, self._flights):
            held.clear()
        self._sync.disarm()

    def _execute(self, action: Action, step: Step, update: Callable[[float], None]) -> float:
        """Run one action; the seconds it only waited."""
        micro = action.micro
        match action.kind:
            case Kind.RECEIVE_ACTIVATION:
                return self._receive(action, self._received)
            case Kind.RECEIVE_GRADIENT:
                return self._receive(action, self._gradients)
            case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                self._send(action)
            case Kind.FETCH:
                if self._swap is not None:
                    self._swap[0].fetch(micro)
            case Kind.FORWARD:
                return self._stalled(lambda: self._forward(step, micro))
            case Kind.BACKWARD:
                return self._stalled(lambda: self._backward(micro))
            case Kind.REDUCE:
                return self._sync.finish()
            case Kind.UPDATE:
                update(self.loss_share)
            case Kind.OFFLOAD:
                pass  # opens the micro-batch for the swap manager, which learns its name with the first saved tensor
        return 0.0

    def _forward(self, step: Step, micro: int) -> None:
        low, part = self._parts[micro]
        first, rows = low + part.start, part.rows
        if rows == 0:
            self._stage.skip()
            return
        received = self._received.pop(micro, None)
        if received is None:
            received = as_tuple(step.batch.inputs(first, first + rows))
        inputs = tuple(tensor.to(self._mesh.device) for tensor in received)
        del received
        flight = _Flight([], [], [])
        if step.training and not self._mesh.is_first:
            inputs = self._enter(inputs, flight)
        outputs = self._stage.run(inputs, where=(step.index, first), micro=micro, swap=self._swap)
        del inputs
        if self._mesh.is_last:
            flight.roots = [self._add_loss(step, outputs, step.batch.targets(first, first + rows), rows)]
        else:
            self._outgoing[micro] = tuple(tensor.detach() for tensor in outputs)
            floating = [tensor for tensor in outputs if tensor.is_floating_point()]
            if step.training:
                flight.roots = [get_gradient_edge(t) if t.requires_grad else None for t in floating]
        if step.training:
            self._flights[micro] = flight

    def _enter(self, inputs: tuple[Tensor, ...], flight: _Flight) -> tuple[Tensor, ...]:
        floating = [tensor for tensor in inputs if tensor.is_floating_point()]
        flight.entered = [(tensor.dtype, tensor.shape) for tensor in floating]
        entering = iter(_Entrance.apply(self._anchor, flight.arrived, *floating) if floating else ())
        return tuple(next(entering) if tensor.is_floating_point() else tensor for tensor in inputs)

    def _add_loss(self, step: Step, outputs: tuple[Tensor, ...], targets: Tensor, rows: int) -> Tensor:
        with self._precision.autocast(self._mesh.device.type):
            value = self._loss(outputs[0] if len(outputs) == 1 else outputs, targets.to(self._mesh.device))
        weight = 1.0 if hasattr(self._loss, "count") else rows
        share = value * (weight / step.denominator)
        self._losses.append(share.detach())
        return share

    def _backward(self, micro: int) -> None:
        flight = self._flights.pop(micro, None)
        if flight is None:
            return
        gradients = self._gradients.pop(micro, None) or (None,) * len(flight.roots)
        pairs = [(root, grad) for root, grad in zip(flight.roots, gradients) if root is not None]
        if micro == self._armed:
            self._sync.arm()
        if pairs:
            roots, arriving = zip(*pairs)
            flight.roots.clear()
            del gradients, pairs
            torch.autograd.backward(roots, arriving)
        if not self._mesh.is_first:
            self._outgoing[micro] = tuple(flight.arrived) or self._zeros(flight)

    def _zeros(self, flight: _Flight) -> tuple[Tensor, ...]:
        """The gradients of inputs that nothing depends on."""
        return tuple(torch.zeros(shape, dtype=t, device=self._mesh.device) for t, shape in flight.entered)

    def _receive(self, action: Action, into: dict[int, tuple[Tensor, ...]]) -> float:
        start = time.perf_counter()
        _, part = self._parts[action.micro]
        pieces = [channel.receive(b - a) for channel, (a, b) in part.receivers[action.kind]]
        waited = time.perf_counter() - start
        if len(pieces) == 1:
            into[action.micro] = pieces[0]
        elif pieces:
            into[action.micro] = tuple(torch.cat(tensors) for tensors in zip(*pieces))
        return waited

    def _send(self, action: Action) -> None:
        tensors = self._outgoing.pop(action.micro, ())
        _, part = self._parts[action.micro]
        for channel, (a, b) in part.senders[action.kind]:
            pieces = [t[a:b] if t.dim() and t.shape[0] != b - a else t for t in tensors]
            if not pieces:  # nothing floats across this edge: the message still keeps the two ends in step
                pieces = [torch.empty(b - a, 0, device=self._mesh.device)]
            channel.send(pieces, b - a)

    def _post(self, action: Action) -> None:
        _, part = self._parts[action.micro]
        for channel, (a, b) in part.receivers[action.kind]:
            channel.post(b - a)

    def _stalled(self, call: Callable[[], None]) -> float:
        before = self._stall_seconds()
        call()
        return self._stall_seconds() - before

    def _ranks(self, stage: int) -> tuple[int, ...]:
        return self._mesh.plan.ranks(stage) if 0 <= stage < len(self._mesh.plan.stages) else ()

    def _all_have_rows(self, low: int, high: int) -> bool:
        return high - low >= self._mesh.replica_count

    def _part(self, size: int) -> _Part:
        """This rank's part of a micro-batch of ``size`` rows; a step has micro-batches of two sizes at most."""
        if size not in self._parts_by_size:
            count, replica = self._mesh.replica_count, self._mesh.replica
            start, stop = replica_rows(size, count, replica)

            def cut(channels: dict[int, _End]) -> list[tuple[_End, Interval]]:
                ends = list(channels.values())
                return [(ends[other], rows) for other, rows in peers(size, count, replica, len(ends))]

            receivers = {kind: cut(channels) for kind, channels in self._receivers.items()}
            senders = {kind: cut(channels) for kind, channels in self._senders.items()}
            self._parts_by_size[size] = _Part(start, stop - start, receivers, senders)
        return self._parts_by_size[size]


def _posts(actions: Sequence[Action]) -> tuple[list[Action], list[list[Action]]]:
    """When the buffers of receives are posted: one message ahead per channel. Those to begin with, the first of each
    kind; and after each action the next of its kind."""
    first: list[Action] = []
    after: list[list[Action]] = [[] for _ in actions]
    last: dict[Kind, int] = {}
    for position, action in enumerate(actions):
        if action.kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT):
            (after[last[action.kind]] if action.kind in last else first).append(action)
            last[action.kind] = position
    return first, after

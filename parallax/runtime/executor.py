"""Runs a rank's action list: the same list that the simulator ran on predicted costs.

Between stages only gradients of tensors that can have one travel back. A stage's output does not stay alive for its
backward: the graph's edge does. The input enters the graph through :class:`_Entrance`, which hands its gradient
over instead of keeping the input for it, so a received activation lives only as long as a block has saved it.
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
from parallax.mesh import Mesh
from parallax.model.describe import as_tuple
from parallax.model.precision import PrecisionConfig
from parallax.model.saved import Selector
from parallax.plan.rows import Interval, micro_batch_rows, peers, replica_rows
from parallax.plan.schedule import Action, Kind
from parallax.runtime.batch import Rows
from parallax.runtime.replicate import GradientSync
from parallax.runtime.stage import Stage, private_random_state
from parallax.runtime.transport import Receiver, Sender, Staging
from parallax.swap.manager import SwapManager

Loss = Callable[[Any, Tensor], Tensor]
_End = TypeVar("_End", Sender, Receiver)


class _Entrance(torch.autograd.Function):
    """Identity whose backward drops the gradients into a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrived: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
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
    ) -> None:
        self._stage, self._mesh, self._loss, self._precision = stage, mesh, loss, precision
        self._sync, self._staging, self._swap = sync, staging, swap
        self._anchor = torch.empty(0, device=mesh.device, requires_grad=True)
        self._total = torch.zeros((), dtype=torch.float64)
        self._received: dict[int, tuple[Tensor, ...]] = {}
        self._outgoing: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[int, tuple[Tensor, ...]] = {}
        self._flights: dict[int, _Flight] = {}
        below, above = 4 * mesh.stage, 4 * mesh.stage + 4  # message tags: four for the edge below each stage
        ahead = len(mesh.plan.stages)  # no more than 1F1B has in flight, so that it never waits
        self._channels: dict[Kind, dict[int, Sender] | dict[int, Receiver]] = {
            Kind.RECEIVE_ACTIVATION: {r: Receiver(r, below, staging) for r in self._ranks(mesh.stage - 1)},
            Kind.SEND_GRADIENT: {r: Sender(r, below + 2, staging, ahead) for r in self._ranks(mesh.stage - 1)},
            Kind.SEND_ACTIVATION: {r: Sender(r, above, staging, ahead) for r in self._ranks(mesh.stage + 1)},
            Kind.RECEIVE_GRADIENT: {r: Receiver(r, above + 2, staging) for r in self._ranks(mesh.stage + 1)},
        }

    def run(self, actions: Sequence[Action], step: Step, update: Callable[[float], None]) -> list[Span]:
        """Execute ``actions``; at UPDATE call ``update`` with this rank's share of the loss. The spans of it all."""
        spans: list[Span] = []
        self._total.zero_()
        backwards = [a.micro for a in actions if a.kind is Kind.BACKWARD]
        self._armed = backwards[-1] if backwards and self._all_have_rows(step, backwards[-1]) else None
        receives = _following_receives(actions)
        with private_random_state(self._mesh.device), torch.set_grad_enabled(step.training):
            for first in receives[None]:
                self._post(first, step)
            for action in actions:
                start = time.perf_counter()
                waited = self._execute(action, step, update)
                end = time.perf_counter()
                kind, stage, micro = str(action.kind), action.stage, action.micro
                spans.append(Span(self._mesh.rank, step.index, kind, stage, micro, start, end, waited))
                for following in receives.get(action, ()):
                    self._post(following, step)
        self._staging.drain()
        for kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            for channel in self._channels[kind].values():
                assert isinstance(channel, Sender)
                channel.flush()
        return spans

    @property
    def loss_share(self) -> float:
        """This rank's part of the last run's loss; the sum over all ranks is the loss."""
        return self._total.item()

    def abandon(self) -> None:
        """Forget micro-batches in flight, so that their graphs and swapped data are released."""
        for held in (self._received, self._outgoing, self._gradients, self._flights):
            held.clear()

    def _execute(self, action: Action, step: Step, update: Callable[[float], None]) -> float:
        """Run one action; the seconds it only waited."""
        micro = action.micro
        match action.kind:
            case Kind.RECEIVE_ACTIVATION:
                return self._receive(action.kind, step, micro, self._received)
            case Kind.RECEIVE_GRADIENT:
                return self._receive(action.kind, step, micro, self._gradients)
            case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                self._send(action.kind, step, micro)
            case Kind.FETCH:
                if self._swap is not None:
                    self._swap[0].fetch(micro)
            case Kind.FORWARD:
                return self._stalled(lambda: self._forward(step, micro))
            case Kind.BACKWARD:
                return self._stalled(lambda: self._backward(step, micro))
            case Kind.REDUCE:
                return self._sync.finish()
            case Kind.UPDATE:
                update(self.loss_share)
            case Kind.OFFLOAD:
                pass  # opens the micro-batch for the swap manager, which learns its name with the first saved tensor
        return 0.0

    def _forward(self, step: Step, micro: int) -> None:
        first, rows = self._rows(step, micro)
        if rows == 0:
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
        self._total += share.detach().to("cpu", torch.float64)
        return share

    def _backward(self, step: Step, micro: int) -> None:
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
            zeros = [torch.zeros(shape, dtype=dtype, device=self._mesh.device) for dtype, shape in flight.entered]
            self._outgoing[micro] = tuple(flight.arrived or zeros)

    def _receive(self, kind: Kind, step: Step, micro: int, into: dict[int, tuple[Tensor, ...]]) -> float:
        start = time.perf_counter()
        parts = [self._channel(kind, rank, Receiver).receive(b - a) for rank, (a, b) in self._shared(kind, step, micro)]
        waited = time.perf_counter() - start
        if len(parts) == 1:
            into[micro] = parts[0]
        elif parts:
            into[micro] = tuple(torch.cat(pieces) for pieces in zip(*parts))
        return waited

    def _send(self, kind: Kind, step: Step, micro: int) -> None:
        tensors = self._outgoing.pop(micro, ())
        for rank, (a, b) in self._shared(kind, step, micro):
            pieces = [t[a:b] if t.dim() and t.shape[0] != b - a else t for t in tensors]
            if not pieces:  # nothing floats across this edge: the message still keeps the two ends in step
                pieces = [torch.empty(b - a, 0, device=self._mesh.device)]
            self._channel(kind, rank, Sender).send(pieces, b - a)

    def _post(self, action: Action, step: Step) -> None:
        for rank, (a, b) in self._shared(action.kind, step, action.micro):
            self._channel(action.kind, rank, Receiver).post(b - a)

    def _stalled(self, call: Callable[[], None]) -> float:
        if self._swap is None:
            call()
            return 0.0
        before = self._swap[0].stall_seconds
        call()
        return self._swap[0].stall_seconds - before

    def _ranks(self, stage: int) -> range:
        return self._mesh.plan.ranks(stage) if 0 <= stage < len(self._mesh.plan.stages) else range(0)

    def _rows(self, step: Step, micro: int) -> tuple[int, int]:
        """This rank's first row in the global batch, and how many it has, of a micro-batch."""
        low, high = micro_batch_rows(len(step.batch), step.micro_batches, micro)
        start, stop = replica_rows(high - low, self._mesh.replica_count, self._mesh.replica)
        return low + start, stop - start

    def _all_have_rows(self, step: Step, micro: int) -> bool:
        low, high = micro_batch_rows(len(step.batch), step.micro_batches, micro)
        return high - low >= self._mesh.replica_count

    def _shared(self, kind: Kind, step: Step, micro: int) -> list[tuple[int, Interval]]:
        """The neighbour ranks of an edge and, counted from this rank's first, the rows that go over each channel."""
        backwards = kind in (Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT)
        ranks = self._ranks(self._mesh.stage + (-1 if backwards else 1))
        low, high = micro_batch_rows(len(step.batch), step.micro_batches, micro)
        found = peers(high - low, self._mesh.replica_count, self._mesh.replica, len(ranks))
        return [(ranks[other], interval) for other, interval in found]

    def _channel(self, kind: Kind, rank: int, end: type[_End]) -> _End:
        channel = self._channels[kind][rank]
        assert isinstance(channel, end)
        return channel


def _following_receives(actions: Sequence[Action]) -> dict[Action | None, list[Action]]:
    """After which action the buffers of which receive are posted: one message ahead per channel; the first of each
    kind before anything else (key None)."""
    result: dict[Action | None, list[Action]] = {None: []}
    last: dict[Kind, Action] = {}
    for action in actions:
        if action.kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT):
            result.setdefault(last.get(action.kind), []).append(action)
            last[action.kind] = action
    return result

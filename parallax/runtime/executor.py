"""Runs a rank's action list: the same list that the simulator ran on predicted costs.

Between stages only gradients of tensors that can have one travel back. A stage's output does not stay alive for
its backward: the graph's edge does. The input enters the graph through :class:`_Entrance`, which hands its
gradient over instead of keeping the input for it, so a received activation lives only as long as a block has
saved it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallax.errors import TransportError
from parallax.events import Span
from parallax.mesh import Edge, Mesh
from parallax.model.describe import Chain
from parallax.model.halves import Halves
from parallax.model.precision import PrecisionConfig
from parallax.model.saved import Selector
from parallax.plan.rows import Interval, micro_batch_rows, peers, replica_rows
from parallax.plan.schedule import Action, Kind, in_flight
from parallax.runtime.batch import Rows, to_device
from parallax.runtime.replicate import GradientSync
from parallax.runtime.stage import Stage, private_random_state
from parallax.runtime.transport import Channels, Receiver, Sender
from parallax.swap.manager import SwapManager

Loss = Callable[[Any, Any], Tensor]
Keep = Callable[[int, Any], None]
Tensors = tuple[Tensor, ...]
Key = tuple[int, int]  # stage, micro-batch
Now = tuple[Action, int, float]  # what is done, in which step, and since when
_GRADIENTS = (Kind.RECEIVE_GRADIENT, Kind.SEND_GRADIENT)


class _Entrance(torch.autograd.Function):
    """The inputs themselves, from now on in the graph; the backward drops their gradients into a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, arrived: list[Tensor], *tensors: Tensor) -> Tensors:
        del anchor  # requires a gradient, and so the result does
        ctx.arrived = arrived
        ctx.mark_dirty(*tensors)  # no views: a block may change its input in place
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.arrived.extend(gradients)
        return (None,) * (2 + len(gradients))


@dataclass(slots=True)
class _Flight:
    """What a micro-batch leaves on a stage between its forward and its backward: the roots of its graph, what its
    weights are owed, and of its floating inputs the shapes and, after the backward, the gradients."""

    roots: list[Tensor | GradientEdge | None] = field(default_factory=list)
    entered: list[tuple[torch.dtype, torch.Size]] = field(default_factory=list)
    arrived: list[Tensor] = field(default_factory=list)
    halves: Halves | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of the micro-batches of one size: its first row, counted from theirs, how many it has, and by
    the replica at the other end the rows that go to the stage below, and above, counted from this rank's first."""

    start: int
    rows: int
    below: dict[int, list[tuple[int, Interval]]]
    above: dict[int, list[tuple[int, Interval]]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one run of an action list is about. The loss is divided by ``denominator``: the rows of the whole
    batch, or its counted targets; its gradient is multiplied by ``scale``. Outputs of the model are given to ``keep``
    with the first of their rows, where there is one; there are no targets then."""

    index: int
    batch: Rows
    micro_batches: int
    denominator: float
    training: bool
    scale: float = 1.0
    keep: Keep | None = None


class Program:
    """An action list with what can be said of it before it runs. A receive is posted one message ahead per channel:
    ``first`` are those to begin with, ``following[n]`` what the n-th action is followed by. ``last`` holds each stage's
    last backward, and last weight half."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = list(actions)
        self.splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
        ends = {(a.stage, a.kind): a for a in actions if a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
        self.last = set(ends.values())
        self.first: list[Action] = []
        self.following: list[list[Action]] = [[] for _ in actions]
        latest: dict[tuple[int, Kind], int] = {}
        for position, action in enumerate(actions):
            if action.kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT):
                channel = action.stage, action.kind
                (self.following[latest[channel]] if channel in latest else self.first).append(action)
                latest[channel] = position


class Executor:
    """One rank's interpreter of action lists. ``current`` is what it does now, or failed in, for whoever watches it."""

    def __init__(
        self,
        chain: Chain,
        stage: Stage,
        mesh: Mesh,
        loss: Loss,
        precision: PrecisionConfig,
        sync: GradientSync,
        channels: Channels,
        swap: tuple[SwapManager, Selector] | None,
        stall_seconds: Callable[[], float],
    ) -> None:
        self.current: Now | None = None
        self._chain, self._stage, self._mesh, self._loss, self._precision = chain, stage, mesh, loss, precision
        self._stall_seconds = stall_seconds
        self._sync, self._channels, self._swap = sync, channels, swap
        self._last_stage = len(mesh.plan.stages) - 1
        self._anchor = torch.empty(0, device=mesh.device, requires_grad=True)
        self._losses: list[Tensor] = []
        self._received: dict[Key, Tensors] = {}
        self._outgoing: dict[Key, Tensors] = {}
        self._gradients: dict[Key, Tensors] = {}
        self._flights: dict[Key, _Flight] = {}
        self._parts: list[tuple[int, _Part]] = []
        self._parts_by_size: dict[int, _Part] = {}
        self._receivers: dict[tuple[Kind, int], list[Receiver]] = {}
        self._senders: dict[tuple[Kind, int], list[Sender]] = {}
        self._sizes: list[int] = []
        self._summed: dict[int, set[int]] = {}  # stage before a cut → which of its gradients have no rows
        for number in mesh.stages:
            self._open_channels(number)

    def _open_channels(self, stage: int) -> None:
        plan, mine = self._mesh.plan, self._mesh.rank
        # A channel never has more under way than micro-batches are in flight, so a send does not wait.
        count, most = len(plan.stages), plan.micro_batches(plan.global_batch)

        def ahead(cut: int) -> int:
            return (
                count if plan.schedule == "gpipe" else 1 + in_flight(plan.schedule, count, cut, most, plan.interleave)
            )

        if stage > 0:
            below = plan.ranks(stage - 1)
            self._receivers[Kind.RECEIVE_ACTIVATION, stage] = [
                self._channels.receiver(Edge(rank, mine, stage - 1, backward=False)) for rank in below
            ]
            self._senders[Kind.SEND_GRADIENT, stage] = [
                self._channels.sender(Edge(mine, rank, stage - 1, backward=True), ahead(stage - 1)) for rank in below
            ]
        if stage < self._last_stage:
            above = plan.ranks(stage + 1)
            self._receivers[Kind.RECEIVE_GRADIENT, stage] = [
                self._channels.receiver(Edge(rank, mine, stage, backward=True)) for rank in above
            ]
            self._senders[Kind.SEND_ACTIVATION, stage] = [
                self._channels.sender(Edge(mine, rank, stage, backward=False), ahead(stage)) for rank in above
            ]

    def run(self, program: Program, step: Step, update: Callable[[float], None]) -> list[Span]:
        """Execute ``program``; at UPDATE call ``update`` with this rank's share of the loss. The spans of it all."""
        spans: list[Span] = []
        rank, index, clock, execute = self._mesh.rank, step.index, time.perf_counter, self._execute
        self._losses.clear()
        bounds = [micro_batch_rows(len(step.batch), step.micro_batches, m) for m in range(step.micro_batches)]
        self._sizes = [high - low for low, high in bounds]
        self._parts = [(low, self._part(high - low)) for low, high in bounds]
        with private_random_state(self._mesh.device), torch.set_grad_enabled(step.training):
            for receive in program.first:
                self._post(receive)
            for action, receives in zip(program.actions, program.following):
                start = clock()
                self.current = action, index, start
                try:
                    waited = execute(action, step, program, update)
                except Exception as error:
                    error.add_note(f"action {action}")
                    raise
                spans.append(Span(rank, index, action.kind, action.stage, action.micro, start, clock(), waited))
                for receive in receives:
                    self._post(receive)
        self.current = None
        self._channels.drain()
        for senders in self._senders.values():
            for sender in senders:
                sender.flush()
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

    def _execute(self, action: Action, step: Step, program: Program, update: Callable[[float], None]) -> float:
        """Run one action; the seconds it only waited."""
        match action.kind:
            case Kind.RECEIVE_ACTIVATION:
                return self._receive(action, self._received)
            case Kind.RECEIVE_GRADIENT:
                return self._receive(action, self._gradients)
            case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                self._send(action)
            case Kind.FETCH:
                if self._swap is not None:
                    self._swap[0].fetch(self._name(action))
            case Kind.FORWARD:
                before = self._stall_seconds()
                self._forward(step, action, split=program.splits)
                return self._stall_seconds() - before
            case Kind.BACKWARD:
                before = self._stall_seconds()
                self._backward(action, announce=not program.splits and self._ends(action, program))
                return self._stall_seconds() - before
            case Kind.BACKWARD_WEIGHT:
                self._backward_weight(action, announce=self._ends(action, program))
            case Kind.REDUCE:
                return self._sync.finish()
            case Kind.UPDATE:
                update(self.loss_share)
            case Kind.OFFLOAD:
                pass  # opens the micro-batch for the swap manager, which learns its name with the first saved tensor
        return 0.0

    def _ends(self, action: Action, program: Program) -> bool:
        """Whether a stage's gradients are complete after ``action``, on all its replicas."""
        return action in program.last and self._parts[action.micro][1].rows > 0 and self._all_have_rows(action.micro)

    def _name(self, action: Action) -> int:
        """What the swap manager calls a micro-batch on one of the stages here."""
        return action.micro + len(self._parts) * (action.stage // self._mesh.plan.positions)

    def _forward(self, step: Step, action: Action, *, split: bool) -> None:
        stage, micro = action.stage, action.micro
        low, part = self._parts[micro]
        first, rows = low + part.start, part.rows
        if rows == 0:
            self._stage.skip()
            return
        flight = _Flight(halves=Halves(self._mesh.device) if split else None)
        if stage == 0:
            arguments = self._chain.arguments(step.batch.inputs(first, first + rows))
            inputs = tuple(tensor.to(self._mesh.device) for tensor in arguments)
        else:
            inputs = self._received.pop((stage, micro))
            if step.training:
                inputs = self._enter(stage, inputs, flight)
        outputs = self._stage.run(
            stage,
            inputs,
            where=(step.index, first),
            micro=self._name(action),
            swap=self._swap,
            halves=flight.halves,
        )
        del inputs
        if stage < self._last_stage:
            self._leave(step, action, outputs, flight)
        elif step.keep is not None:
            step.keep(first, self._chain.results(outputs))
        else:
            flight.roots = [self._add_loss(step, outputs, step.batch.targets(first, first + rows), rows)]
        if step.training:
            self._flights[stage, micro] = flight

    def _enter(self, stage: int, inputs: Tensors, flight: _Flight) -> Tensors:
        floating = self._cross(stage - 1, inputs)
        flight.entered = [(tensor.dtype, tensor.shape) for tensor in floating]
        if not floating:
            return inputs
        entering = iter(_Entrance.apply(self._anchor, flight.arrived, *floating))
        return tuple(next(entering) if tensor.is_floating_point() else tensor for tensor in inputs)

    def _leave(self, step: Step, action: Action, outputs: Tensors, flight: _Flight) -> None:
        """Make outputs ready to be sent, and their places in the graph to be found again."""
        wanted = self._precision.boundary_dtype
        if wanted is not None:
            outputs = tuple(tensor.to(wanted) if tensor.is_floating_point() else tensor for tensor in outputs)
        self._outgoing[action.stage, action.micro] = tuple(tensor.detach() for tensor in outputs)
        if step.training:
            floating = self._cross(action.stage, outputs)
            flight.roots = [get_gradient_edge(t) if t.requires_grad else None for t in floating]

    def _add_loss(self, step: Step, outputs: Tensors, targets: Any, rows: int) -> Tensor:
        with self._precision.autocast(self._mesh.device.type):
            value = self._loss(self._chain.results(outputs), to_device(targets, self._mesh.device))
        weight = 1.0 if hasattr(self._loss, "count") else rows
        share = value.to(torch.promote_types(value.dtype, torch.float32)) * (weight / step.denominator)
        self._losses.append(share.detach())
        return share * step.scale if step.scale != 1 else share

    def _backward(self, action: Action, *, announce: bool) -> None:
        key = action.stage, action.micro
        flight = self._flights.get(key)
        if flight is None:
            return
        if flight.halves is None:
            del self._flights[key]
        gradients = self._gradients.pop(key, None) or (None,) * len(flight.roots)
        pairs = [(root, grad) for root, grad in zip(flight.roots, gradients) if root is not None]
        flight.roots = []
        if announce:
            self._sync.arm(action.stage)
        if pairs:
            roots, arriving = zip(*pairs)
            del gradients, pairs
            torch.autograd.backward(roots, arriving)
        if action.stage > 0:
            self._outgoing[key] = tuple(flight.arrived) or self._zeros(flight)
            flight.arrived = []

    def _backward_weight(self, action: Action, *, announce: bool) -> None:
        flight = self._flights.pop((action.stage, action.micro), None)
        if flight is None or flight.halves is None:
            return
        flight.halves.finish(self._sync.split(action.stage, flight.halves.owes()) if announce else None)

    def _zeros(self, flight: _Flight) -> Tensors:
        """The gradients of inputs that nothing depends on."""
        return tuple(torch.zeros(shape, dtype=t, device=self._mesh.device) for t, shape in flight.entered)

    def _receive(self, action: Action, into: dict[Key, Tensors]) -> float:
        start = time.perf_counter()
        ends = self._receivers[action.kind, action.stage]
        shares = self._shares(action)
        pieces = [ends[other].receive(b - a) for other, (a, b) in shares]
        waited = time.perf_counter() - start
        if pieces:
            into[action.stage, action.micro] = self._join(action, pieces, shares)
        return waited

    def _join(self, action: Action, pieces: list[Tensors], shares: list[tuple[int, Interval]]) -> Tensors:
        """One tuple of tensors from what each peer sent: rows one after the other; what has no rows comes from the
        first peer, but its gradients are added up."""
        rowless = self._without_rows(action)
        for tensors, (_, (a, b)) in zip(pieces, shares):
            for index, tensor in enumerate(tensors):
                if index not in rowless and tensor.shape[:1] != (b - a,) and tensor.numel():
                    raise TransportError(
                        f"{action}: {tuple(tensor.shape)} arrived where {b - a} rows were due: every tensor between "
                        "blocks must have the micro-batch's rows in its first dimension"
                    )
        if len(pieces) == 1:
            return pieces[0]
        joined = []
        for index, parts in enumerate(zip(*pieces)):
            if index not in rowless:
                joined.append(torch.cat(parts))
            elif action.kind in _GRADIENTS:
                joined.append(torch.stack(parts).sum(0))
            else:
                joined.append(parts[0])
        return tuple(joined)

    def _send(self, action: Action) -> None:
        tensors = self._outgoing.pop((action.stage, action.micro), ())
        ends = self._senders[action.kind, action.stage]
        shares = self._shares(action)
        if not shares:
            return
        if len(shares) == 1:
            other, (a, b) = shares[0]
            ends[other].send(tensors, b - a)
            return
        rowless = self._without_rows(action)
        for count, (other, (a, b)) in enumerate(shares):
            pieces = []
            for index, tensor in enumerate(tensors):
                if index not in rowless:
                    pieces.append(tensor[a:b])
                elif count and action.kind in _GRADIENTS:  # this one's copy was not the one that was used
                    pieces.append(torch.zeros_like(tensor))
                else:
                    pieces.append(tensor)
            ends[other].send(pieces, b - a)

    def _shares(self, action: Action) -> list[tuple[int, Interval]]:
        """The peers of a send or receive, and the rows that each has a part in, counted from this rank's first."""
        part = self._parts[action.micro][1]
        forth = action.kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT)
        return (part.above if forth else part.below)[action.stage]

    def _without_rows(self, action: Action) -> frozenset[int] | set[int]:
        """Which of the tensors that a send or receive is about have no rows."""
        forth = action.kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT)
        cut = action.stage if forth else action.stage - 1
        return self._summed[cut] if action.kind in _GRADIENTS else self._rowless(cut)

    def _rowless(self, cut: int) -> frozenset[int]:
        return self._chain.blocks[self._mesh.plan.stages[cut].stop - 1].rowless

    def _cross(self, cut: int, tensors: Tensors) -> list[Tensor]:
        """Those of the ``tensors`` that cross a cut whose gradients come back."""
        places = [index for index, tensor in enumerate(tensors) if tensor.is_floating_point()]
        if cut not in self._summed:
            self._summed[cut] = {count for count, index in enumerate(places) if index in self._rowless(cut)}
        return [tensors[index] for index in places]

    def _post(self, action: Action) -> None:
        ends = self._receivers[action.kind, action.stage]
        for other, (a, b) in self._shares(action):
            ends[other].post(b - a)

    def _all_have_rows(self, micro: int) -> bool:
        return self._sizes[micro] >= self._mesh.replica_count

    def _part(self, size: int) -> _Part:
        """This rank's part of a micro-batch of ``size`` rows; a step has micro-batches of two sizes at most."""
        if size not in self._parts_by_size:
            count, replica, plan = self._mesh.replica_count, self._mesh.replica, self._mesh.plan
            start, stop = replica_rows(size, count, replica)

            def cut(stage: int) -> list[tuple[int, Interval]]:
                return peers(size, count, replica, plan.stages[stage].replicas)

            below = {stage: cut(stage - 1) for stage in self._mesh.stages if stage > 0}
            above = {stage: cut(stage + 1) for stage in self._mesh.stages if stage < self._last_stage}
            self._parts_by_size[size] = _Part(start, stop - start, below, above)
        return self._parts_by_size[size]

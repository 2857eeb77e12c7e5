"""Runs a rank's action list: the same list that the simulator ran on predicted costs.

Between stages only gradients of tensors that can have one travel back. A stage's output does not stay alive for
its backward: the graph's edge does. Nor does the graph keep an input for the sake of its gradient: a received
activation lives only as long as a block has saved it. Along a local edge the sending stage
gives the receiving one what it has left, and gets the gradients from it: no action of the list is about that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from parallax.common.events import Span
from parallax.machine.device import private_random_state
from parallax.mesh import Mesh
from parallax.model.block import with_own_storage
from parallax.model.describe import Chain
from parallax.model.precision import PrecisionConfig
from parallax.model.saved import Selector
from parallax.model.split_backward import WeightGradStore
from parallax.plan.edge import Edge
from parallax.plan.schedule import Action, Kind
from parallax.plan.schedule.action import COMPUTE
from parallax.runtime.batch import Rows
from parallax.runtime.channels.message import Gradients, Tensors
from parallax.runtime.channels.stage_io import StageIO
from parallax.runtime.channels.transport import Channels
from parallax.runtime.entry import GraphEntry
from parallax.runtime.health.row_check import RowCheck
from parallax.runtime.inputs import ModelInputs, Part
from parallax.runtime.loss import Roots, StepLoss
from parallax.runtime.meters.spans import SpanClock
from parallax.runtime.replicas.replicate import GradientSync
from parallax.runtime.stage import MicroBatchContext, Stage
from parallax.runtime.update import Update
from parallax.swap.activations.manager import SwapManager

Keep = Callable[[int, Any], None]
Key = tuple[int, int, int]  # step, stage, micro-batch
CurrentAction = tuple[Action, int, float]  # what is done, in which step, and since when


@dataclass(slots=True)
class _Flight:
    """What a micro-batch leaves on a stage between its forward and its backward: the roots of its graph, where its
    inputs entered it, and what its weights are owed."""

    roots: Roots = ()
    entry: GraphEntry | None = None
    halves: WeightGradStore | None = None


class RankProgram:
    """An action list with what can be said of it before it runs. A receive is posted one message ahead per channel:
    ``first`` are those to begin with, ``following[n]`` what the n-th action is followed by. ``last`` holds each stage's
    last forward, last backward, and last weight half."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = list(actions)
        self.splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
        self.updates = any(action.kind is Kind.UPDATE for action in actions)
        ends = {(a.step, a.stage, a.kind): a for a in actions if a.kind in COMPUTE}
        self.last = set(ends.values())
        self.first: list[Action] = []
        self.following: list[list[Action]] = [[] for _ in actions]
        latest: dict[tuple[int, Kind], int] = {}
        for index, action in enumerate(actions):
            if action.kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT):
                channel = action.stage, action.kind
                (self.following[latest[channel]] if channel in latest else self.first).append(
                    action
                )
                latest[channel] = index


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What one run of a program is about. The loss is divided by ``denominator``: the rows of the whole batch, or its
    counted targets; its gradient is multiplied by ``scale``. With ``keep`` there are no targets: outputs of the model
    are given to it with the first of their rows."""

    index: int
    batch: Rows
    micro_batches: int
    denominator: float
    program: RankProgram
    training: bool
    scale: float = 1.0
    keep: Keep | None = None


class Executor:
    """One rank's interpreter of action lists. ``current`` is what it does now, or failed in, for whoever watches it."""

    def __init__(
        self,
        chain: Chain,
        stage: Stage,
        mesh: Mesh,
        loss: StepLoss,
        precision: PrecisionConfig,
        sync: GradientSync,
        channels: Channels,
        swap: tuple[SwapManager, Selector] | None,
        inputs: ModelInputs,
        stall_seconds: Callable[[], float],
        spans: SpanClock,
        update: Update,
    ) -> None:
        self.current: CurrentAction | None = None
        self._chain, self._stage, self._mesh, self._loss = chain, stage, mesh, loss
        self._device, self._boundary = mesh.device, precision.boundary_dtype
        self._stall_seconds, self._sync, self._swap = stall_seconds, sync, swap
        self._spans, self._inputs, self._weights = spans, inputs, update
        self._crossings = StageIO(chain, mesh, channels)
        self._last_stage = len(mesh.plan.stages) - 1
        self._turn = {stage: turn for turn, stage in enumerate(mesh.stages)}
        self._plan = mesh.plan
        self._anchor = torch.empty(0, device=mesh.device, requires_grad=True)
        self._received: dict[Key, tuple[Tensors, GraphEntry | None]] = {}
        self._outgoing: dict[Key, Tensors] = {}
        self._gradients: dict[Key, Gradients] = {}
        self._outgoing_gradients: dict[Key, Gradients] = {}
        self._flights: dict[Key, _Flight] = {}
        self.row_check = RowCheck(chain.dtype)

    def run(self, step: StepContext) -> list[Span]:
        """Execute the program of ``step``; the spans that are known by then of training steps, this one's and what was
        missing of the one before."""
        rank, index = self._mesh.rank, step.index
        spans = self._spans if step.training else self._spans.aside()
        post, ahead = self._crossings.post, self._crossings.posts
        name = "the batch of" if step.training else "a batch that is evaluated at"
        given, batch = step.batch, self.row_check.of(step.batch, f"{name} step {index}")
        step = replace(step, batch=batch)
        if step.program.updates:
            self._weights.begin(given)
        self._loss.begin()
        self._crossings.begin(len(step.batch), step.micro_batches)
        with private_random_state(self._device), torch.set_grad_enabled(step.training):
            self._inputs.begin(step.batch, self._parts_of_model(step.program))
            for receive in step.program.first:
                post(receive)
            for action, receives in zip(step.program.actions, step.program.following):
                self.current = action, index + action.step, spans.begin()
                try:
                    waited = _DO[action.kind](self, action, step)
                except Exception as error:
                    error.add_note(f"action {action}")
                    raise
                spans.end(rank, index + action.step, action, waited)
                if ahead:
                    for receive in receives:
                        post(receive)
        self.current = None
        if step.keep is not None and 0 in self._mesh.stages:
            # No number is read, which would wait for all.
            self._inputs.landed()
        self._crossings.flush()
        return spans.take()

    @property
    def loss_share(self) -> Tensor:
        """This rank's part of the last run's loss, on its device; the sum over all ranks is the loss."""
        return self._loss.share

    def abandon(self) -> None:
        """Forget micro-batches in flight, so that their graphs and swapped data are released."""
        for held in (
            self._received,
            self._outgoing,
            self._gradients,
            self._outgoing_gradients,
            self._flights,
        ):
            held.clear()
        self._loss.abandon()
        self._inputs.abandon()
        self._sync.disarm()

    # ---- actions; each gives the seconds it only waited

    def _receive(self, action: Action, step: StepContext) -> float:
        start = time.perf_counter()
        key = _key(action)
        if action.kind is Kind.RECEIVE_GRADIENT:
            if (gradients := self._crossings.receive_gradients(action)) is not None:
                self._gradients[key] = gradients
            return time.perf_counter() - start
        entry = GraphEntry(self._anchor) if step.training else None
        inputs = self._crossings.receive(action, entry.copy if entry is not None else torch.clone)
        if inputs is not None:
            self._received[key] = inputs, entry
        return time.perf_counter() - start

    def _send(self, action: Action, step: StepContext) -> float:
        del step
        key = _key(action)
        if action.kind is Kind.SEND_GRADIENT:
            self._crossings.send_gradients(action, self._outgoing_gradients.pop(key, ()))
        else:
            self._crossings.send(action, self._outgoing.pop(key, ()))
        return 0.0

    def _fetch(self, action: Action, step: StepContext) -> float:
        if self._swap is not None:
            self._swap[0].fetch(self._name(action, step))
        return 0.0

    def _forward(self, action: Action, step: StepContext) -> float:
        before, waited = self._stall_seconds(), 0.0
        first, rows = self._crossings.rows(action.micro)
        if rows:
            self._run_forward(action, step, first, rows)
        else:
            self._stage.skip()
        if action.stage == self._last_stage and action in step.program.last and step.keep is None:
            waited = self._loss.complete(step)
        return self._stall_seconds() - before + waited

    def _run_forward(self, action: Action, step: StepContext, first: int, rows: int) -> None:
        stage, micro = action.stage, action.micro
        flight = _Flight(halves=WeightGradStore(self._device) if step.program.splits else None)
        entering, leaving = self._plan.entering(stage), self._plan.leaving(stage)
        if entering is None:
            inputs = self._chain.arguments(with_own_storage(self._inputs.take((first, rows))))
        else:
            inputs, flight.entry = self._received.pop(_key(action))
            if flight.entry is not None:
                inputs = flight.entry.enter(inputs, self._crossings.floating(entering, inputs))
        outputs = self._stage.run(
            stage,
            inputs,
            where=MicroBatchContext(step.index, first, rows, self._crossings.size(micro)),
            micro=self._name(action, step),
            swap=self._swap,
            halves=flight.halves,
        )
        del inputs
        if leaving is not None:
            self._leave(action, leaving, outputs, flight, training=step.training)
        elif step.keep is not None:
            step.keep(first, self._chain.results(outputs))
        else:
            flight.roots = self._loss.add(step, micro, first, first + rows, outputs)
        if step.training:
            self._flights[_key(action)] = flight

    def _backward(self, action: Action, step: StepContext) -> float:
        key = _key(action)
        flight = self._flights.get(key)
        if flight is None:  # no rows of this micro-batch are here
            if not step.program.splits and self._completes(action, step):
                self._sync.arm(action.stage)
                self._sync.ended(action.stage)
            return 0.0
        before = self._stall_seconds()
        announced = flight.halves is None and self._completes(action, step)
        if flight.halves is None:
            del self._flights[key]
        if announced:
            self._sync.arm(action.stage)
        gradients = (
            self._loss.gradients(action.micro)
            if action.stage == self._last_stage
            else self._gradients.pop(key, ())
        )
        pairs = [
            (root, gradient)
            for root, gradient in zip(flight.roots, gradients)
            if root is not None and gradient is not None
        ]
        flight.roots = ()
        if pairs:
            roots, arriving = zip(*pairs)
            del gradients, pairs
            torch.autograd.backward(roots, arriving)
            if flight.halves is not None:
                flight.halves.separate_gradients(self._stage.parameters_of(action.stage))
        if announced:
            self._sync.ended(action.stage)
        if flight.entry is not None:
            left, entering = flight.entry.take_gradients(), self._plan.entering(action.stage)
            if entering is not None and self._plan.is_local(entering):
                self._gradients[action.step, entering.sender, action.micro] = left
            else:
                self._outgoing_gradients[key] = left
        return self._stall_seconds() - before

    def _backward_weight(self, action: Action, step: StepContext) -> float:
        flight = self._flights.pop(_key(action), None)
        completes = self._completes(action, step)
        if flight is None:
            if completes:
                self._sync.split(action.stage, ())
        elif flight.halves is not None:
            flight.halves.finish(
                self._sync.split(action.stage, flight.halves.pending_parameters())
                if completes
                else None
            )
        return 0.0

    def _reduce(self, action: Action, step: StepContext) -> float:
        del action, step
        return self._sync.finish()

    def _update(self, action: Action, step: StepContext) -> float:
        self._weights.run(step.index + action.step, self.loss_share)
        return 0.0

    # ---- parts of actions

    def _parts_of_model(self, program: RankProgram) -> Iterator[Part]:
        """The rows that the model's first stage computes on here, micro-batch by micro-batch."""
        for action in program.actions:
            if action.kind is Kind.FORWARD and action.stage == 0:
                part = self._crossings.rows(action.micro)
                if part[1]:
                    yield part

    def _completes(self, action: Action, step: StepContext) -> bool:
        """Whether a stage's gradients are complete after ``action``."""
        return action in step.program.last

    def _name(self, action: Action, step: StepContext) -> int:
        """What the swap manager calls a micro-batch on one of the stages here."""
        turn = self._turn[action.stage] + action.step * len(self._turn)
        return action.micro + step.micro_batches * turn

    def _leave(
        self, action: Action, edge: Edge, outputs: Tensors, flight: _Flight, *, training: bool
    ) -> None:
        """Make outputs ready to be sent, and their places in the graph to be found again."""
        if self._boundary is not None:
            # Not what has no gradient: the lowest number of fp32, as masks have it, is -inf in fewer bytes. And complex
            # numbers stay as they are.
            outputs = tuple(
                tensor.to(self._boundary)
                if tensor.requires_grad and tensor.is_floating_point()
                else tensor
                for tensor in outputs
            )
        left = tuple(tensor.detach() for tensor in outputs)
        if self._plan.is_local(edge):
            self._hand_over((action.step, edge.receiver, action.micro), left, training=training)
        else:
            self._outgoing[_key(action)] = left
        if training:
            floating = self._crossings.floating(edge, outputs)
            flight.roots = [
                get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in floating
            ]

    def _hand_over(self, key: Key, left: Tensors, *, training: bool) -> None:
        """Give a stage on this rank what another one here has left, as a channel would: a copy of its own, for the
        graph of the sender may have saved these, and a block may change its input in place."""
        entry = GraphEntry(self._anchor) if training else None
        inputs = left if entry is None else tuple(map(entry.copy, left))
        self._received[key] = inputs, entry


def _key(action: Action) -> Key:
    return action.step, action.stage, action.micro


_DO: dict[Kind, Callable[[Executor, Action, StepContext], float]] = {
    Kind.RECEIVE_ACTIVATION: Executor._receive,
    Kind.RECEIVE_GRADIENT: Executor._receive,
    Kind.SEND_ACTIVATION: Executor._send,
    Kind.SEND_GRADIENT: Executor._send,
    Kind.FETCH: Executor._fetch,
    Kind.FORWARD: Executor._forward,
    Kind.BACKWARD: Executor._backward,
    Kind.BACKWARD_WEIGHT: Executor._backward_weight,
    Kind.REDUCE: Executor._reduce,
    Kind.UPDATE: Executor._update,
}

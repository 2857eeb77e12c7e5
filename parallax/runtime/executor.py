"""Runs a rank's list of actions (forwards, backwards, sends, receives, …). The simulator runs the same list on
predicted costs.

A stage sends back gradients only for tensors that can have one. To save memory, the backward of a stage starts from
gradient edges, not from the outputs, and the graph does not keep inputs alive: a received activation is freed as soon
as no block has saved it. Two stages on the same rank pass outputs and gradients to each other directly, without send
and receive actions.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
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
from parallax.runtime.meters.spans import SpanClock, TimedRows
from parallax.runtime.replicas.buckets import Reduced
from parallax.runtime.replicas.replicate import GradientSync
from parallax.runtime.stage import MicroBatchContext, Stage
from parallax.runtime.update import Update
from parallax.swap.activations.manager import SwapManager

Keep = Callable[[int, Any], None]
Key = tuple[int, int, int]  # step, stage, micro-batch
CurrentAction = tuple[Action, int, float]  # the action, its step, its start by time.perf_counter


@dataclass(slots=True)
class _InFlight:
    """A micro-batch of a stage between forward and backward. ``roots``: the tensors at which the backward starts.
    ``entry``: collects the gradients of the inputs. ``weight_gradients``: the deferred weight-gradient pass of a split
    backward."""

    roots: Roots = ()
    entry: GraphEntry | None = None
    weight_gradients: WeightGradStore | None = None


class RankProgram:
    """A list of actions, analysed once before it runs.

    ``first``         receives to post before the first action
    ``following[n]``  receives to post after action n, so that each is posted before its message is needed
    ``last``          the last forward, backward and weight-gradient pass of each stage, without those of the next step
    ``repeated``      passes that are followed by a pass of the same kind and stage
    ``continues``     whether the list begins the next step
    ``accumulates``   whether backwards of the next step precede the update
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = list(actions)
        self.splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
        self.updates = any(action.kind is Kind.UPDATE for action in actions)
        # Passes of a next step are its first ones.
        ends = {(a.stage, a.kind): a for a in actions if a.kind in COMPUTE and not a.step}
        self.continues = any(action.step for action in actions)
        self.accumulates = any(a.step and a.kind is Kind.BACKWARD for a in actions)
        self.last = set(ends.values())
        computed = [action for action in actions if action.kind in COMPUTE]
        self.repeated = {
            action
            for action, after in pairwise(computed)
            if (action.kind, action.stage) == (after.kind, after.stage)
        }
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
    """The inputs of one run of ``program`` over ``batch``, in the step number ``index``.

    ``denominator``  divides the loss: the number of rows of the global batch or, if the loss defines a method
                     ``count``, the number of targets that this method counts
    ``training``     the program contains backwards
    ``scale``        multiplies the gradient of the loss
    ``keep``         if given, no targets are read; instead, it is called with the index of the first row and the
                     model's outputs
    ``failed``       if given together with ``keep``, it is called with an exception that the model raises, and all
                     ranks continue without the outputs of that micro-batch
    ``share``        the replica whose rows this rank computes; None means its own
    """

    index: int
    batch: Rows
    micro_batches: int
    denominator: float
    program: RankProgram
    training: bool
    scale: float = 1.0
    keep: Keep | None = None
    failed: Callable[[Exception], None] | None = None
    share: int | None = None


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """The objects of a rank that only training needs, besides the loss.

    ``sync`` sums gradients over replicas, and ``update`` ends each step. ``swap`` offloads activations; None if the
    plan offloads none. ``stall_seconds()`` returns how many seconds the host has waited so far for weights and
    activations.
    """

    sync: GradientSync
    update: Update
    swap: tuple[SwapManager, Selector] | None
    stall_seconds: Callable[[], float]


class Executor:
    """Runs the action lists of one rank. Without ``training`` it runs only forwards, whose outputs are kept or passed
    to ``loss``.

    ``current`` is the action that is running, or that failed. Watchdog threads read it.
    """

    def __init__(
        self,
        chain: Chain,
        stage: Stage,
        mesh: Mesh,
        precision: PrecisionConfig,
        channels: Channels,
        inputs: ModelInputs,
        spans: SpanClock,
        loss: StepLoss | None = None,
        training: TrainingParts | None = None,
    ) -> None:
        self.current: CurrentAction | None = None
        self._chain, self._stage, self._mesh, self._training = chain, stage, mesh, training
        self._loss = loss
        self._device, self._boundary = mesh.device, precision.boundary_dtype
        self._spans, self._inputs = spans, inputs
        self._swap = None if training is None else training.swap
        self._io = StageIO(chain, mesh, channels)
        self._last_stage = len(mesh.plan.stages) - 1
        self._slots = {stage: slot for slot, stage in enumerate(mesh.stages)}
        self._plan = mesh.plan
        self._anchor = torch.empty(0, device=mesh.device, requires_grad=True)
        self._received: dict[Key, tuple[Tensors, GraphEntry | None]] = {}
        self._outgoing: dict[Key, Tensors] = {}
        self._gradients: dict[Key, Gradients] = {}
        self._outgoing_gradients: dict[Key, Gradients] = {}
        self._in_flight: dict[Key, _InFlight] = {}
        self._begun: StepContext | None = None  # the step that the last run has begun
        self._on_next = False
        self.row_check = RowCheck(chain.dtype)

    @property
    def begun(self) -> int | None:
        """The number of the step that the previous call of :meth:`run` has begun; None if it has begun none."""
        return None if self._begun is None else self._begun.index

    def run(self, step: StepContext, following: StepContext | None = None) -> list[Span]:
        """Run the program of ``step``, and return the spans (times of actions) of training steps that the device has
        completed since the last call. They may belong to the previous step.

        If the program begins the next training step, ``following`` is the context of that step. This call then runs
        the beginning of that step, and the next call runs the rest.
        """
        rank, index = self._mesh.rank, step.index
        spans = self._spans if step.training else self._spans.aside()
        post, ahead = self._io.post, self._io.posts
        name = "the batch of" if step.training else "a batch that is evaluated at"
        contexts = [
            replace(each, batch=self.row_check.of(each.batch, f"{name} step {each.index}"))
            for each in (step, following)
            if each is not None
        ]
        if step.program.updates:
            self._training_parts.update.begin(step.batch)
        begun, self._begun = self._begun, following
        if self._loss is not None and begun is None:
            self._loss.begin()
        self._io.begin(len(step.batch), step.micro_batches, step.share)
        with private_random_state(self._device), torch.set_grad_enabled(step.training):
            if begun is None:
                self._inputs.begin(contexts[0].batch, self._input_parts(contexts[0]))
            for receive in step.program.first:
                post(receive)
            for action, receives in zip(step.program.actions, step.program.following):
                self.current = action, index + action.step, spans.begin()
                if action.kind in COMPUTE:
                    self._use_weights_of_next(action.step > 0)
                try:
                    waited = _HANDLERS[action.kind](self, action, contexts[action.step])
                except Exception as error:
                    error.add_note(f"action {action}")
                    raise
                spans.end(rank, index, action, waited)
                if ahead:
                    for receive in receives:
                        post(receive)
        self.current = None
        if step.keep is not None and 0 in self._mesh.stages:
            # predict reads no loss, which would synchronize, so it waits for the copies of the inputs here.
            self._inputs.landed()
        if following is None:
            self._io.flush()
        return spans.take()

    def timed(self, batch: Rows) -> TimedRows:
        """Return ``batch`` in a wrapper that measures the time of reading rows."""
        return TimedRows(batch, self._spans)

    @property
    def loss_share(self) -> Tensor:
        """This rank's part of the loss of the latest run, on this rank's device. The loss is the sum over all ranks."""
        return self._step_loss.share

    @property
    def _step_loss(self) -> StepLoss:
        assert self._loss is not None, "an engine for predictions alone has no loss"
        return self._loss

    @property
    def _training_parts(self) -> TrainingParts:
        assert self._training is not None, "an engine for forwards alone cannot train"
        return self._training

    def _stall_seconds(self) -> float:
        if self._training is None:
            return self._stage.offloaded.stall_seconds
        return self._training.stall_seconds()

    def abandon(self) -> None:
        """Drop in-flight micro-batches, which frees their graphs and swapped data."""
        self._begun = None
        self._use_weights_of_next(False)
        for held in (
            self._received,
            self._outgoing,
            self._gradients,
            self._outgoing_gradients,
            self._in_flight,
        ):
            held.clear()
        if self._loss is not None:
            self._loss.abandon()
        if self._training is not None:
            self._training.sync.disarm()
        self._inputs.abandon()

    # ---- actions; each returns the seconds that it spent waiting

    def _receive(self, action: Action, step: StepContext) -> float:
        start = time.perf_counter()
        key = _key(action, step)
        if action.kind is Kind.RECEIVE_GRADIENT:
            if (gradients := self._io.receive_gradients(action)) is not None:
                self._gradients[key] = gradients
            return time.perf_counter() - start
        entry = GraphEntry(self._anchor) if step.training else None
        inputs = self._io.receive(action, entry.copy if entry is not None else torch.clone)
        if inputs is not None:
            self._received[key] = inputs, entry
        return time.perf_counter() - start

    def _send(self, action: Action, step: StepContext) -> float:
        key = _key(action, step)
        if action.kind is Kind.SEND_GRADIENT:
            self._io.send_gradients(action, self._outgoing_gradients.pop(key, ()))
        else:
            self._io.send(action, self._outgoing.pop(key, ()))
        return 0.0

    def _fetch(self, action: Action, step: StepContext) -> float:
        if self._swap is not None:
            self._swap[0].fetch(self._swap_key(action, step))
        return 0.0

    def _forward(self, action: Action, step: StepContext) -> float:
        before, waited = self._stall_seconds(), 0.0
        first, rows = self._io.rows(action.micro)
        if action.step:
            self._begin_next(action, step)
        if not rows:
            self._stage.skip()
        elif step.failed is None:
            self._run_forward(action, step, first, rows)
        elif self._missing(action, step) or not self._runs_forward(action, step, first, rows):
            self._pass_nothing(action, step)
        if action.stage == self._last_stage and action in step.program.last and step.keep is None:
            waited = self._step_loss.complete(step)
        return self._stall_seconds() - before + waited

    def _begin_next(self, action: Action, step: StepContext) -> None:
        """Prepare the forward ``action`` of ``step``, the next step, which the current list of actions begins."""
        if action.micro == 0:
            if self._loss is not None:
                self._loss.begin()
            self._inputs.begin(step.batch, self._input_parts(step))

    def _use_weights_of_next(self, following: bool) -> None:
        """From now on, run passes with the weights of the next step if ``following`` is True, otherwise with those of
        this step."""
        if following != self._on_next:
            self._on_next = following
            self._training_parts.update.exchange_buffers()

    def _missing(self, action: Action, step: StepContext) -> bool:
        """Whether the forward of ``action`` lacks its inputs, because the forward of an earlier stage failed."""
        entering = self._plan.entering(action.stage)
        return entering is not None and not self._received[_key(action, step)][0]

    def _runs_forward(self, action: Action, step: StepContext, first: int, rows: int) -> bool:
        """Run the forward of ``action``, on the ``rows`` rows from row ``first`` of the batch, and return True. If the
        model raises an exception, pass it to ``step.failed`` and return False."""
        assert step.failed is not None
        try:
            self._run_forward(action, step, first, rows)
        except torch.AcceleratorError:  # the device computes nothing more in this process
            raise
        except Exception as error:
            step.failed(error)
            return False
        return True

    def _pass_nothing(self, action: Action, step: StepContext) -> None:
        """Skip the forward of ``action``, and send a message without tensors to the next stage, so that later stages
        skip their forwards of this micro-batch too."""
        self._received.pop(_key(action, step), None)
        self._stage.skip()
        leaving = self._plan.leaving(action.stage)
        if leaving is not None and self._plan.is_local(leaving):
            self._received[step.index, leaving.receiver, action.micro] = (), None

    def _run_forward(self, action: Action, step: StepContext, first: int, rows: int) -> None:
        stage, micro = action.stage, action.micro
        in_flight = _InFlight()
        if step.program.splits:
            in_flight.weight_gradients = WeightGradStore(
                self._device, self._stage.holds_offloaded_memory
            )
        entering, leaving = self._plan.entering(stage), self._plan.leaving(stage)
        if entering is None:
            inputs = self._chain.arguments(with_own_storage(self._inputs.take((first, rows))))
        else:
            inputs, in_flight.entry = self._received.pop(_key(action, step))
            if in_flight.entry is not None:
                inputs = in_flight.entry.enter(inputs, self._io.floating(entering, inputs))
        outputs = self._stage.run(
            stage,
            inputs,
            where=MicroBatchContext(step.index, first, rows, self._io.size(micro)),
            micro=self._swap_key(action, step),
            swap=self._swap,
            weight_gradients=in_flight.weight_gradients,
        )
        del inputs
        if leaving is not None:
            self._keep_outputs(action, step, leaving, outputs, in_flight)
        elif step.keep is not None:
            step.keep(first, self._chain.results(outputs))
        else:
            in_flight.roots = self._step_loss.add(step, micro, first, first + rows, outputs)
        if step.training:
            self._in_flight[_key(action, step)] = in_flight

    def _backward(self, action: Action, step: StepContext) -> float:
        key = _key(action, step)
        in_flight = self._in_flight.get(key)
        if in_flight is None:  # this rank has no rows of the micro-batch
            is_last = not step.program.splits and self._completes(action, step)
            if is_last:
                self._training_parts.sync.arm(action.stage)
            with self._holding_gradients(action, step):
                pass
            if is_last:
                self._training_parts.sync.ended(action.stage)
            return 0.0
        before = self._stall_seconds()
        is_last = in_flight.weight_gradients is None and self._completes(action, step)
        if in_flight.weight_gradients is None:
            del self._in_flight[key]
        if is_last:
            self._training_parts.sync.arm(action.stage)
        gradients = (
            self._step_loss.gradients(action.micro)
            if action.stage == self._last_stage
            else self._gradients.pop(key, ())
        )
        pairs = [
            (root, gradient)
            for root, gradient in zip(in_flight.roots, gradients)
            if root is not None and gradient is not None
        ]
        in_flight.roots = ()
        del gradients
        with self._holding_gradients(action, step):
            if pairs:
                roots, arriving = zip(*pairs)
                pairs.clear()
                torch.autograd.backward(roots, arriving)
        if in_flight.weight_gradients is not None:
            in_flight.weight_gradients.separate_gradients(self._stage.parameters_of(action.stage))
        if is_last:
            self._training_parts.sync.ended(action.stage)
        if in_flight.entry is not None:
            detached, entering = in_flight.entry.take_gradients(), self._plan.entering(action.stage)
            if entering is not None and self._plan.is_local(entering):
                self._gradients[step.index, entering.sender, action.micro] = detached
            else:
                self._outgoing_gradients[key] = detached
        return self._stall_seconds() - before

    def _backward_weight(self, action: Action, step: StepContext) -> float:
        before, sync = self._stall_seconds(), self._training_parts.sync
        in_flight = self._in_flight.pop(_key(action, step), None)
        deferred = WeightGradStore() if in_flight is None else in_flight.weight_gradients
        assert deferred is not None
        if not self._completes(action, step):
            self._add_weight_gradients(deferred)
            return self._stall_seconds() - before
        self._add_weight_gradients(
            deferred, sync.split(action.stage, deferred.pending_parameters())
        )
        sync.ended(action.stage)
        return self._stall_seconds() - before

    def _add_weight_gradients(
        self, deferred: WeightGradStore, complete: Reduced | None = None
    ) -> None:
        """Add the deferred weight gradients to the gradients of the parameters, resident or offloaded.

        ``complete``, if given, is called with each parameter whose gradient is final.
        """
        offloaded = self._stage.offloaded

        def ready(parameter: nn.Parameter) -> None:
            offloaded.offload_gradient(parameter)
            if complete is not None:
                complete(parameter)

        deferred.finish(ready, begin=offloaded.fetch_gradient)

    def _reduce(self, action: Action, step: StepContext) -> float:
        del action
        waited = self._training_parts.sync.finish()
        if step.program.updates:
            program = step.program
            self._training_parts.update.announce(
                self.loss_share, continues=program.continues, accumulates=program.accumulates
            )
        return waited

    def _update(self, action: Action, step: StepContext) -> float:
        del action
        self._use_weights_of_next(False)
        self._training_parts.update.run(step.index)
        return 0.0

    # ---- parts of actions

    def _input_parts(self, step: StepContext) -> Iterator[Part]:
        """Yield the parts of the batch that this rank's forwards of stage 0 will read, in this order: for each
        micro-batch, the index of this rank's first row, and its number of rows. Yield nothing on other ranks."""
        micros = [
            action.micro
            for action in step.program.actions
            if action.kind is Kind.FORWARD and action.stage == 0
        ]
        if step.program.continues and micros:  # they are in the order of their numbers
            micros = list(range(step.micro_batches))
        for part in map(self._io.rows, micros):
            if part[1]:
                yield part

    def _holding_gradients(
        self, action: Action, step: StepContext
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a backward runs. In it, gradients of offloaded parameters stay on the device if
        the next pass is a backward of the same stage."""
        return self._stage.hold_gradients(action.stage, action in step.program.repeated)

    def _completes(self, action: Action, step: StepContext) -> bool:
        """Whether all gradients of the stage are final after ``action``."""
        return action in step.program.last

    def _swap_key(self, action: Action, step: StepContext) -> int:
        """Return the number by which the swap manager identifies a micro-batch of one of this rank's stages."""
        slot = self._slots[action.stage]
        return action.micro + step.micro_batches * slot

    def _keep_outputs(
        self,
        action: Action,
        step: StepContext,
        edge: Edge,
        outputs: Tensors,
        in_flight: _InFlight,
    ) -> None:
        """Keep the detached ``outputs`` of ``action`` until they are sent over ``edge``, or pass them to the next stage
        if it is on this rank. In training, keep their gradient edges in ``in_flight``, as roots of the backward."""
        if self._boundary is not None:
            # Only tensors with gradients are cast: masks hold the lowest fp32 number, which is -inf in two bytes.
            # Complex numbers are not cast.
            outputs = tuple(
                tensor.to(self._boundary)
                if tensor.requires_grad and tensor.is_floating_point()
                else tensor
                for tensor in outputs
            )
        detached = tuple(tensor.detach() for tensor in outputs)
        if self._plan.is_local(edge):
            self._pass_locally(
                (step.index, edge.receiver, action.micro), detached, training=step.training
            )
        else:
            self._outgoing[_key(action, step)] = detached
        if step.training:
            floating = self._io.floating(edge, outputs)
            in_flight.roots = [
                get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in floating
            ]

    def _pass_locally(self, key: Key, detached: Tensors, *, training: bool) -> None:
        """Pass detached outputs to the next stage, which is on this rank too. ``key`` is the step, the next stage, and
        the micro-batch.

        In training, the next stage gets copies, because this stage's graph may have saved the outputs, and a block may
        change its input in place.
        """
        entry = GraphEntry(self._anchor) if training else None
        inputs = detached if entry is None else tuple(map(entry.copy, detached))
        self._received[key] = inputs, entry


def _key(action: Action, step: StepContext) -> Key:
    return step.index, action.stage, action.micro


_HANDLERS: dict[Kind, Callable[[Executor, Action, StepContext], float]] = {
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

"""One rank's forwards: its stage, its channels, and the forwards of its schedule.

::

    forward = ForwardEngine.build(chain, plan)
    forward.load(checkpoint)
    parts = forward.predict(rows)                         # the same rows on every rank

:class:`~parallax.runtime.engine.Engine` adds gradients, loss, optimizer and checkpoints.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallax.common.events import Span
from parallax.machine.device import CopyEngine, copies_for
from parallax.machine.host import data_bytes
from parallax.mesh import Mesh
from parallax.model.describe import Chain
from parallax.model.layers.norms import BatchNorms
from parallax.model.precision import PrecisionConfig
from parallax.plan.lists import actions, evaluation_actions
from parallax.plan.plan import Plan
from parallax.plan.schedule import Kind
from parallax.runtime.batch import Rows, row_count
from parallax.runtime.channels.transport import Channels
from parallax.runtime.executor import (
    CurrentAction,
    Executor,
    Keep,
    RankProgram,
    StepContext,
    TrainingParts,
)
from parallax.runtime.inputs import open_inputs
from parallax.runtime.loss import StepLoss
from parallax.runtime.meters.memory import bound_memory, device_memory, return_freed
from parallax.runtime.meters.spans import spans_of
from parallax.runtime.optim.copies import mark_copy
from parallax.runtime.optim.tiers import Tiers
from parallax.runtime.plan_check import accepted, check_gathering
from parallax.runtime.stage import Stage
from parallax.runtime.weights import assign_weights, groups_of, open_checkpoint
from parallax.swap.config import SwapConfig


@dataclass(frozen=True)
class StageConfigs:
    """The settings of a stage. ``compile``: compile each block. ``scratch``: the folder of swap files."""

    precision: PrecisionConfig
    swap: SwapConfig
    scratch: Path
    compile: bool

    @classmethod
    def given(
        cls,
        precision: PrecisionConfig | None,
        swap: SwapConfig | None,
        scratch: Path | None,
        *,
        compile: bool,
    ) -> StageConfigs:
        """Return the settings; an argument of None stands for the default."""
        return cls(
            precision or PrecisionConfig(),
            swap or SwapConfig(),
            scratch or Path(tempfile.gettempdir()) / "parallax-swap",
            compile,
        )


class BuiltStage(NamedTuple):
    """A rank's stage with real parameters, and the objects that were built with it.

    ``tiers`` opens stores in the stage's offload tier. ``before_bytes`` is the device memory that the process held
    before the build, and ``peak_bytes()`` returns the peak since the build began.
    """

    stage: Stage
    tiers: Tiers
    copies: CopyEngine
    precision: PrecisionConfig
    peak_bytes: Callable[[], int]
    before_bytes: int


def build_stage(
    chain: Chain,
    mesh: Mesh,
    configs: StageConfigs,
    norms: BatchNorms,
    *,
    trains: bool,
    divides: bool = True,
) -> BuiltStage:
    """Build this rank's stage of ``chain``, under the plan of ``mesh``, with real parameters. Without ``trains``, no
    memory is reserved for gradients.

    ``norms`` handles the stage's BatchNorms. ``divides`` is True if the optimizer may update parts of a parameter
    separately.
    """
    plan, precision = mesh.plan, configs.precision
    plans = {stage: plan.stages[stage] for stage in mesh.stages}
    reduces = trains and mesh.summed is not None and not plan.schedule.splits
    peak_bytes = device_memory(
        mesh.device, precision, plans.values() if trains else (), reduces=reduces
    )
    before_bytes = data_bytes()
    return_freed(mesh.device, plan.prediction.ranks[mesh.rank])
    copies = copies_for(mesh.device, configs.swap.delay())
    tiers = Tiers(
        plan.tier,
        [*plans.values()],
        configs.swap,
        configs.scratch,
        copies,
        mesh.device,
        trains=trains,
        divides=divides,
    )
    stage = Stage(
        chain,
        plans,
        mesh.device,
        precision,
        tiers.open_stream,
        norms=norms,
        compile=configs.compile,
        trains=trains,
    )
    return BuiltStage(stage, tiers, copies, precision, peak_bytes, before_bytes)


class ForwardEngine:
    """One rank's stage and its channels, for forwards. Build it with :meth:`build`. Engines that evaluate pass a
    ``loss``; engines that train also pass ``training``."""

    def __init__(
        self,
        chain: Chain,
        plan: Plan,
        mesh: Mesh,
        built: BuiltStage,
        loss: StepLoss | None = None,
        training: TrainingParts | None = None,
    ) -> None:
        self.plan, self.mesh = plan, mesh
        self._chain, self._built = chain, built
        self._programs: dict[tuple[bool, bool, int, bool, bool], RankProgram] = {}
        self.completed_steps = 0
        """The step of the loaded weights."""
        self._channels = Channels(mesh, built.copies)
        self.executor = Executor(
            chain,
            built.stage,
            mesh,
            built.precision,
            self._channels,
            open_inputs((plan.stages[each] for each in mesh.stages), mesh.device, built.copies),
            spans_of(mesh.device, built.copies),
            loss,
            training,
        )
        # A rank that finishes early may close its sockets before a slow peer has connected, so all ranks wait here.
        mesh.barrier()
        self._unbound = bound_memory(
            mesh.device,
            plan.prediction.ranks[mesh.rank],
            built.before_bytes,
            trains=training is not None,
        )

    @classmethod
    def build(
        cls,
        chain: Chain,
        plan: Plan,
        *,
        device: torch.device | None = None,
        precision: PrecisionConfig | None = None,
        swap: SwapConfig | None = None,
        compile: bool = False,
        scratch: Path | None = None,
    ) -> ForwardEngine:
        """Build this rank's stage of ``plan`` for forwards only, with real parameters from the model's files or its
        constructor.

        Every rank calls this method, with torch.distributed initialised if the plan has more than one rank.
        ``compile``: compile each block. ``scratch``: the folder of swap files. Any plan of the model works; a plan of
        :func:`parallax.plan.cost.forward.forward_plan` needs less memory.
        """
        plan = accepted(plan, chain)
        mesh = Mesh.create(plan, device or torch.device("cpu"), {})
        configs = StageConfigs.given(precision, swap, scratch, compile=compile)
        built = build_stage(chain, mesh, configs, BatchNorms(), trains=False)
        return cls(chain, plan, mesh, built)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters and buffers of this rank's stages, by their names in the model.

        An offloaded parameter is returned as a copy, which optimizers refuse.
        """
        stage = self._built.stage
        return {
            name: mark_copy(value, name) if stage.is_offloaded(tensor) else tensor
            for name, tensor, value in stage.values()
        }

    def load(self, directory: Path, *, averaged: bool = False) -> int:
        """Load the weights of a checkpoint of this model, saved under any plan, and return the step of the checkpoint.

        If ``averaged`` is True, each weight that has an average in the checkpoint gets the value of the average.
        If one rank cannot read its tensors, all ranks raise before any weight is changed.
        """
        stage, groups = self._built.stage, groups_of(directory.parent, self.mesh.nodes)
        reader = open_checkpoint(self._chain, stage, directory, groups, averaged=averaged)
        assign_weights(self._chain, stage, reader)
        reader.close()
        self.completed_steps = reader.step
        return reader.step

    @property
    def current(self) -> CurrentAction | None:
        """The action that this rank is running, its step, and its start time (time.perf_counter); None between steps.
        Watchdog threads read it."""
        return self.executor.current

    @property
    def beside(self) -> Mapping[str, threading.Thread]:
        """An empty dict: forwards have no background activities that watchdog threads could read."""
        return {}

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which the stage is in evaluation mode."""
        return self._built.stage.evaluating()

    def predict(
        self, batch: Rows, step: int = 0, failed: Callable[[Exception], None] | None = None
    ) -> list[tuple[int, Any]]:
        """Return the model's outputs for a batch, without reading its targets.

        A rank of the last stage returns a list of (index of the first row, outputs), one entry for each micro-batch.
        Other ranks return an empty list. The outputs stay on the device, where the plan reserves memory for the
        outputs of ``plan.global_batch`` rows. ``step``, the number of the next training step, is used in messages and
        random seeds.

        If the model raises an exception, the engine cannot be used any more, unless ``failed`` is given: then it is
        called with the exception, on the rank that has it, and the outputs of that micro-batch are missing.
        """
        found: list[tuple[int, Any]] = []
        with self.evaluating():
            self.run(batch, step, keep=lambda *part: found.append(part), failed=failed)
        return found

    def run(
        self,
        batch: Rows,
        step: int,
        *,
        training: bool = False,
        updates: bool = False,
        denominator: float = 1.0,
        scale: float = 1.0,
        keep: Keep | None = None,
        failed: Callable[[Exception], None] | None = None,
        following: tuple[Rows, float] | None = None,
        share: int | None = None,
    ) -> list[Span]:
        """Run the schedule over a batch: always its forwards, with ``training`` also its backwards, and with
        ``updates`` also the optimizer step. ``following``: the batch of the next step, which the schedule begins, and
        its denominator.

        The remaining parameters are those of :class:`~parallax.runtime.executor.StepContext`.
        """
        micro_batches = self.plan.micro_batches(row_count(batch, step))
        context = StepContext(
            index=step,
            batch=batch,
            micro_batches=micro_batches,
            denominator=denominator,
            program=self._program(
                len(batch), training=training, updates=updates, continues=following is not None
            ),
            training=training,
            scale=scale,
            keep=keep,
            failed=failed,
            share=share,
        )
        after, kept = None, False
        if following is not None:
            after = replace(context, index=step + 1, batch=following[0], denominator=following[1])
        try:
            with self._built.precision.products():
                spans = self.executor.run(context, after)
            kept = after is not None
            return spans
        except Exception as error:
            error.add_note(
                f"stage {self.mesh.pipeline_rank} of {len(self.plan.stages)}, step {step}"
            )
            explained = self.executor.row_check.explained(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            if not kept:
                self.executor.abandon()

    def _program(self, rows: int, *, training: bool, updates: bool, continues: bool) -> RankProgram:
        plan, pipeline_rank = self.plan, self.mesh.pipeline_rank
        micro_batches, begun = plan.micro_batches(rows), self.executor.begun is not None
        key = training, updates, micro_batches, begun, continues
        if key not in self._programs:
            if training:
                check_gathering(plan, rows)
            listed = (
                actions(plan, pipeline_rank, micro_batches, begun=begun, continues=continues)
                if training
                else evaluation_actions(plan, pipeline_rank, micro_batches)
            )
            kept = [each for each in listed if updates or each.kind is not Kind.UPDATE]
            self._programs[key] = RankProgram(kept)
        return self._programs[key]

    def peak_bytes(self) -> int:
        """Return the peak of device memory since the engine was built, not counting the memory that the process held
        before."""
        return self._built.peak_bytes()

    def fetched_bytes(self) -> int:
        """Return the bytes of offloaded parameters fetched since the last call."""
        return self._built.stage.offloaded.take_statistics().bytes_in

    @property
    def transports(self) -> dict[str, str]:
        """The name of the transport to each rank to which this rank sends, for example {"0 -> 1": "shared memory"}."""
        return self._channels.transports()

    def close(self) -> None:
        """Release the stores, the channels and the process groups; the engine cannot be used any more."""
        self._built.stage.offloaded.close()
        self._channels.close()
        self._built.tiers.close()
        self.mesh.close()
        self._unbound()

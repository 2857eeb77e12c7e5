"""The facade: one rank of a planned training run.

::

    engine = Engine.build(chain, plan, loss=loss)
    result = engine.step(TensorRows(inputs, targets))     # the same global batch on every rank
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.device import CopyEngine, copies_for
from parallax.errors import CheckpointError, NonFiniteError, PlanError
from parallax.events import Span
from parallax.host import ResidentMeter
from parallax.mesh import Mesh
from parallax.model.describe import Chain, parameter_names
from parallax.model.precision import PrecisionConfig
from parallax.model.saved import Selector
from parallax.plan.plan import Plan
from parallax.plan.schedule import RUNNABLE, actions, evaluation_actions
from parallax.runtime import checkpoint
from parallax.runtime.batch import Rows
from parallax.runtime.executor import Executor, Loss, Step
from parallax.runtime.optimizer import OptimizerConfig, StageOptimizer
from parallax.runtime.replicate import SharedStates, sync_for
from parallax.runtime.stage import Stage
from parallax.runtime.tiers import Tiers
from parallax.runtime.transport import staging_for
from parallax.swap.config import SwapConfig
from parallax.swap.manager import SwapManager
from parallax.swap.statistics import SwapStatistics


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step. ``loss`` and ``gradient_norm`` are global; the rest is this rank's. ``peak_bytes`` is the device's
    high water since the engine was built (on a CPU: of the process, beyond what it had before)."""

    loss: float
    gradient_norm: float
    seconds: float
    peak_bytes: int
    swap: SwapStatistics
    spans: list[Span] = field(repr=False)


class Engine:
    """One rank's stage with its optimizer, channels and swap manager. Made by :meth:`build`."""

    def __init__(self, chain: Chain, plan: Plan, mesh: Mesh, loss: Loss, configs: EngineConfigs) -> None:
        self.plan, self.mesh = plan, mesh
        self._chain, self._optimizer_config = chain, configs.optimizer
        self._stage_plan = plan.stages[mesh.stage]
        self._memory = _memory_for(mesh.device)
        copies = copies_for(mesh.device, configs.swap.delay())
        self._below = Tiers(plan.tier, configs.swap, configs.scratch, copies)
        self._stage = Stage(chain, self._stage_plan, mesh.device, configs.precision, self._below.open_stream)
        self._manager: SwapManager | None = None
        swap = None
        if self._stage_plan.offloads:
            self._manager = SwapManager(
                self._below.open_store(self._stage_plan.tier_bytes),
                limit_bytes=self._stage_plan.swap_limit_bytes,
                policy=configs.swap.policy(),
                verify=configs.swap.verify,
            )
            selector = Selector(self._stage.held(), configs.swap.minimum_bytes, streams=self._stage.streams_memory)
            swap = (self._manager, selector)
        self._optimizer = self._open_optimizer(configs, copies)
        self._stage.wait_for_weights(self._optimizer.ready)
        self._sync = sync_for(self._stage, mesh, self._optimizer.reduced)
        staging = staging_for(mesh, copies)
        waiting: list[StageOptimizer | SwapManager] = [self._optimizer, *([self._manager] if self._manager else [])]
        self._executor = Executor(
            self._stage,
            mesh,
            loss,
            configs.precision,
            self._sync,
            staging,
            swap,
            stall_seconds=lambda: sum(each.stall_seconds for each in waiting),
        )
        self._loss = loss
        self._step = 0
        self._steps = configs.steps

    @classmethod
    def build(
        cls,
        chain: Chain,
        plan: Plan,
        *,
        loss: Loss,
        steps: int = 1000,
        device: torch.device | None = None,
        optimizer: OptimizerConfig | None = None,
        precision: PrecisionConfig | None = None,
        swap: SwapConfig | None = None,
        scratch: Path | None = None,
    ) -> Engine:
        """Materialise this rank's stage of ``plan``. Called by every rank, with torch.distributed initialised where
        the plan has more than one. ``steps`` is the length of the learning-rate schedule; ``scratch`` the folder of
        swap files."""
        if plan.blocks != len(chain.blocks) or plan.fingerprint != chain.fingerprint():
            raise PlanError(
                f"the plan is for {plan.blocks} blocks of {plan.model} ({plan.fingerprint}), the model has "
                f"{len(chain.blocks)} ({chain.fingerprint()}): plan again for this model"
            )
        _check_runnable(plan, chain)
        mesh = Mesh.create(plan, device or torch.device("cpu"), _shared_between_stages(chain, plan))
        configs = EngineConfigs(
            optimizer or OptimizerConfig(),
            precision or PrecisionConfig(),
            swap or SwapConfig(),
            scratch or Path(tempfile.gettempdir()) / "parallax-swap",
            steps,
        )
        return cls(chain, plan, mesh, loss, configs)

    def _open_optimizer(self, configs: EngineConfigs, copies: CopyEngine) -> StageOptimizer:
        mesh, group = self.mesh, self.mesh.updates
        return StageOptimizer(
            self._stage.resident(),
            configs.optimizer,
            mesh.device,
            below=self._stage_plan.optimizer_offload,
            lowest=self._stepped_below_elsewhere(),
            copies=copies,
            open_store=self._below.open_states,
            share=partial(SharedStates, group, mesh.replica, mesh.replica_count) if group is not None else None,
            streamed=self._stage.streamed,
        )

    def _stepped_below_elsewhere(self) -> set[Tensor]:
        """Parameters of this stage that others share, where any of them steps it below the device."""
        tensors, stages = self._stage.named_tensors(), self.plan.stages
        shared = _shared_between_stages(self._chain, self.plan)
        names = [name for name, users in shared.items() if any(stages[user].optimizer_offload for user in users)]
        return {tensors[name] for name in names if name in tensors}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Model-wide name → parameter or buffer of this rank's stage. Of those that live below the device, a copy."""
        self._optimizer.finish()
        return {n: value if self._stage.streams(t) else t for n, t, value in self._stage.values()}

    @property
    def gradients_by_name(self) -> dict[str, Tensor]:
        """Model-wide name → gradient, wherever it is; those that have none are not there."""
        found = {n: self._stage.gradient(t) for n, t in self._stage.named_tensors().items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    @property
    def completed_steps(self) -> int:
        """Optimizer updates so far."""
        return self._step

    @property
    def all_reduces(self) -> int:
        """All-reduces of replicated gradients since the engine was built."""
        return self._sync.all_reduces

    def step(self, batch: Rows) -> StepResult:
        """One optimizer update over a global batch of any number of rows, the same on every rank."""
        start = time.perf_counter()
        self._optimizer.zero_grad()
        totals: dict[str, float] = {}

        def update(loss_share: float) -> None:
            totals.update(self._update(loss_share))

        spans = self._run(batch, training=True, update=update)
        self._step += 1
        swapped = self._manager.take_statistics() if self._manager else SwapStatistics()
        self._optimizer.add_statistics(swapped)
        return StepResult(
            loss=totals["loss"],
            gradient_norm=totals["norm"],
            seconds=time.perf_counter() - start,
            peak_bytes=self._memory(),
            swap=swapped,
            spans=spans,
        )

    def gradients(self, batch: Rows) -> float:
        """Forward and backward without an update; gradients are left in ``parameters``. The loss."""
        self._optimizer.finish()
        self._optimizer.zero_grad()
        totals: dict[str, float] = {}
        self._run(batch, training=True, update=lambda share: totals.update(loss=self._sum(share)[0]))
        return totals["loss"]

    def evaluate(self, batch: Rows) -> float:
        """The loss of a batch, with the same weights and nothing saved."""
        was_training = self._stage.training
        self._stage.eval()
        try:
            self._run(batch, training=False, update=lambda share: None)
            return self._sum(self._executor.loss_share)[0]
        finally:
            self._stage.train(was_training)

    def save(self, directory: Path, state: dict[str, Any]) -> Path:
        """Write a checkpoint of all stages below ``directory``; ``state`` is the caller's, as JSON. Its folder.

        All ranks fail together where one cannot write; what was saved before stays as it is.
        """
        partial = checkpoint.partial_folder(directory, self._step)
        self._together(lambda: checkpoint.begin(partial) if self.mesh.rank == 0 else None)
        try:
            parts = self._together(lambda: self._write_part(partial))
            checksums = {name: crc for part in parts for name, crc in part.items()}
            index = {
                "step": self._step,
                "fingerprint": self._chain.fingerprint(),
                "plan": self.plan.hash(),
                "checksums": checksums,
                "optimizer": sorted({n.split("/")[0] for n in checksums} - {"model"}),
                "state": state,
            }
            self._together(lambda: checkpoint.finish(partial, index) if self.mesh.rank == 0 else None)
        except CheckpointError:
            if self.mesh.rank == 0:
                checkpoint.remove_partial(directory)
            raise
        return directory / checkpoint.checkpoint_name(self._step)

    def _write_part(self, folder: Path) -> dict[str, int]:
        """One replica writes for its stage, the others what they alone know; the checksums of what was written."""
        self._optimizer.finish()
        mine = self._owned()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor, value in self._stage.values():
                if name not in mine:
                    continue
                if self.mesh.replica == 0:
                    yield f"model/{name}", value
                if self.mesh.replica == 0 or self._optimizer.alone_knows(tensor):
                    yield from ((f"{key}/{name}", value) for key, value in self._optimizer.states(tensor).items())

        part = f"stage-{self.mesh.stage:02d}" + (f"-replica-{self.mesh.replica:02d}" if self.mesh.replica else "")
        small = self._stage_plan.optimizer_offload > 0  # what lies below must come up to be written
        return checkpoint.write_parts(folder, part, tensors(), checkpoint.PART_BYTES // (8 if small else 1))

    def load(self, directory: Path) -> dict[str, Any]:
        """Continue from a checkpoint of this model under any plan; the state that was saved with it.

        All ranks fail together, before anything is changed, where one cannot read its part.
        """
        names = self._stage.named_tensors()
        readers: list[checkpoint.CheckpointReader] = []

        def check() -> None:
            reader = checkpoint.CheckpointReader(directory)
            reader.check_names(parameter_names(self._chain, range(len(self._chain.blocks))), self._chain.fingerprint())
            reader.check(names)
            readers.append(reader)

        self._together(check)
        self._optimizer.reset()
        with torch.no_grad():
            self._stage.assign((name, tensor, readers[0].read(f"model/{name}")) for name, tensor in names.items())
            for name, tensor in names.items():
                self._optimizer.restore(tensor, readers[0].states(name))
        self._step = readers[0].step
        return readers[0].state

    def close(self) -> None:
        """Release the tiers below."""
        self._optimizer.close()
        if self._stage.streamed is not None:
            self._stage.streamed.close()
        if self._manager is not None:
            self._manager.close()
        self._below.close()

    def _run(self, batch: Rows, *, training: bool, update: Callable[[float], None]) -> list[Span]:
        micro_batches = self.plan.micro_batches(len(batch))
        stages, stage = len(self.plan.stages), self.mesh.stage
        if training:
            listed = actions(self.plan.schedule, stages, stage, micro_batches, offload=self._manager is not None)
        else:
            listed = evaluation_actions(stages, stage, micro_batches)
        step = Step(
            index=self._step,
            batch=batch,
            micro_batches=micro_batches,
            denominator=self._denominator(batch),
            training=training,
        )
        try:
            return self._executor.run(listed, step, update)
        except Exception as error:
            error.add_note(f"stage {stage} of {stages}, step {self._step}")
            raise
        finally:
            self._executor.abandon()

    def _denominator(self, batch: Rows) -> float:
        """Rows of the batch, or its counted targets: counted on the last stage, told to all."""
        count = getattr(self._loss, "count", None)
        if count is None:
            return float(len(batch))
        mine = 0.0
        if self.mesh.is_last and self.mesh.replica == 0:
            mine = float(count(batch.targets(0, len(batch))))
        return self._sum(mine)[0] or 1.0

    def _update(self, loss_share: float) -> dict[str, float]:
        self._optimizer.finish()  # what failed in the last step fails before anything is agreed on
        owned = self._owned() if self.mesh.replica == 0 else {}
        gradients = self._stage.norm_terms(owned.values())
        mine = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        loss, total = self._sum(loss_share, mine * mine)  # ** would raise where the square is too large
        norm = total**0.5
        if not (norm < float("inf") and abs(loss) < float("inf")):
            raise NonFiniteError(
                f"step {self._step}: loss {loss}, gradient norm {norm}; nothing was updated: lower optimizer.lr, or "
                "raise optimizer.warmup_steps"
            )
        total_norm = torch.tensor(norm, dtype=self._chain.dtype, device=self.mesh.device)
        self._optimizer.step(total_norm, self._optimizer_config.rate(self._step, self._steps))
        return {"loss": loss, "norm": norm}

    def _together(self, call: Callable[[], Any]) -> list[Any]:
        """What ``call`` gave on every rank; a checkpoint error on one is raised on all."""
        result, failure = None, ""
        try:
            result = call()
        except CheckpointError as error:
            failure = str(error)
        answers: list[Any] = self.mesh.gather_objects((result, failure))
        failures = [text for _, text in answers if text]
        if failures:
            raise CheckpointError(failures[0])
        return [given for given, _ in answers]

    def _sum(self, *values: float) -> list[float]:
        found: list[float] = self.mesh.sum(torch.tensor(values, dtype=torch.float64)).tolist()
        return found

    def _owned(self) -> dict[str, Tensor]:
        """This stage's tensors without those that an earlier stage answers for."""
        later = {
            name
            for name, stages in _shared_between_stages(self._chain, self.plan).items()
            if self.mesh.stage in stages[1:]
        }
        return {name: tensor for name, tensor in self._stage.named_tensors().items() if name not in later}


@dataclass(frozen=True)
class EngineConfigs:
    """What :class:`Engine` needs beside model and plan."""

    optimizer: OptimizerConfig
    precision: PrecisionConfig
    swap: SwapConfig
    scratch: Path
    steps: int


def _check_runnable(plan: Plan, chain: Chain) -> None:
    """A plan may say more than this runtime can do."""
    beyond = [f"schedule {plan.schedule}"] if plan.schedule not in RUNNABLE else []
    beyond += [f"{plan.interleave} stages to a position"] if plan.interleave > 1 else []
    if chain.ties and any(stage.parameter_offload for stage in plan.stages):
        beyond.append("parameters below the device although some are shared")
    if beyond:
        raise PlanError(
            f"the plan of {plan.model} has {' and '.join(beyond)}, which can be planned for but not run: plan with "
            f"plan.schedule={' or '.join(RUNNABLE)} and plan.parameters=device"
        )


def _shared_between_stages(chain: Chain, plan: Plan) -> dict[str, list[int]]:
    """Name of each parameter that several stages hold → those stages in order."""
    shared = {}
    for name, users in chain.ties.items():
        stages = sorted({s for s, stage in enumerate(plan.stages) for i, _ in users if stage.start <= i < stage.stop})
        if len(stages) > 1:
            shared[name] = stages
    return shared


def _memory_for(device: torch.device) -> Callable[[], int]:
    """Starts to watch the device's memory; the function gives the high water since."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: int(torch.cuda.max_memory_allocated(device))
    _touch_libraries()
    return ResidentMeter().peak_bytes


def _touch_libraries() -> None:
    """Run the usual operators once on next to nothing: their code and tables belong to the process, not the stage."""
    with torch.random.fork_rng(devices=[]):
        layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        for _ in range(2):
            outputs = layer(torch.zeros(2, 4, 32)).flatten(0, 1)
            torch.nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.int64)).backward()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()

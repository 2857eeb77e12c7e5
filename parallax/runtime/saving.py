"""Checkpoints of a running pipeline: every rank writes and reads its own part, and all ranks succeed or fail
together."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.errors import CheckpointError, NonFiniteError, ParallaxError
from parallax.machine.device import CopyEngine
from parallax.machine.host import available_memory, data_bytes
from parallax.machine.pinned import ApartArena
from parallax.machine.preflight.needs import PROCESS_BYTES
from parallax.mesh import Mesh
from parallax.model.describe import Chain
from parallax.nodes.places import DirectoryGroups
from parallax.nodes.together import all_gather_result
from parallax.plan.plan import Plan
from parallax.plan.tier import tier_named
from parallax.runtime import checkpoint
from parallax.runtime.checkpoint import ALL_STAY, UNTOUCHED, PartWriter, Retention, SnapshotMemory
from parallax.runtime.checkpoint.masters import HeldMasters
from parallax.runtime.checkpoint.writing import WRITER
from parallax.runtime.health.nonfinite import unfit
from parallax.runtime.optim.ema import Averages
from parallax.runtime.optim.optimizer import StageOptimizer
from parallax.runtime.optim.scaling import LossScale
from parallax.runtime.parts.fence import Fence
from parallax.runtime.parts.held import whole_checkpoints
from parallax.runtime.pending import PendingSaves, SaveInProgress
from parallax.runtime.stage import Stage
from parallax.runtime.weights import (
    assign_weights,
    groups_of,
    open_checkpoint,
    saved_tensors,
)
from parallax.swap.optimizer.averaging import AVERAGE
from parallax.swap.optimizer.buckets import MASTER
from parallax.swap.optimizer.outer import OUTER_STATES

logger = logging.getLogger("parallax")
OF_GROUP = "@group-"
"""The names of optimizer states of every group of replicas but the first end with this text and the group's number."""
_PADDING_BYTES = 256  # bytes of padding per parameter in a buffer
_SHARE = 0.5  # share of the free memory for copies of saved tensors


class Saving:
    """Saves and loads one rank's part of a checkpoint: the weights of ``stage``, the states of ``optimizer``, of the
    loss scale, and of the averages. ``later`` holds the names of shared tensors that another rank saves."""

    def __init__(
        self,
        chain: Chain,
        plan: Plan,
        mesh: Mesh,
        stage: Stage,
        optimizer: StageOptimizer,
        scale: LossScale,
        averages: Averages,
        later: Collection[str],
        copies: CopyEngine,
    ) -> None:
        self._chain, self._plan, self._mesh = chain, plan, mesh
        self._stage, self._optimizer, self._later = stage, optimizer, later
        self._scale, self._averages = scale, averages
        self._reported = not chain.left_out or mesh.rank > 0
        self._groups: dict[Path, DirectoryGroups] = {}
        self._above: dict[
            Path, Path
        ] = {}  # directory → its nearest parent that existed at first use
        self._fence: Fence | None = None
        # On a CPU, too, these copies must not count as memory of the device.
        arena = ApartArena if mesh.device.type == "cpu" else copies.arena
        self._memory = SnapshotMemory(arena, snapshot_bytes(plan, mesh))
        self.pending = PendingSaves(mesh)

    def usable(self, directory: Path) -> tuple[list[Path], list[str]]:
        """Return the checkpoints in ``directory`` that are complete over all nodes, and one message about each of the
        others.

        The last entry of the first list is the checkpoint from which a run should resume. Checkpoints are ordered by
        the start of the run that saved them, and then by their step. Files of interrupted saves are removed. Raises
        :class:`CheckpointError` if there are checkpoints but none is complete.
        """
        fence, groups = self._fence_of(directory), self._groups_of(directory)

        def clean() -> None:
            fence.hold(directory)
            if directory.is_dir():
                checkpoint.remove_partial(directory)

        all_gather_result(clean if groups.leads else lambda: None)
        whole, others = whole_checkpoints(directory, groups, self._mesh.nodes)
        if others and not whole:
            raise CheckpointError(
                f"{others[-1]} (no other checkpoint is whole; another name=NAME starts a new run)"
            )
        best_last = sorted(whole, key=lambda each: (each.started, each.name))
        return [directory / each.name for each in best_last], others

    def begin_start(self, directory: Path) -> None:
        """Register this start of the run as the latest one, later than the starts that saved the checkpoints in
        ``directory``."""
        self._fence_of(directory)

    def _fence_of(self, directory: Path) -> Fence:
        """Return the fence of this start of the run for ``directory`` (:class:`~parallax.runtime.parts.fence.Fence`).
        It is created on the first call."""
        if self._fence is None:
            made = all_gather_result(lambda: Fence.new(directory))
            self._fence = max(made, key=lambda each: each.started)
        return self._fence

    def trim(self, directory: Path, step: int, retention: Retention) -> None:
        """Remove the checkpoints in ``directory`` that ``retention`` does not keep. The latest one, of ``step``, always
        remains.

        All ranks call this method after they have resumed from a checkpoint of an earlier start of the run.
        """
        leads = self._groups_of(directory).leads
        self.pending.trim(directory, retention, step, leads=leads)

    def save(
        self, directory: Path, step: int, entries: dict[str, Any], retention: Retention = ALL_STAY
    ) -> Path:
        """Write a checkpoint of ``step`` into ``directory`` and return its folder.

        If nodes do not share ``directory``, each node writes the files of its own ranks. ``entries`` holds the caller's
        ``state`` and ``metrics``. ``retention`` selects the older checkpoints to keep. If a weight is NaN or Inf,
        :class:`NonFiniteError` is raised and no files remain.
        """
        self.begin(directory, step, entries, retention)
        path = self.pending.finish()
        assert path is not None
        return path

    def begin(
        self, directory: Path, step: int, entries: dict[str, Any], retention: Retention = ALL_STAY
    ) -> None:
        """Start a save, and return when the tensors have been copied; :attr:`pending` then writes them in the
        background. An earlier save is finished first. The parameters are those of :meth:`save`."""
        self.pending.finish()
        self._report_left_out()
        # A copy: the caller may change its state while the checkpoint is written.
        kept = entries | {"state": json.loads(checkpoint.state_text(entries["state"]))}
        partial, groups = checkpoint.partial_folder(directory, step), self._groups_of(directory)
        fence = self._fence_of(directory)

        def begin() -> None:
            fence.hold(directory)
            self._check_there(directory)
            checkpoint.begin(partial)

        all_gather_result(lambda: begin() if groups.leads else None)
        thread = ThreadPoolExecutor(1, WRITER)
        writer = self._writer(partial, step, thread)
        try:
            marks = self._copied(writer)
        except ParallaxError:
            writer.cancel()
            thread.shutdown()
            all_gather_result(lambda: None)  # all ranks have stopped writing
            if groups.leads:
                checkpoint.remove_partial(directory)
            raise
        self.pending.begin(
            SaveInProgress(
                directory=directory,
                step=step,
                groups=groups,
                fence=fence,
                entries=self._known(step, fence, marks) | kept,
                retention=retention,
                thread=thread,
                part=writer.end(),
                cancel=writer.cancel,
            )
        )

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Index entries that identify model and plan; they stay the same during a run."""
        return {
            "fingerprint": self._chain.fingerprint(),
            "structure": self._chain.structure(),
            "dtype": str(self._chain.dtype),
            "plan": self._plan.hash(),
        }

    def _known(self, step: int, fence: Fence, marks: Sequence[dict[str, int]]) -> dict[str, Any]:
        """Return the index entries that are known before any tensor is written.

        ``marks`` holds, for each rank, the checksums of the tensors that checkpoints leave out.
        """
        return {
            "step": step,
            **self._identity,
            "trained_by": self._optimizer.name,
            "scale": self._scale.state(),
            "averages": self._averages.state(),
            "started": fence.started,
            **(
                {
                    "base": self._chain.base,
                    "marks": {n: m for found in marks for n, m in found.items()},
                }
                if self._chain.base
                else {}
            ),
        }

    def close(self) -> None:
        """Release the host memory for copies. The files of an unfinished save remain, as after an interruption."""
        self.pending.abandon()
        self._memory.close()

    def _groups_of(self, directory: Path) -> DirectoryGroups:
        """Return the groups of ranks that share ``directory``, found on the first call."""
        if directory not in self._groups:
            self._groups[directory] = groups_of(directory, self._mesh.nodes)
            self._above[directory] = next(each for each in directory.parents if each.is_dir())
        return self._groups[directory]

    def _check_there(self, directory: Path) -> None:
        """Raise :class:`CheckpointError` if the parent of ``directory`` was removed or moved. Otherwise a new folder
        would be created that looks complete but holds only a part of the run."""
        above = self._above.get(directory)
        if above is not None and not above.is_dir():
            raise CheckpointError(
                f"{above} has been removed or moved while the run was trained, so nothing can be saved there: move it "
                "back, and the same command resumes from its last checkpoint"
            )

    def _report_left_out(self) -> None:
        if not self._reported:
            logger.info(
                "checkpoints hold trained tensors only; the other %d tensors are built again from %s",
                len(self._chain.left_out),
                self._chain.base,
            )
        self._reported = True

    def load(self, directory: Path) -> checkpoint.CheckpointReader:
        """Load stage and optimizer from ``directory``, and return the reader of the checkpoint. Nothing is changed
        before every rank has checked its part."""
        reader = open_checkpoint(
            self._chain,
            self._stage,
            directory,
            self._groups_of(directory.parent),
            lambda found: found.check_optimizer(self._optimizer.name),
        )
        held = HeldMasters(reader)
        self._optimizer.reset()
        assign_weights(self._chain, self._stage, reader)
        with torch.no_grad():
            owned = saved_tensors(self._chain, self._stage) if self._mesh.owns_state else {}
            for name, tensor in owned.items():
                own = states_of_group(held.states(name, tensor), self._mesh.group)
                self._optimizer.restore(tensor, own)
        self._optimizer.exchange_versions()
        self.pending.origin = reader.step
        reader.close()
        return reader

    def _writer(self, folder: Path, step: int, thread: ThreadPoolExecutor) -> PartWriter:
        """Return the writer of this rank's part, which ``thread`` writes into ``folder``. The first replica writes the
        stage; other replicas write the optimizer states that only they hold."""
        replica, tensors = self._mesh.replica, self._stage.named_tensors()

        def check(name: str, value: Tensor) -> None:
            kind, _, inner = name.partition("/")
            if kind == "model" and (why := unfit(inner, tensors[inner], value)):
                raise NonFiniteError(f"step {step}: {why}, so no checkpoint is saved; {UNTOUCHED}")

        # Offloaded states are read back to be written, so parts are smaller.
        small = self._plan.stages[self._mesh.pipeline_rank].optimizer_offload > 0
        return PartWriter(
            folder,
            f"stage-{self._mesh.pipeline_rank:02d}"
            + (f"-replica-{replica:02d}" if replica else ""),
            self._memory,
            thread,
            check=check,
            part_bytes=checkpoint.PART_BYTES // (8 if small else 1),
            expected_bytes=self._expected_bytes(tensors.values()),
        )

    def _copied(self, writer: PartWriter) -> list[dict[str, int]]:
        """Copy the tensors of all ranks into their writers, with the newest weights as the model's. Return the results
        of :meth:`_copy` on all ranks."""
        self._optimizer.exchange_versions()
        try:
            return all_gather_result(lambda: self._copy(writer))
        finally:
            self._optimizer.exchange_versions()

    def _copy(self, writer: PartWriter) -> dict[str, int]:
        """Copy this rank's tensors into ``writer``. Return the checksums of the tensors that checkpoints leave out."""
        self._optimizer.finish()
        marks: dict[str, int] = {}
        first, member, group = self._mesh.replica == 0, self._mesh.member, self._mesh.group
        suffix = f"{OF_GROUP}{group}" if group else ""
        equal = (MASTER, AVERAGE, *OUTER_STATES) if group else ()
        for name, tensor, value in self._stage.values():
            if name in self._later:
                continue
            if name in self._chain.left_out:
                marks[name] = checkpoint.mark(value)
                continue
            if first:
                writer.add(f"model/{name}", value)
            if member == 0 or self._optimizer.alone_knows(tensor):
                for key, state in self._optimizer.states(tensor).items():
                    if key not in equal:  # in all groups, at the end of a round of local steps
                        writer.add(f"{key}{suffix}/{name}", state)
        return marks

    def _expected_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Return the approximate bytes of the values and states of ``tensors``, with padding."""
        return sum(t.nbytes + self._optimizer.bytes_of_states(t) + _PADDING_BYTES for t in tensors)


def states_of_group(states: Mapping[str, Tensor], group: int) -> dict[str, Tensor]:
    """Return the optimizer states for the group of replicas with the index ``group``, from ``states``, those of one
    parameter in a checkpoint.

    After local steps, each group has saved states of its own. If this run has more groups than the saved run, the
    further groups take the saved groups' states in turn.
    """
    found: dict[int, dict[str, Tensor]] = {0: {}}
    for key, state in states.items():
        name, _, number = key.partition(OF_GROUP)
        found.setdefault(int(number or 0), {})[name] = state
    return {**found[0], **found[group % len(found)]}


def snapshot_bytes(plan: Plan, mesh: Mesh) -> int:
    """Return the bytes of host memory that a rank may use for copies of saved tensors: a half of the host's free
    memory, divided among its ranks."""
    free = available_memory(mesh.nodes.local_count) - coming_bytes(plan, mesh)
    return max(0, int(free * _SHARE))


def coming_bytes(plan: Plan, mesh: Mesh) -> int:
    """Return the bytes of host memory that a rank has not allocated yet, but will need under its plan."""
    predicted = plan.prediction.ranks[mesh.rank]
    due = predicted.peak_bytes if mesh.device.type == "cpu" else 0
    due += predicted.tier_peak_bytes if tier_named(plan.tier).in_ram else 0
    return max(0, PROCESS_BYTES + due - data_bytes())

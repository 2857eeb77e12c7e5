"""Checkpoints of a running pipeline: every rank writes and reads its own part, and all fail together."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
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
from parallax.model.describe import Chain, parameter_names
from parallax.nodes.places import Sites, find_sites
from parallax.nodes.together import from_all, from_first
from parallax.plan.plan import Plan
from parallax.plan.tier import tier_named
from parallax.runtime import checkpoint
from parallax.runtime.checkpoint import ALL_STAY, UNTOUCHED, PartWriter, Retention, SnapshotMemory
from parallax.runtime.checkpoint.masters import HeldMasters
from parallax.runtime.checkpoint.writing import WRITER
from parallax.runtime.health.nonfinite import unfit
from parallax.runtime.optim.optimizer import StageOptimizer
from parallax.runtime.optim.scaling import LossScale
from parallax.runtime.parts.collecting import collect
from parallax.runtime.parts.fence import Fence
from parallax.runtime.parts.held import whole_checkpoints
from parallax.runtime.pending import PendingSaves, SaveInProgress
from parallax.runtime.stage import Stage

logger = logging.getLogger("parallax")
_PADDING_BYTES = 256  # of a parameter's tensors in a buffer
_SHARE = 0.5  # of memory that is free, for copies of what is saved


class Saving:
    """One rank's part of saving and loading. ``later`` names the tensors that a rank before this one answers for."""

    def __init__(
        self,
        chain: Chain,
        plan: Plan,
        mesh: Mesh,
        stage: Stage,
        optimizer: StageOptimizer,
        scale: LossScale,
        later: Collection[str],
        copies: CopyEngine,
    ) -> None:
        self._chain, self._plan, self._mesh = chain, plan, mesh
        self._stage, self._optimizer, self._later = stage, optimizer, later
        self._scale = scale
        self._said = not chain.left_out or mesh.rank > 0
        self._sites: dict[Path, Sites] = {}
        self._above: dict[Path, Path] = {}  # what each lay in when it was used first
        self._fence: Fence | None = None
        # Where one memory is both, copies are no more the device's than those of an accelerator's are.
        arena = ApartArena if mesh.device.type == "cpu" else copies.arena
        self._memory = SnapshotMemory(arena, snapshot_room(plan, mesh))
        self.pending = PendingSaves(mesh)

    def usable(self, directory: Path) -> tuple[list[Path], list[str]]:
        """Checkpoints below ``directory`` of which the nodes have all parts, the best to go on from last, and what is
        to be said of others; what interrupted saves have left is removed. Of two starts of a run the later one counts.
        Raises :class:`CheckpointError` where there are checkpoints and none is whole."""
        fence, sites = self._fence_of(directory), self._sites_of(directory)

        def clean() -> None:
            fence.hold(directory)
            if directory.is_dir():
                checkpoint.remove_partial(directory)

        from_all(clean if sites.leads else lambda: None)
        whole, others = whole_checkpoints(directory, sites, self._mesh.nodes)
        if others and not whole:
            raise CheckpointError(
                f"{others[-1]} (no other checkpoint is whole; another name=NAME starts anew)"
            )
        best_last = sorted(whole, key=lambda each: (each.started, each.name))
        return [directory / each.name for each in best_last], others

    def begin_start(self, directory: Path) -> None:
        """What this start of the run saves is later than whatever is in ``directory``."""
        self._fence_of(directory)

    def _fence_of(self, directory: Path) -> Fence:
        """This start's, which is made once."""
        if self._fence is None:
            made = from_all(lambda: Fence.new(directory))
            self._fence = max(made, key=lambda each: each.started)
        return self._fence

    def trim(self, directory: Path, step: int, retention: Retention) -> None:
        """Of the checkpoints below ``directory`` stay those that ``retention`` says after that of ``step``, the last
        one: called by all ranks, where it is an earlier start's."""
        leads = self._sites_of(directory).leads
        self.pending.trim(directory, retention, step, leads=leads)

    def save(
        self, directory: Path, step: int, told: dict[str, Any], retention: Retention = ALL_STAY
    ) -> Path:
        """Write a checkpoint below ``directory``, on each node its ranks' part where they share none; ``told`` is kept
        with it: the caller's ``state``, and ``metrics``. Its folder. Of older ones stay those that ``retention`` says.
        Raises :class:`NonFiniteError` where a weight is no number, and then leaves nothing either."""
        self.begin(directory, step, told, retention)
        path = self.pending.finish()
        assert path is not None
        return path

    def begin(
        self, directory: Path, step: int, told: dict[str, Any], retention: Retention = ALL_STAY
    ) -> None:
        """As :meth:`save`, but only what is copied is waited for: :attr:`pending` goes on with it. A save that is under
        way is finished first."""
        self.pending.finish()
        self._say_what_is_left_out()
        kept = told | {"state": json.loads(checkpoint.state_text(told["state"]))}  # as it is now
        partial, sites = checkpoint.partial_folder(directory, step), self._sites_of(directory)
        fence = self._fence_of(directory)

        def begin() -> None:
            fence.hold(directory)
            self._check_there(directory)
            checkpoint.begin(partial)

        from_all(lambda: begin() if sites.leads else None)
        thread = ThreadPoolExecutor(1, WRITER)
        writer = self._writer(partial, step, thread)
        try:
            marks = from_all(lambda: self._copy(writer))
        except ParallaxError:
            writer.cancel()
            thread.shutdown()
            self._mesh.barrier()
            if sites.leads:
                checkpoint.remove_partial(directory)
            raise
        self.pending.begin(
            SaveInProgress(
                directory=directory,
                step=step,
                sites=sites,
                fence=fence,
                told=self._known(step, fence, marks) | kept,
                retention=retention,
                thread=thread,
                part=writer.end(),
                cancel=writer.cancel,
            )
        )

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What model and plan it is: a run changes neither."""
        return {
            "fingerprint": self._chain.fingerprint(),
            "structure": self._chain.structure(),
            "dtype": str(self._chain.dtype),
            "plan": self._plan.hash(),
        }

    def _known(self, step: int, fence: Fence, marks: Sequence[dict[str, int]]) -> dict[str, Any]:
        """What the index says before anything is written; ``marks`` are those of each rank."""
        return {
            "step": step,
            **self._identity,
            "trained_by": self._optimizer.name,
            "scale": self._scale.state(),
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
        """Let go of memory. A save that nobody finished is left as an interrupted one."""
        self.pending.abandon()
        self._memory.close()

    def _sites_of(self, directory: Path) -> Sites:
        """Which ranks share ``directory``; they are asked once."""
        if directory not in self._sites:
            # Relative where it was asked for like that: nodes may start in folders of other names.
            nearest = from_first(
                lambda: next(
                    folder for folder in (directory, *directory.parents) if folder.is_dir()
                )
            )
            self._sites[directory] = find_sites(nearest, self._mesh.nodes)
            self._above[directory] = next(each for each in directory.parents if each.is_dir())
        return self._sites[directory]

    def _check_there(self, directory: Path) -> None:
        """A folder that somebody removed or moved is not made again: a part of the run would lie there, as if it were
        the run."""
        above = self._above.get(directory)
        if above is not None and not above.is_dir():
            raise CheckpointError(
                f"{above} has been removed or moved while the run was trained, so nothing can be saved there: move it "
                "back, and the same command goes on from its last checkpoint"
            )

    def _say_what_is_left_out(self) -> None:
        if not self._said:
            logger.info(
                "checkpoints hold what is trained; %d tensors that are not are made again from %s",
                len(self._chain.left_out),
                self._chain.base,
            )
        self._said = True

    def load(self, directory: Path) -> checkpoint.CheckpointReader:
        """Set stage and optimizer to what is in ``directory``; its reader. Nothing is changed before every rank has
        found its part good."""
        left_out = self._chain.left_out
        names = {n: t for n, t in self._stage.named_tensors().items() if n not in left_out}
        collect(directory, names, self._sites_of(directory.parent))

        def check() -> checkpoint.CheckpointReader:
            reader = checkpoint.CheckpointReader(directory)
            reader.check_names(
                set(parameter_names(self._chain, range(len(self._chain.blocks)))) - left_out,
                self._chain.fingerprint(),
                self._chain.structure(),
                str(self._chain.dtype),
            )
            reader.check_optimizer(self._optimizer.name)
            reader.check_base(self._chain.base, self._marks(), str(self._chain.dtype))
            HeldMasters(reader).check(names)
            return reader

        found: list[checkpoint.CheckpointReader] = []
        from_all(lambda: found.append(check()))
        (reader,) = found
        held = HeldMasters(reader)
        self._optimizer.reset()
        with torch.no_grad():
            self._stage.assign(self._loaded(held))
            for name, tensor in names.items():
                self._optimizer.restore(tensor, held.states(name, tensor))
        self.pending.origin = reader.step
        return reader

    def _loaded(self, held: HeldMasters) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The new values of the stage. What the checkpoint leaves out stays as it is; blocks below the device are
        written whole."""
        if not self._chain.left_out:
            for name, tensor in self._stage.named_tensors().items():
                yield name, tensor, held.weight(name, tensor).to(tensor.dtype)
            return
        for name, tensor, value in self._stage.values():
            if name not in self._chain.left_out:
                yield name, tensor, held.weight(name, tensor).to(tensor.dtype)
            elif self._stage.is_offloaded(tensor):
                yield name, tensor, value

    def _marks(self) -> dict[str, int]:
        """By which this stage knows the parameters that checkpoints leave out."""
        if not self._chain.left_out:
            return {}
        left_out = self._chain.left_out
        return {n: checkpoint.mark(value) for n, _, value in self._stage.values() if n in left_out}

    def _writer(self, folder: Path, step: int, thread: ThreadPoolExecutor) -> PartWriter:
        """What writes this rank's part: of one replica what its stage holds, of the others what they alone know."""
        replica, tensors = self._mesh.replica, self._stage.named_tensors()

        def check(name: str, value: Tensor) -> None:
            kind, _, inner = name.partition("/")
            if kind == "model" and (why := unfit(inner, tensors[inner], value)):
                raise NonFiniteError(
                    f"step {step}: {why}, and no checkpoint keeps that; {UNTOUCHED}"
                )

        # What lies below must come up to be written.
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

    def _copy(self, writer: PartWriter) -> dict[str, int]:
        """Give ``writer`` what this rank saves; the marks of what is left out."""
        self._optimizer.finish()
        marks: dict[str, int] = {}
        first = self._mesh.replica == 0
        for name, tensor, value in self._stage.values():
            if name in self._later:
                continue
            if name in self._chain.left_out:
                marks[name] = checkpoint.mark(value)
                continue
            if first:
                writer.add(f"model/{name}", value)
            if first or self._optimizer.alone_knows(tensor):
                for key, state in self._optimizer.states(tensor).items():
                    writer.add(f"{key}/{name}", state)
        return marks

    def _expected_bytes(self, tensors: Iterable[Tensor]) -> int:
        """What the values and the states of ``tensors`` take, about, and padding."""
        return sum(t.nbytes + self._optimizer.bytes_of_states(t) + _PADDING_BYTES for t in tensors)


def snapshot_room(plan: Plan, mesh: Mesh) -> int:
    """Bytes of host memory that copies of what a rank saves may take: half of what will be free on its host."""
    free = available_memory(mesh.nodes.local_count) - coming_bytes(plan, mesh)
    return max(0, int(free * _SHARE))


def coming_bytes(plan: Plan, mesh: Mesh) -> int:
    """What a rank will take of its host's memory beyond what it has by now, as its plan says."""
    predicted = plan.prediction.ranks[mesh.rank]
    due = predicted.peak_bytes if mesh.device.type == "cpu" else 0
    due += predicted.tier_peak_bytes if tier_named(plan.tier).in_ram else 0
    return max(0, PROCESS_BYTES + due - data_bytes())

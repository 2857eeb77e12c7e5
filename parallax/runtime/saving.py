"""Checkpoints of a running pipeline: every rank writes and reads its own part, and all fail together."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.errors import CheckpointError, NonFiniteError
from parallax.mesh import Mesh
from parallax.model.describe import Chain, parameter_names
from parallax.nodes.places import Sites, find_sites
from parallax.nodes.together import from_all, from_first
from parallax.plan.plan import Plan
from parallax.runtime import checkpoint
from parallax.runtime.checkpoint import UNTOUCHED
from parallax.runtime.collecting import collect
from parallax.runtime.nonfinite import unfit
from parallax.runtime.optim.optimizer import StageOptimizer
from parallax.runtime.stage import Stage

logger = logging.getLogger("parallax")


class Saving:
    """One rank's part of saving and loading. ``later`` names the tensors that a rank before this one answers for."""

    def __init__(
        self,
        chain: Chain,
        plan: Plan,
        mesh: Mesh,
        stage: Stage,
        optimizer: StageOptimizer,
        later: Collection[str],
    ) -> None:
        self._chain, self._plan, self._mesh = chain, plan, mesh
        self._stage, self._optimizer, self._later = stage, optimizer, later
        self._step, self._said = 0, not chain.left_out or mesh.rank > 0
        self._sites: dict[Path, Sites] = {}

    def usable(self, directory: Path) -> tuple[list[Path], list[str]]:
        """Whole checkpoints below ``directory`` that every node has, oldest first, and what is to be said of others;
        what interrupted saves have left is removed. Raises :class:`CheckpointError` where some nodes have checkpoints
        and no checkpoint is on all."""
        sites = self._sites_of(directory)
        if sites.leads and directory.is_dir():
            checkpoint.remove_partial(directory)
        self._mesh.barrier()
        found = from_all(
            lambda: {
                path.name: checkpoint.digest(path)
                for path in checkpoint.list_checkpoints(directory)
            }
        )
        everywhere = {
            name for name, _ in set(found[0].items()).intersection(*map(dict.items, found))
        }
        lost: dict[str, set[str]] = {}
        for rank, held in enumerate(found):
            for name in set().union(*found) - everywhere:
                if held.get(name) != found[0].get(name) or name not in held:
                    lost.setdefault(name, set()).add(self._mesh.nodes.name(rank))
        told = [
            f"{directory / name} is not on {', '.join(sorted(lost[name]))}, or another one there"
            for name in sorted(lost, reverse=True)
        ]
        if told and not everywhere:
            raise CheckpointError(
                f"{told[0]}: run on the nodes that have saved it, or copy the folder there; checkpoint.directory=FOLDER"
                " names a place that all nodes share, and trainer.resume=never with another name starts anew"
            )
        return [directory / name for name in sorted(everywhere)], told

    def save(self, directory: Path, step: int, told: dict[str, Any], keep: int) -> Path:
        """Write a checkpoint below ``directory``, on each node its ranks' part where they share none; ``told`` is kept
        with it, as JSON. Its folder. Of older ones the last ``keep`` − 1 stay (0: all). Raises :class:`NonFiniteError`
        where a weight is no number, and then leaves nothing either."""
        self._step = step
        self._say_what_is_left_out()
        partial = checkpoint.partial_folder(directory, step)
        sites = self._sites_of(directory)
        writes = sites.leads
        from_all(lambda: checkpoint.begin(partial) if writes else None)
        try:
            parts = from_all(lambda: self._write_part(partial))
            checksums = {name: crc for part, _ in parts for name, crc in part.items()}
            marks = {name: crc for _, part in parts for name, crc in part.items()}
            mine = {
                "step": step,
                "fingerprint": self._chain.fingerprint(),
                "plan": self._plan.hash(),
                "trained_by": self._optimizer.name,
                "checksums": checksums,
                "optimizer": sorted({n.split("/")[0] for n in checksums} - {"model"}),
                **({"base": self._chain.base, "marks": marks} if self._chain.base else {}),
                **({} if sites.shared else {"nodes": self._by_node(parts)}),
                **told,
            }
            index = from_first(lambda: mine)  # the same on all nodes, to the last digit
            from_all(lambda: checkpoint.finish(partial, index) if writes else None)
        except (CheckpointError, NonFiniteError):
            if writes:
                checkpoint.remove_partial(directory)
            raise
        if writes:
            checkpoint.remove_old(directory, keep, step)
        return directory / checkpoint.checkpoint_name(step)

    def _sites_of(self, directory: Path) -> Sites:
        """Which ranks share ``directory``; they are asked once."""
        if directory not in self._sites:
            # Relative where it was asked for like that: nodes may start in folders of other names.
            above = from_first(
                lambda: next(
                    folder for folder in (directory, *directory.parents) if folder.is_dir()
                )
            )
            self._sites[directory] = find_sites(above, self._mesh.nodes)
        return self._sites[directory]

    def _by_node(self, parts: Sequence[tuple[dict[str, int], dict[str, int]]]) -> dict[str, str]:
        """Where each tensor lies."""
        return {
            name: self._mesh.nodes.name(rank)
            for rank, (written, _) in enumerate(parts)
            for name in written
        }

    def _say_what_is_left_out(self) -> None:
        """Once, on one rank."""
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
        if any(from_all(lambda: checkpoint.CheckpointReader(directory).split)):
            collect(directory, names, self._sites_of(directory.parent))

        def check() -> checkpoint.CheckpointReader:
            reader = checkpoint.CheckpointReader(directory)
            reader.check_names(
                set(parameter_names(self._chain, range(len(self._chain.blocks)))) - left_out,
                self._chain.fingerprint(),
            )
            reader.check_optimizer(self._optimizer.name)
            reader.check_base(self._chain.base, self._marks())
            reader.check(names)
            return reader

        found: list[checkpoint.CheckpointReader] = []
        from_all(lambda: found.append(check()))
        (reader,) = found
        self._optimizer.reset()
        with torch.no_grad():
            self._stage.assign(self._loaded(reader))
            for name, tensor in names.items():
                self._optimizer.restore(tensor, reader.states(name))
        return reader

    def _loaded(self, reader: checkpoint.CheckpointReader) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The new values of the stage. What the checkpoint leaves out stays as it is; blocks below the device are
        written whole."""
        if not self._chain.left_out:
            for name, tensor in self._stage.named_tensors().items():
                yield name, tensor, reader.read(f"model/{name}")
            return
        for name, tensor, value in self._stage.values():
            if name not in self._chain.left_out:
                yield name, tensor, reader.read(f"model/{name}")
            elif self._stage.streams(tensor):
                yield name, tensor, value

    def _marks(self) -> dict[str, int]:
        """By which this stage knows the parameters that checkpoints leave out."""
        if not self._chain.left_out:
            return {}
        left_out = self._chain.left_out
        return {n: checkpoint.mark(value) for n, _, value in self._stage.values() if n in left_out}

    def _write_part(self, folder: Path) -> tuple[dict[str, int], dict[str, int]]:
        """One replica writes for its stage, the others what they alone know; the checksums of what was written, and
        the marks of what is left out."""
        self._optimizer.finish()
        replica = self._mesh.replica
        marks: dict[str, int] = {}

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor, value in self._stage.values():
                if name in self._later:
                    continue
                if name in self._chain.left_out:
                    marks[name] = checkpoint.mark(value)
                    continue
                if why := unfit(name, tensor, value):
                    raise NonFiniteError(
                        f"step {self._step}: {why}, and no checkpoint keeps that; {UNTOUCHED}"
                    )
                if replica == 0:
                    yield f"model/{name}", value
                if replica == 0 or self._optimizer.alone_knows(tensor):
                    yield from (
                        (f"{key}/{name}", value)
                        for key, value in self._optimizer.states(tensor).items()
                    )

        part = f"stage-{self._mesh.stage:02d}" + (f"-replica-{replica:02d}" if replica else "")
        # What lies below must come up to be written.
        small = self._plan.stages[self._mesh.stage].optimizer_offload > 0
        written = checkpoint.write_parts(
            folder, part, tensors(), checkpoint.PART_BYTES // (8 if small else 1)
        )
        return written, marks

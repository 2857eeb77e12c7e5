"""Checkpoints of a running pipeline: every rank writes and reads its own part, and all fail together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.errors import CheckpointError, NonFiniteError
from parallax.mesh import Mesh
from parallax.model.describe import Chain, parameter_names
from parallax.plan.plan import Plan
from parallax.runtime import checkpoint
from parallax.runtime.checkpoint import UNTOUCHED
from parallax.runtime.nonfinite import unfit
from parallax.runtime.optim.optimizer import StageOptimizer
from parallax.runtime.stage import Stage


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
        self._step = 0

    def save(self, directory: Path, step: int, told: dict[str, Any]) -> Path:
        """Write a checkpoint below ``directory``; ``told`` is kept with it, as JSON. Its folder. Raises
        :class:`NonFiniteError` where a weight is no number, and then leaves nothing either."""
        self._step = step
        partial = checkpoint.partial_folder(directory, step)
        first = self._mesh.rank == 0
        self._together(lambda: checkpoint.begin(partial) if first else None)
        try:
            parts = self._together(lambda: self._write_part(partial))
            checksums = {name: crc for part in parts for name, crc in part.items()}
            index = {
                "step": step,
                "fingerprint": self._chain.fingerprint(),
                "plan": self._plan.hash(),
                "trained_by": self._optimizer.name,
                "checksums": checksums,
                "optimizer": sorted({n.split("/")[0] for n in checksums} - {"model"}),
                **told,
            }
            self._together(lambda: checkpoint.finish(partial, index) if first else None)
        except (CheckpointError, NonFiniteError):
            if first:
                checkpoint.remove_partial(directory)
            raise
        return directory / checkpoint.checkpoint_name(step)

    def load(self, directory: Path) -> checkpoint.CheckpointReader:
        """Set stage and optimizer to what is in ``directory``; its reader. Nothing is changed before every rank has
        found its part good."""
        names = self._stage.named_tensors()

        def check() -> checkpoint.CheckpointReader:
            reader = checkpoint.CheckpointReader(directory)
            reader.check_names(
                parameter_names(self._chain, range(len(self._chain.blocks))),
                self._chain.fingerprint(),
            )
            reader.check_optimizer(self._optimizer.name)
            reader.check(names)
            return reader

        found: list[checkpoint.CheckpointReader] = []
        self._together(lambda: found.append(check()))
        (reader,) = found
        self._optimizer.reset()
        with torch.no_grad():
            self._stage.assign(
                (name, tensor, reader.read(f"model/{name}")) for name, tensor in names.items()
            )
            for name, tensor in names.items():
                self._optimizer.restore(tensor, reader.states(name))
        return reader

    def _write_part(self, folder: Path) -> dict[str, int]:
        """One replica writes for its stage, the others what they alone know; the checksums of what was written."""
        self._optimizer.finish()
        replica = self._mesh.replica

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor, value in self._stage.values():
                if name in self._later:
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
        return checkpoint.write_parts(
            folder, part, tensors(), checkpoint.PART_BYTES // (8 if small else 1)
        )

    def _together(self, call: Callable[[], Any]) -> list[Any]:
        """What ``call`` gave on every rank; an error of one is raised on all."""
        result, failure = None, None
        try:
            result = call()
        except (CheckpointError, NonFiniteError) as error:
            failure = type(error), str(error)
        answers: list[Any] = self._mesh.gather_objects((result, failure))
        for _, told in answers:
            if told is not None:
                kind, text = told
                raise kind(text)
        return [given for given, _ in answers]

"""Selects the checkpoints to keep, and removes the others."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallax.runtime.checkpoint.folder import REMOVED, checkpoint_name


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Selects the checkpoints to keep: the latest ``keep_last`` (0: all), those of every ``keep_every``-th step (0:
    none), and the ``best`` ones by ``metric``. ``higher``: the highest value is the best; otherwise the lowest."""

    keep_last: int = 0
    keep_every: int = 0
    best: int = 0
    metric: str = "validation_loss"
    higher: bool = False

    def superseded(self, held: Mapping[int, float | None], step: int) -> list[int]:
        """Return the steps whose checkpoints may be removed once the checkpoint of ``step`` is complete.

        ``held`` maps the step of each existing checkpoint to its metric, or to None. Checkpoints after ``step`` are
        ignored. They exist if the run has resumed from an earlier checkpoint.
        """
        steps = sorted(each for each in held if each <= step)
        if not self.keep_last:
            return []
        scored = [(value, each) for each in steps if (value := held[each]) is not None]
        ranked = sorted(
            (pair for pair in scored if math.isfinite(pair[0])),
            key=lambda pair: (-pair[0] if self.higher else pair[0], -pair[1]),
        )
        stay = {*steps[-self.keep_last :], *(each for _, each in ranked[: self.best])}
        return [
            each
            for each in steps
            if each not in stay and not (self.keep_every and each % self.keep_every == 0)
        ]


ALL_STAY = Retention()


def remove(directory: Path, steps: Iterable[int]) -> None:
    """Remove the checkpoints of ``steps``. Each folder is first renamed, so that it is no longer listed as a
    checkpoint. If the removal is interrupted, the next start of the run deletes the files."""
    for step in steps:
        name = checkpoint_name(step)
        with contextlib.suppress(OSError):
            gone = (directory / name).rename(directory / f"{REMOVED}{name}")
            shutil.rmtree(gone, ignore_errors=True)

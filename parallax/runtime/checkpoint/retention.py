"""Which checkpoints stay, and how the others go."""

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
    """The last ``keep_last`` stay (0: all), those of every ``keep_every``-th step (0: of none), and the ``best`` by
    ``metric``, of which the lowest value is best."""

    keep_last: int = 0
    keep_every: int = 0
    best: int = 0
    metric: str = "validation_loss"

    def superseded(self, held: Mapping[int, float | None], step: int) -> list[int]:
        """Steps of ``held`` whose checkpoints may go after that of ``step``; ``held`` says their metrics, of those that
        have one. Later ones, which this training did not go on from, do not count."""
        steps = sorted(each for each in held if each <= step)
        if not self.keep_last:
            return []
        judged = [(value, each) for each in steps if (value := held[each]) is not None]
        ranked = sorted(
            (pair for pair in judged if math.isfinite(pair[0])),
            key=lambda pair: (pair[0], -pair[1]),
        )
        stay = {*steps[-self.keep_last :], *(each for _, each in ranked[: self.best])}
        return [
            each
            for each in steps
            if each not in stay and not (self.keep_every and each % self.keep_every == 0)
        ]


ALL_STAY = Retention()


def remove(directory: Path, steps: Iterable[int]) -> None:
    """Remove the checkpoints of ``steps``: each loses its name first, so that what is left where this is interrupted
    is no checkpoint, and goes with the next start."""
    for step in steps:
        name = checkpoint_name(step)
        with contextlib.suppress(OSError):
            gone = (directory / name).rename(directory / f"{REMOVED}{name}")
            shutil.rmtree(gone, ignore_errors=True)

"""Send figures to Weights & Biases: online, or offline with ``WANDB_MODE=offline`` and a later ``wandb sync``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from parallax.train.loggers.destination import LoggedRun, Point

_INIT_SECONDS = 30.0  # until a server counts as down
_FINISH_SECONDS = 25.0  # for the rest of the points; they stay on disk for `wandb sync`


def load() -> None:
    """Import the package wandb."""
    import wandb  # noqa: F401


def open_run(run: LoggedRun, id: str, *, new: bool, last: int) -> WandbRun:
    """Return the run ``id`` in the project. Local files are in ``wandb/`` in the run directory. The API key is that of
    ``wandb login`` or ``WANDB_API_KEY``."""
    del new, last
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    settings = wandb.Settings(
        console="off",
        silent=True,
        init_timeout=_INIT_SECONDS,
        finish_timeout=_FINISH_SECONDS,
        finish_timeout_raises=True,
    )
    found: Any = wandb.init(
        id=id,
        resume="allow",
        project=run.project,
        name=run.name,
        group=run.name.rpartition("/")[0] or None,
        tags=list(run.tags),
        dir=str(run.directory),
        settings=settings,
    )
    found.config.update(dict(run.parameters), allow_val_change=True)
    return WandbRun(found)


class WandbRun:
    """One run of Weights & Biases. A process of the library sends the points, and retries after failures. ``held`` is
    known only if the run resumes online."""

    replaces = False

    def __init__(self, run: Any) -> None:
        self._run = run
        self.held = run.step - 1 if run.resumed else None

    def write(self, points: Sequence[Point]) -> None:
        for step, figures in points:
            self._run.log(figures, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))

"""Send figures to Trackio: to a database on this machine, to the server ``TRACKIO_SERVER_URL``, or to the space
``TRACKIO_SPACE_ID``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallax.train.loggers.destination import LoggedRun, Point


def load() -> None:
    """Import the package trackio."""
    import trackio  # noqa: F401


def open_run(run: LoggedRun, id: str, *, new: bool, last: int) -> TrackioRun:
    """Return the run in Trackio. Trackio identifies a run by its name, so the name includes ``id``."""
    del last
    import trackio

    found: Any = trackio.init(
        run.project,
        name=f"{run.name}-{id}",
        group=run.name.rpartition("/")[0] or None,
        config={**run.parameters, "tags": list(run.tags)},
        resume="never" if new else "allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return TrackioRun(found)


class TrackioRun:
    """One run of Trackio. Trackio writes points some time after it has received them. ``held`` is the step before the
    next one that Trackio expects."""

    replaces = False

    def __init__(self, run: Any) -> None:
        self._run = run
        following = getattr(run, "_next_step", None)  # no public name has it
        self.held = following - 1 if isinstance(following, int) else None

    def write(self, points: Sequence[Point]) -> None:
        for step, figures in points:
            self._run.log(figures, step=step)

    def close(self, *, failed: bool) -> None:
        del failed
        self._run.finish()

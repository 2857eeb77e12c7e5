"""The interface between a run and a logger. A logger sends the run's figures to one destination, such as a server or a
file.

Each logger is a module of this package with two functions::

    load()                       import the logger's package; raise ImportError if it is missing
    open_run(run, id, ...)       return a Destination

All functions of a logger except ``load`` are called in a separate thread (:mod:`.sender`), so they may wait.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from parallax.errors import ConfigError

LOGGERS = {
    "csv": "",
    "mlflow": "pip install 'parallax-train[mlflow]', or pip install mlflow",
    "tensorboard": "pip install tensorboard",
    "trackio": "pip install trackio",
    "wandb": "pip install wandb",
}
"""Name of each logger → the command that installs its package."""

Point = tuple[int, dict[str, float]]
"""A step and its figures by name. A step may have several points."""


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """The run whose figures are logged. ``parameters``: its resolved configuration. ``done``: the step from which it
    resumes; 0 for a new run."""

    directory: Path
    name: str
    project: str = "parallax"
    tags: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    done: int = 0


class Destination(Protocol):
    """Writes the figures of one run to one destination.

    ``replaces``: whether the destination has dropped the points after the step from which the run resumes. If so, the
    repeated steps are sent again; otherwise they must not be sent. ``held``: the last step that the destination has;
    None if the destination cannot tell, or if it never loses points that were sent.
    """

    replaces: bool
    held: int | None

    def write(self, points: Sequence[Point]) -> None:
        """Write ``points``. Each point is a step with its figures, and steps never decrease from one point to the next.
        Raise an exception if the points are not written."""

    def close(self, *, failed: bool) -> None:
        """Close the run at the destination, where a resumed run may open it again. ``failed``: whether the run ends
        with an error."""


class LoggerModule(Protocol):
    """A module of this package that is a logger."""

    def load(self) -> None:
        """Import the logger's package."""

    def open_run(self, run: LoggedRun, id: str, *, new: bool, last: int) -> Destination:
        """Open ``run`` at the destination. ``id``: the run's id there. ``new``: whether the id is new to the
        destination. ``last``: the last step whose points remain, if the destination replaces points."""


def logger_named(name: str) -> LoggerModule:
    """Return the logger ``name`` after importing its package. Raises :class:`ConfigError` if the package is missing."""
    module: Any = importlib.import_module(f"parallax.train.loggers.{name}")
    try:
        module.load()
    except ImportError as error:
        others = "leave it out of logger.to"
        raise ConfigError(
            f"logger.to={name}: the package {name} cannot be imported ({error}); {LOGGERS[name]}, or {others}"
        ) from error
    found: LoggerModule = module
    return found

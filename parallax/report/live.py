"""The state of a run while it trains, read only from the files in its directory.

No process of the run is contacted, so this works from any shell that sees the directory. A rank writes its status about
once a second. If a rank has not written its status for longer, the rank has died, or its host cannot be reached.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from parallax.common.lock import LOCK, is_locked
from parallax.common.metrics import METRICS
from parallax.common.units import format_seconds
from parallax.report.ranks import FOLDER, RankSnapshot, load_snapshots

STALE_SECONDS = 10.0  # a rank without a new status for this long counts as dead
_TAIL_BYTES = 256 * 1024  # read from the end of metrics.jsonl
_ENDED = {
    "steps": "all steps are done",
    "rows": "its rows ended",
    "stopped": "it was stopped",
    "patience": "its validation stopped improving",
    "target": "its target was reached",
    "callback": "a callback ended it",
    "drift": "its steps differ from the prediction",
}


class RunState(StrEnum):
    """The state of a run.

    ``STARTING``  the run plans, starts or restarts its ranks, or has not completed its first step
    ``TRAINING``  all ranks train
    ``FAILING``   some ranks no longer write their status: they have died, or their hosts cannot be reached
    ``DEAD``      all ranks no longer write their status
    ``ENDED``     all ranks have ended
    ``IDLE``      the run has never started its ranks, and is not running
    """

    STARTING = "starting"
    TRAINING = "training"
    FAILING = "failing"
    DEAD = "dead"
    ENDED = "ended"
    IDLE = "idle"


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """The state of the run in ``directory`` at the time ``now`` (seconds since 1970). ``message``: the state in words.
    ``losses``: the losses of the last steps."""

    directory: Path
    now: float
    state: RunState
    message: str
    ranks: tuple[RankSnapshot, ...] = ()
    losses: tuple[float, ...] = ()

    @property
    def step(self) -> int:
        """Return the number of completed steps."""
        return max((rank.step for rank in self.ranks), default=0)

    @property
    def steps(self) -> int:
        return max((rank.steps for rank in self.ranks), default=0)

    @property
    def seconds_left(self) -> float | None:
        known = [rank.seconds_left for rank in self.ranks if rank.seconds_left is not None]
        return max(known, default=None) if self.state is RunState.TRAINING else None

    @property
    def rows_per_second(self) -> float | None:
        """Return the rows per second that all replicas together train on; None if the speed of a replica is unknown."""
        return _sum([rank.rows_per_second for rank in self.ranks if rank.stage == 0])

    @property
    def tokens_per_second(self) -> float | None:
        return _sum([rank.tokens_per_second for rank in self.ranks if rank.stage == 0])

    @property
    def utilization(self) -> float | None:
        """Return the mean model FLOP utilization of all devices, as a fraction; None if that of a device is unknown."""
        total = _sum([rank.utilization for rank in self.ranks])
        return None if total is None else total / len(self.ranks)

    def age(self, rank: RankSnapshot) -> float:
        """Return the seconds since ``rank`` wrote its status."""
        return max(0.0, self.now - rank.time)

    def is_stale(self, rank: RankSnapshot) -> bool:
        """Return whether ``rank`` has not ended, but has not written its status for several seconds."""
        return not rank.ended and self.age(rank) > STALE_SECONDS

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        names = ("step", "steps", "seconds_left", "rows_per_second", "tokens_per_second")
        return {
            "run": str(self.directory),
            "state": str(self.state),
            "message": self.message,
            **{name: getattr(self, name) for name in names},
            "mfu": self.utilization,
            "loss": self.losses[-1] if self.losses else None,
            "ranks": [{**asdict(each), "age_seconds": self.age(each)} for each in self.ranks],
        }


def read_live(directory: Path, now: float | None = None) -> LiveRun:
    """Return the state of the run in ``directory``. ``now``: the present time in seconds since 1970; if it is None, the
    clock is read."""
    now = time.time() if now is None else now
    ranks = tuple(load_snapshots(directory))
    state, message = _state(directory, ranks, now)
    losses = tuple(_losses(directory / METRICS))
    return LiveRun(
        directory=directory, now=now, state=state, message=message, ranks=ranks, losses=losses
    )


def newest_run(runs: Path) -> Path | None:
    """Return the run that changed last in the folder ``runs``, including the points of sweeps there; None if there is
    none."""
    found = [path for pattern in ("*", "*/*") for path in runs.glob(pattern) if _is_run(path)]
    return max(found, key=lambda path: (_changed(path), path.name), default=None)


def _is_run(path: Path) -> bool:
    return (path / "plan.yaml").is_file() or (path / LOCK).exists()


def _changed(path: Path) -> float:
    """Return the time of the last change to the plan, the lock, or a rank's status of the run in ``path``.

    These files change only while the run is running.
    """
    files = [path / LOCK, path / "plan.yaml", path / FOLDER, *(path / FOLDER).glob("rank-*.json")]
    return max((_modified(file) for file in files), default=0.0)


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _state(directory: Path, ranks: tuple[RankSnapshot, ...], now: float) -> tuple[RunState, str]:
    """Return the state of the run, and a sentence about it."""
    newest = max((rank.time for rank in ranks), default=0.0)
    locked = is_locked(directory)
    if locked and (not ranks or _modified(directory / LOCK) > newest):
        planned = (directory / "plan.yaml").is_file() and not ranks
        return RunState.STARTING, "starting its ranks" if planned else "planning"
    if not ranks:
        return RunState.IDLE, "not running, and no rank has ever written its status"
    if all(rank.ended for rank in ranks):
        return RunState.ENDED, f"ended: {_ENDED.get(ranks[0].ended, ranks[0].ended)}"
    silent = [rank for rank in ranks if not rank.ended and now - rank.time > STALE_SECONDS]
    ago = format_seconds(now - min((rank.time for rank in silent), default=now))
    if len(silent) == len(ranks):
        last = format_seconds(now - newest)
        if locked:
            return RunState.STARTING, f"restarting: its ranks were last seen {last} ago"
        return RunState.DEAD, f"died, or its hosts cannot be reached: last seen {last} ago"
    if silent:
        named = ", ".join(str(rank.rank) for rank in silent[:8])
        return RunState.FAILING, f"rank {named} last seen {ago} ago"
    if absent := ranks[0].ranks - len(ranks):
        return RunState.TRAINING, f"training; {absent} rank(s) write their status on other hosts"
    if not any(rank.step for rank in ranks):
        return RunState.STARTING, "before the first step"
    return RunState.TRAINING, "training"


def _losses(path: Path) -> Iterator[float]:
    """Yield the finite losses in the last :data:`_TAIL_BYTES` bytes of the metrics file ``path``."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in lines[1 if size > _TAIL_BYTES else 0 : -1]:
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            loss = json.loads(line).get("loss")
            if isinstance(loss, int | float) and math.isfinite(loss):
                yield float(loss)


def _sum(values: list[float | None]) -> float | None:
    """Return the sum of ``values``; None if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None

"""A point (run) of a sweep: its name, its directory, and the files with its outcome, which outlive the process that
wrote them.

::

    runs/SWEEP/sweep.json             the overrides of the sweep
    runs/SWEEP/POINT/point.json       the point and its outcome
    runs/SWEEP/POINT/output.log       the output of its run
    runs/SWEEP/POINT/...              the run itself, a directory like any other run's
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from parallax.common import documents
from parallax.common.files import replace_text
from parallax.errors import ConfigError, printable

SWEEP, POINT, OUTPUT = "sweep.json", "point.json", "output.log"
_LONGEST_NAME = 80
_NO_WONDER = re.compile(r"[A-Za-z0-9._-]+")

_COMPLETE = ("steps", "rows", "patience", "target", "callback")  # ends of a run that is done


class PointStatus(StrEnum):
    """The status of a point."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"  # it was requested to end, and can be resumed
    FAILED = "failed"


@dataclass(frozen=True)
class Point:
    """One run of a sweep. ``overrides``: as typed. ``swept``: the overrides that differ between points."""

    number: int
    overrides: tuple[str, ...]
    swept: dict[str, str]

    @classmethod
    def of(cls, number: int, overrides: Sequence[str], alike: Collection[str]) -> Point:
        """Return the point with these ``overrides``. ``alike``: the keys that are equal in all points."""
        pairs = [word.lstrip("+").partition("=") for word in overrides]
        return cls(number, tuple(overrides), {k: v for k, _, v in pairs if k not in alike})

    @property
    def name(self) -> str:
        """Return the differing overrides as a folder name, such as ``model-gpt_devices-2``. If the name would be too
        long, or would contain characters that a run name may not have, a hash replaces a part of it."""
        short = {key: key.rpartition(".")[2] for key in self.swept}
        parts = [
            f"{key if list(short.values()).count(word) > 1 else word}-{self.swept[key]}"
            for key, word in short.items()
        ]
        text = "_".join(parts) or "point"
        if _NO_WONDER.fullmatch(text) and len(text) <= _LONGEST_NAME:
            return text
        swept = "\0".join(f"{key}={value}" for key, value in sorted(self.swept.items()))
        plain = re.sub(r"[^A-Za-z0-9._]+", "-", text)[: _LONGEST_NAME - 7].strip("-.") or "point"
        return f"{plain}-{hashlib.sha256(swept.encode()).hexdigest()[:6]}"

    @property
    def label(self) -> str:
        return printable(" ".join(f"{key}={value}" for key, value in self.swept.items())) or "alone"


@dataclass(frozen=True)
class PointOutcome:
    """The outcome of a point. ``seconds``: the duration of this attempt. ``reason``: why the point is not done; empty
    if it is done."""

    point: Point
    status: PointStatus
    reason: str = ""
    seconds: float = 0.0

    def save(self, directory: Path) -> None:
        """Write the outcome into the point's directory."""
        replace_text(directory / POINT, json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, directory: Path) -> PointOutcome | None:
        """Return the stored outcome; None if there is none."""
        tree = read_json(directory / POINT)
        if tree is None:
            return None
        try:
            point = tree["point"]
            found = Point(
                int(point["number"]),
                tuple(map(str, point["overrides"])),
                {str(key): str(value) for key, value in point["swept"].items()},
            )
            return cls(
                found, PointStatus(tree["status"]), str(tree["reason"]), float(tree["seconds"])
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(directory / POINT, error) from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file that Parallax wrote; None if it does not exist."""
    try:
        return documents.read_json(path, documents.DOCUMENT_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def summary_of(directory: Path) -> dict[str, Any] | None:
    """Return the summary of a run; None if the run has not ended."""
    summary = read_json(directory / "summary.json")
    if summary is not None and not isinstance(summary, dict):
        raise _damaged(directory / "summary.json", ValueError("it holds no keys"))
    return summary


def outcomes(folder: Path) -> dict[str, PointOutcome]:
    """Return the outcomes so far of the points of the sweep in ``folder``: a mapping from the name of a point to its
    outcome, in the order of the points."""
    found = {
        path.parent.name: outcome
        for path in folder.glob(f"*/{POINT}")
        if (outcome := PointOutcome.load(path.parent)) is not None
    }
    return dict(sorted(found.items(), key=lambda item: (item[1].point.number, item[0])))


def _damaged(path: Path, error: Exception) -> ConfigError:
    reason = f"{type(error).__name__}: {printable(str(error))[:200]}"
    return ConfigError(f"cannot read {printable(str(path))} ({reason}): restore it, or remove it")


def is_complete(summary: Mapping[str, Any] | None) -> bool:
    """Whether the run with this summary is complete: it has done all its steps, used all its rows, or was ended early
    by its metric or a callback."""
    return summary is not None and summary.get("ended") in _COMPLETE

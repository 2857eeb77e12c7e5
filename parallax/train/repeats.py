"""Records of steps that are repeated: after a failure, a run resumes from a checkpoint that is older than its last
recorded step.

::

    metrics.jsonl          1 2 3 4 5 6 7 | killed          the checkpoint is of step 5
    after the restart      1 2 3 4 5                       steps 6 and 7 are lost and repeated

Records of lost steps are removed; otherwise every reader would have to choose between two records of a step.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from parallax.common.files import AppendedFile

RESTARTS = "restarts.jsonl"  # one line each, and one for each host that was refused
_REFUSED = "refused"


def last_step(path: Path) -> int:
    """Return the last step in a file of JSON lines; -1 if there is none."""
    try:
        return next((step for _, step in _from_end(path) if step is not None), -1)
    except OSError:
        return -1


def numbers_of(path: Path, key: str) -> list[float]:
    """Return the numbers with the key ``key`` in a file of JSON lines, in order."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    return [float(each) for line in lines if isinstance(each := _value(line, key), int | float)]


def records_between(path: Path, after: int, last: int) -> Iterator[dict[str, Any]]:
    """Yield the records of the steps from ``after`` + 1 to ``last`` in a file of JSON lines."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        step = _number(line, "step")
        if step is not None and after < step <= last:
            yield json.loads(line)


def forget_steps(path: Path, first: int) -> int:
    """Remove the records of step ``first`` and later from the end of a file, and an incomplete last line. Return the
    number of removed steps."""
    if not path.exists():
        return 0
    kept, steps = 0, set[int]()
    for stop, step in _from_end(path):
        if step is not None and step < first:
            kept = stop
            break
        if step is not None:
            steps.add(step)
    os.truncate(path, kept)
    return len(steps)


def note_restart(directory: Path, step: int, lost_steps: int) -> None:
    """Record that the run in ``directory`` resumes after ``step`` and repeats ``lost_steps`` steps."""
    _append(directory, {"step": step, "lost_steps": lost_steps})


def note_refusal(directory: Path, reasons: Iterable[str]) -> None:
    """Record ``reasons``, why the run in ``directory`` continues without some hosts."""
    for reason in reasons:
        _append(directory, {_REFUSED: reason})


def noted_refusals(directory: Path) -> list[str]:
    """Return the recorded reasons why the run continued without some hosts."""
    found = (_value(line, _REFUSED) for line in _lines(directory))
    return [each for each in found if isinstance(each, str)]


def noted_restarts(directory: Path) -> tuple[int, int]:
    """Return how often the run resumed after a failure, and how many steps it has repeated."""
    lost = [
        number for line in _lines(directory) if (number := _number(line, "lost_steps")) is not None
    ]
    return len(lost), sum(lost)


def _append(directory: Path, entry: Mapping[str, int | str]) -> None:
    file = AppendedFile(directory / RESTARTS)
    try:
        file.append((json.dumps(entry) + "\n").encode())
    finally:
        file.close()


def _lines(directory: Path) -> list[bytes]:
    path = directory / RESTARTS
    return path.read_bytes().splitlines() if path.is_file() else []


def _from_end(path: Path) -> Iterator[tuple[int, int | None]]:
    """Yield the end offset and the step of each complete line, from last to first. Lines are read only as they are
    requested."""
    if not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        stop = text.rfind(b"\n") + 1
        while stop:
            start = text.rfind(b"\n", 0, stop - 1) + 1
            yield stop, _number(text[start:stop], "step")
            stop = start


def _number(line: bytes, key: str) -> int | None:
    """Return the number with the key ``key`` in a JSON line; None if the line is damaged or has no such number."""
    found = _value(line, key)
    return found if isinstance(found, int) else None


def _value(line: bytes, key: str) -> Any:
    try:
        return json.loads(line)[key]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None

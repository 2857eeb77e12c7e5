"""Steps that are taken again: after a failure a run goes on from a checkpoint that lies behind what its files tell.

::

    metrics.jsonl          1 2 3 4 5 6 7 | killed          the checkpoint is of step 5
    after the restart      1 2 3 4 5                       steps 6 and 7 come again: they are lost, and noted as such

What is told of them goes, or every reader would have to choose between two of each.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from parallax.common.files import AppendedFile

METRICS = "metrics.jsonl"
RESTARTS = "restarts.jsonl"  # one line each, and one for each host that was refused
_REFUSED = "refused"


def last_step(path: Path) -> int:
    """The last step that a file of JSON lines tells of; -1 where there is none."""
    try:
        return next((step for _, step in _from_end(path) if step is not None), -1)
    except OSError:
        return -1


def told(path: Path, key: str) -> list[float]:
    """The numbers that a file of JSON lines has for ``key``, in order."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    return [float(each) for line in lines if isinstance(each := _value(line, key), int | float)]


def forget_steps(path: Path, first: int) -> int:
    """Remove what the end of a file tells of step ``first`` and later ones, and half a line; the number of steps."""
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
    """Write down that the run in ``directory`` goes on after ``step``, and takes ``lost_steps`` again."""
    _append(directory, {"step": step, "lost_steps": lost_steps})


def note_refusal(directory: Path, reasons: Iterable[str]) -> None:
    """Write down why the run in ``directory`` goes on without some hosts."""
    for reason in reasons:
        _append(directory, {_REFUSED: reason})


def noted_refusals(directory: Path) -> list[str]:
    """Why the run went on without some hosts."""
    found = (_value(line, _REFUSED) for line in _lines(directory))
    return [each for each in found if isinstance(each, str)]


def noted_restarts(directory: Path) -> tuple[int, int]:
    """How often the run went on after a failure, and how many steps it took again for it."""
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
    """Where each whole line ends and of which step it tells, from the last to the first; only those are read."""
    if not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        stop = text.rfind(b"\n") + 1
        while stop:
            start = text.rfind(b"\n", 0, stop - 1) + 1
            yield stop, _number(text[start:stop], "step")
            stop = start


def _number(line: bytes, key: str) -> int | None:
    """A number in a line; None where it is damaged, or has none."""
    found = _value(line, key)
    return found if isinstance(found, int) else None


def _value(line: bytes, key: str) -> Any:
    try:
        return json.loads(line)[key]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None

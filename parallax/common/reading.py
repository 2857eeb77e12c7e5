"""Files that somebody else may have written, read no larger than they can be.

A plan, a profile or a manifest may be damaged, or made to do harm: a file without end, a pipe that nobody writes to,
three letters that become a hundred bytes each, a number of a million digits. So a file is read up to what its kind can
take, and nothing becomes data before it was counted. What is wrong is an OSError or a ValueError, which every reader
turns into its own one line.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

DOCUMENT_BYTES = 16 * 2**20  # a profile of 8,000 blocks
MANIFEST_BYTES = 256 * 2**20  # a checkpoint of a million tensors
SMALL_BYTES = 2**20  # what was measured of a machine, what became of a point
MOST_VALUES = 4 * 2**20  # of one file: about 100 bytes each
MOST_DIGITS = 300  # of a whole number: more are no floating-point number
LARGEST = 10**18  # bytes, seconds, rows: sums and products of such numbers are finite


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """All of a plain file. Raises ValueError for what is none, and for more than ``most_bytes``."""
    with os.fdopen(_open(path), "rb") as file:
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise ValueError(f"it is longer than {most_bytes:,} bytes, the most that is read")
    return found


def read_text(path: Path, most_bytes: int) -> str:
    """The same as text."""
    return read_bytes(path, most_bytes).decode("utf-8")


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a plain file of any length, but for a last one that was cut short. Raises ValueError for one that
    is no text, or longer than any of ours."""
    handle = _open(path)
    with os.fdopen(handle, "rb") as file:
        while (line := file.readline(SMALL_BYTES)).endswith(b"\n"):
            yield line.decode("utf-8")
    if len(line) == SMALL_BYTES:
        raise ValueError(f"a line is longer than {SMALL_BYTES:,} bytes, the most that is read")


def read_json(path: Path, most_bytes: int, *, largest: float = math.inf) -> Any:
    """What a file of :func:`plain_json` holds."""
    return plain_json(read_text(path, most_bytes), largest=largest)


def plain_json(text: str, *, largest: float = math.inf) -> Any:
    """JSON as data, in which all numbers are finite, and none is above ``largest``. Raises ValueError for anything
    else."""
    return _loaded(
        text,
        parse_float=partial(_finite, largest),
        parse_int=partial(_whole, largest),
        parse_constant=_refused,
    )


def any_json(text: str) -> Any:
    """The same with NaN and infinity, which people's own states may hold."""
    return _loaded(text, parse_int=partial(_whole, math.inf))


def _loaded(text: str, **options: Any) -> Any:
    if text.count(",") + text.count("[") + text.count("{") > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES:,} values, the most that are read")
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _open(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is no plain file")
    return handle


def _finite(largest: float, digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number) or abs(number) > largest:
        raise ValueError(f"{digits[:40]} is no finite number up to {largest:g}")
    return number


def _whole(largest: float, digits: str) -> int:
    if len(digits) > MOST_DIGITS or abs(int(digits)) > largest:
        raise ValueError(f"{digits[:40]}, of {len(digits)} digits, is no number up to {largest:g}")
    return int(digits)


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")

"""CSV files that name files and their labels."""

from __future__ import annotations

import csv
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from parallax.errors import DataError, printable

_LONGEST_LINE = 2**17  # characters, the most that the module csv takes for one field


def labelled_files(table: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, path and label of each row of a CSV file with the columns path and label."""
    where = printable(str(table))
    if not stat.S_ISREG(table.stat().st_mode):
        raise DataError(f"{where}: it is no regular file")
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(_lines(file, where), strict=True)
            columns = [each.strip() for each in reader.fieldnames or ()]
            if missing := [each for each in ("path", "label") if each not in columns]:
                raise DataError(
                    f"{where}: its header has no column {' and '.join(missing)}, but "
                    f"{', '.join(map(printable, columns)) or 'nothing'}"
                )
            reader.fieldnames = columns
            for row in reader:
                name, text = (row["path"] or "").strip(), (row["label"] or "").strip()
                if not name or not text:
                    raise DataError(
                        f"{where}: line {reader.line_num}: a path and a label are needed"
                    )
                yield reader.line_num, name, text
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{where}: it is no CSV file of UTF-8 ({printable(str(error))})") from error


def numbered(labels: list[str]) -> tuple[NDArray[Any], tuple[str, ...] | None]:
    """Return labels as numbers, and the class names; None instead of names if all labels are numbers already."""
    for dtype in (np.int64, np.float32):
        try:
            found = np.array(labels, dtype=dtype)
        except (ValueError, OverflowError):
            continue
        if np.isfinite(found).all():
            return found, None
    classes = sorted(set(labels))
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([numbers[label] for label in labels], dtype=np.int64), tuple(classes)


def _lines(file: TextIO, where: str) -> Iterator[str]:
    """Yield the lines of ``file``. Raises :class:`DataError` for a line so long that it might fill the memory."""
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE:
            raise DataError(
                f"{where}: line {number} has {_LONGEST_LINE:,} characters or more: it is no table of files and labels"
            )
        yield line

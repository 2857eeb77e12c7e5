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


_PATHS = ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path")
_LABELS = ("label", "class", "target", "category", "labels")
_SETS = ("split", "set", "subset")


def labelled_files(table: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, path and label of each row of the CSV file ``table``, which has the columns path and
    label, or other usual names. Values are separated by commas, tabs or semicolons."""
    where = printable(str(table))
    if not stat.S_ISREG(table.stat().st_mode):
        raise DataError(f"{where}: it is no regular file")
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline(_LONGEST_LINE)
            file.seek(0)
            reader = csv.DictReader(
                _lines(file, where), strict=True, delimiter=max(",\t;", key=head.count)
            )
            columns = [each.strip() for each in reader.fieldnames or ()]
            reader.fieldnames = columns
            paths, labels = (_column(columns, names, where) for names in (_PATHS, _LABELS))
            sets = [each for each in columns if each.lower() in _SETS]
            seen: dict[str, set[str]] = {each: set() for each in sets}
            for row in reader:
                name, text = (row[paths] or "").strip(), (row[labels] or "").strip()
                if not name or not text:
                    raise DataError(
                        f"{where}: line {reader.line_num}: a path and a label are needed"
                    )
                for each in sets:
                    _check_split(each, seen[each], row[each], where)
                yield reader.line_num, name, text
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{where}: it is no CSV file of UTF-8 ({printable(str(error))})") from error


def _column(columns: list[str], names: tuple[str, ...], where: str) -> str:
    """Return the column called ``names[0]`` or, without it, the only column with one of the ``names``, ignoring case.
    Raises :class:`DataError` if there is no such column, or if there are several."""
    found = [each for each in columns if each.lower() in names]
    if exact := [each for each in found if each == names[0]]:
        return exact[0]
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(
            f"{where}: several of its columns may be the {names[0]} ({', '.join(map(printable, found))}); name one of "
            f"them {names[0]}"
        )
    shown = ", ".join(map(printable, columns))[:200]
    raise DataError(
        f"{where}: its header has no column {names[0]}, but {shown or 'nothing'}; the first line names the columns, "
        "such as path,label"
    )


def _check_split(column: str, seen: set[str], value: str | None, where: str) -> None:
    """Raise :class:`DataError` if a column such as ``split`` assigns some rows to training and other rows to another
    set, because all rows of the table are read. ``value``: the column's value in the current row, which is added to
    ``seen``."""
    seen.add((value or "").strip().lower())
    if len(seen) > 1 and seen & {"train", "training"}:
        sets = ", ".join(sorted(map(printable, seen)))
        raise DataError(
            f"{where}: its column {printable(column)} has rows of {sets}, and all rows of a table are read; write a "
            "table for each (data.labels and data.validation.NAME.labels, or data.path of sounds), without this column"
        )


def numbered(labels: list[str]) -> tuple[NDArray[Any], tuple[str, ...] | None]:
    """Return labels as numbers, and the class names. The names are None if all labels are already numbers."""
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
    """Yield the lines of ``file``. Raises :class:`DataError`, which names ``where``, for a line so long that it might
    fill the memory."""
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE:
            raise DataError(
                f"{where}: line {number} has {_LONGEST_LINE:,} characters or more: it is no table of files and labels"
            )
        yield line

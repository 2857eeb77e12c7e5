"""The output file of a prediction. Finished rows are written as parts beside it, and joined at the end.

::

    out.npy.parts/  job.json            the plan and the checkpoint, which a resumed prediction uses again
                    request.json        options and settings of the command, and the rows' fingerprint
                    000000000000-000000004096.npy                    rows [0, 4096)
                    000000000000-000000004096.skipped.jsonl          its bad rows
                    ...
"""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from parallax.common.documents import SMALL_BYTES, read_json
from parallax.common.files import replacing
from parallax.errors import ConfigError, DataError, printable
from parallax.run.inference import ForwardJob

Array = NDArray[Any]

_PART_BYTES, _PART_BATCHES = 16 * 2**20, 64
_SKIPPED = ".skipped.jsonl"


@dataclass(frozen=True, kw_only=True)
class PredictedRows:
    """The outputs of consecutive rows, which end with row ``end`` - 1.

    ``rows``       the numbers of the rows
    ``columns``    name → the output of this name for each row
    ``names``      the files of the rows; None if the rows have no files
    ``lengths``    the lengths of the rows without padding; None if rows are not padded
    ``padded``     the length of every row with its padding
    ``bad``        number and reason of each row that is left out
    ``bad_names``  the files of the rows in ``bad``
    """

    end: int
    rows: Array
    names: list[str] | None
    lengths: Array | None
    padded: int
    columns: dict[str, Array]
    bad: list[tuple[int, str]]
    bad_names: list[str] | None

    @property
    def bytes(self) -> int:
        return sum(values.nbytes for values in self.columns.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one row in each column, by the name of the column."""
        return {name: values.shape[1:] for name, values in self.columns.items()}

    def trimmed(self, name: str) -> list[Array] | None:
        """Return the rows of column ``name`` without padding; None if the column has the same length in all rows."""
        values = self.columns[name]
        # A matrix has one number for each class, even if there are as many classes as tokens in a row.
        if self.lengths is None or values.ndim < 3 or values.shape[1] != self.padded:
            return None
        return [row[:length] for row, length in zip(values, self.lengths.tolist())]


def check_columns(rows: PredictedRows) -> None:
    """Raise :class:`ConfigError` for outputs that cannot be columns of a table: complex numbers, and outputs called
    ``row`` or ``file``, which are the names of the table's own columns."""
    for name, values in rows.columns.items():
        if name in ("row", "file"):
            raise ConfigError(
                f"--out: the model's output {name} has the name of a column that numbers or names the rows; rename its "
                "key"
            )
        if np.iscomplexobj(values):
            raise ConfigError(
                f"--out: the model's output {name} is complex, and .parquet and .jsonl hold real numbers: use .npy, or "
                "return torch.view_as_real(...)"
            )


def joined_rows(parts: Sequence[PredictedRows]) -> PredictedRows:
    """Return the rows of ``parts``, which follow one another, as one object."""
    names = [part.names or [] for part in parts]
    lengths = [part.lengths for part in parts if part.lengths is not None]
    bad_names = [name for part in parts for name in part.bad_names or []]
    return PredictedRows(
        end=parts[-1].end,
        rows=np.concatenate([part.rows for part in parts]),
        names=None if parts[0].names is None else [each for part in names for each in part],
        lengths=np.concatenate(lengths) if lengths else None,
        padded=parts[0].padded,
        columns={
            name: np.concatenate([part.columns[name] for part in parts])
            for name in parts[0].columns
        },
        bad=[each for part in parts for each in part.bad],
        bad_names=None if parts[0].bad_names is None else bad_names,
    )


# ------------------------------------------------------------------------------------------- formats


class OutputFormat(ABC):
    """A file format for outputs and their parts. ``one_shape``: whether all rows must have the same shape."""

    one_shape = True

    @abstractmethod
    def write(self, file: BinaryIO, rows: PredictedRows) -> None:
        """Write ``rows`` to ``file``, which becomes a part: a file with consecutive rows."""

    @abstractmethod
    def join(self, file: BinaryIO, parts: Sequence[Path]) -> None:
        """Write the rows of all ``parts``, in order, to the output ``file``."""


class NpyFormat(OutputFormat):
    """A .npy file with one array. Padded rows keep their padding."""

    def write(self, file: BinaryIO, rows: PredictedRows) -> None:
        if len(rows.columns) != 1:
            raise ConfigError(
                f"--out: a .npy file holds one array, and the output has {len(rows.columns)} "
                f"({', '.join(map(printable, rows.columns))}); use .parquet or .jsonl"
            )
        (values,) = rows.columns.values()
        np.lib.format.write_array(file, np.ascontiguousarray(values), allow_pickle=False)

    def join(self, file: BinaryIO, parts: Sequence[Path]) -> None:
        arrays = [np.load(part, mmap_mode="r", allow_pickle=False) for part in parts]
        head = {
            "descr": np.lib.format.dtype_to_descr(arrays[0].dtype),
            "fortran_order": False,
            "shape": (sum(map(len, arrays)), *arrays[0].shape[1:]),
        }
        del arrays
        np.lib.format.write_array_header_1_0(file, head)
        for part in parts:
            with part.open("rb") as opened:
                np.lib.format.read_magic(opened)
                np.lib.format.read_array_header_1_0(opened)
                shutil.copyfileobj(opened, file)


class JsonLinesFormat(OutputFormat):
    """A JSON object for each row, with its number, its file and the outputs. NaN and infinity become null."""

    one_shape = False

    def write(self, file: BinaryIO, rows: PredictedRows) -> None:
        check_columns(rows)
        columns = {name: rows.trimmed(name) or values for name, values in rows.columns.items()}
        for place, number in enumerate(rows.rows.tolist()):
            record: dict[str, Any] = {"row": number}
            if rows.names is not None:
                record["file"] = rows.names[place]
            for name, values in columns.items():
                record[name] = _plain(values[place])
            file.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def join(self, file: BinaryIO, parts: Sequence[Path]) -> None:
        _concatenate(file, parts)


class ParquetFormat(OutputFormat):
    """A Parquet file with columns for the row, its file and the outputs, which are numbers or nested lists. Each part
    file of the prediction becomes a row group."""

    def __init__(self) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError(
                f"--out: a .parquet file needs pyarrow ({printable(str(error))}); install it with pip install "
                "'parallax-train[parquet]'"
            ) from error
        self._arrow = pyarrow

    def write(self, file: BinaryIO, rows: PredictedRows) -> None:
        check_columns(rows)
        arrow = self._arrow
        columns: dict[str, Any] = {"row": arrow.array(rows.rows)}
        if rows.names is not None:
            columns["file"] = arrow.array(rows.names, arrow.string())
        for name, values in rows.columns.items():
            trimmed = rows.trimmed(name)
            columns[name] = (
                self._nested(values) if trimmed is None else self._lists(values, trimmed)
            )
        arrow.parquet.write_table(arrow.table(columns), file)

    def _nested(self, values: Array) -> Any:
        """Return an array of any number of dimensions as nested lists of fixed size."""
        found = self._arrow.array(np.ascontiguousarray(values).reshape(-1))
        for size in reversed(values.shape[1:]):
            found = self._arrow.FixedSizeListArray.from_arrays(found, size)
        return found

    def _lists(self, values: Array, trimmed: list[Array]) -> Any:
        ends = np.cumsum([0, *map(len, trimmed)], dtype=np.int32)
        flat = np.concatenate([values[:0].reshape(0, *values.shape[2:]), *trimmed])
        return self._arrow.ListArray.from_arrays(self._arrow.array(ends), self._nested(flat))

    def join(self, file: BinaryIO, parts: Sequence[Path]) -> None:
        read = self._arrow.parquet.read_table
        schema = read(parts[0]).schema
        with self._arrow.parquet.ParquetWriter(file, schema) as writer:
            for part in parts:
                writer.write_table(read(part))


FORMATS: dict[str, Callable[[], OutputFormat]] = {
    ".npy": NpyFormat,
    ".parquet": ParquetFormat,
    ".jsonl": JsonLinesFormat,
}


def _plain(values: Array) -> Any:
    if np.issubdtype(values.dtype, np.inexact) and not np.isfinite(values).all():
        kept = values.astype(object)
        kept[~np.isfinite(values)] = None
        return kept.tolist()
    return values.tolist()


def _concatenate(file: IO[bytes], parts: Iterable[Path]) -> None:
    for part in parts:
        with part.open("rb") as opened:
            shutil.copyfileobj(opened, file)


# -------------------------------------------------------------------------------------------- output


@dataclass
class Outputs:
    """The output file ``path`` of a prediction.

    ``top``      the number of best classes to write; 0 writes all outputs
    ``bad``      the reaction to a bad row, stop or skip
    ``force``    whether to overwrite an existing file, and to discard parts of a prediction with another request
    ``request``  the options and settings of the command; a prediction is resumed only with the same options and
                 settings
    """

    path: Path
    top: int
    bad: str
    force: bool
    request: dict[str, Any]
    _pending: list[PredictedRows] = field(default_factory=list)
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _first: int = 0

    def __post_init__(self) -> None:
        if self.path.suffix not in FORMATS:
            raise ConfigError(
                f"--out {printable(str(self.path))}: accepted are files that end in {', '.join(FORMATS)}"
            )
        self._format = FORMATS[self.path.suffix]()
        if self.path.suffix == ".npy" and self.top:
            raise ConfigError(
                f"--top {self.top}: classes and scores are two arrays, and a .npy file holds one; use --out with "
                ".parquet or .jsonl"
            )
        if self.path.exists() and not self.force:
            raise ConfigError(
                f"--out {printable(str(self.path))}: it exists; name another file, or overwrite it with --force"
            )

    @property
    def folder(self) -> Path:
        """The folder that holds the parts: files with consecutive rows, which are joined at the end."""
        return self.path.with_name(f"{self.path.name}.parts")

    def prepared(self, plan: Callable[[], ForwardJob]) -> ForwardJob:
        """Return the job of an interrupted prediction with the same request. If there is none, return the result of
        ``plan()``, a new job, and store it. Raises :class:`ConfigError` for parts of another request, unless ``force``
        is set."""
        job, request = self.folder / "job.json", self.folder / "request.json"
        if job.exists() and request.exists():
            stored = self._stored_request()
            other = [key for key in self.request if stored.get(key) != self.request[key]]
            if not other:
                return self._resumed(ForwardJob.read(job), job)
            if self._parts() and not self.force:
                raise ConfigError(
                    f"{printable(str(self.folder))}: it has parts of a prediction with other {', '.join(other)}; "
                    "repeat that command to finish it, or start anew with --force"
                )
        shutil.rmtree(self.folder, ignore_errors=True)
        found = plan()
        self.folder.mkdir()
        found.write(job)
        self._write_request({})
        return found

    def _resumed(self, found: ForwardJob, file: Path) -> ForwardJob:
        """Return the stored job ``found`` with this command's reaction to bad rows. The reaction is also stored in
        ``file``."""
        if found.rows is None or found.rows.bad == self.bad:
            return found
        found = replace(found, rows=replace(found.rows, bad=self.bad))
        file.unlink()
        found.write(file)
        return found

    def begin(self, fingerprint: str) -> int:
        """Return the number of the first row that has not been written yet. ``fingerprint`` identifies the rows. Raises
        :class:`DataError` if the rows have changed since other rows were written."""
        stored = self._stored_request()
        if stored.get("rows", fingerprint) != fingerprint:
            raise DataError(
                f"{printable(str(self.folder))}: the rows have changed since this prediction was interrupted; start "
                "anew with --force"
            )
        self._write_request({"rows": fingerprint})
        ends = [int(part.stem.split("-")[1]) for part in self._parts()]
        self._first = max(ends, default=0)
        return self._first

    def add(self, rows: PredictedRows) -> None:
        """Append rows. They are written to a part file as soon as enough rows have been appended."""
        if self._pending and rows.shapes != self._shapes:
            self._write_part()
        if self._shapes and rows.shapes != self._shapes and self._format.one_shape:
            raise DataError(
                f"--out {printable(str(self.path))}: all rows need outputs of one shape, and row {rows.end - 1} has "
                f"{rows.shapes}, rows before it {self._shapes}; use .jsonl"
            )
        self._shapes = rows.shapes
        self._pending.append(rows)
        size = sum(part.bytes for part in self._pending)
        if size >= _PART_BYTES or len(self._pending) >= _PART_BATCHES:
            self._write_part()

    def finish(self) -> tuple[int, int]:
        """Join the part files to the output; return the numbers of rows written and skipped."""
        if self._pending:
            self._write_part()
        parts = self._parts()
        lists = [part.with_suffix(_SKIPPED) for part in parts]
        lists = [each for each in lists if each.exists()]
        skipped = sum(each.read_bytes().count(b"\n") for each in lists)
        target = self.path.with_name(f"{self.path.name}{_SKIPPED}")
        if lists:
            with replacing(target) as file:
                _concatenate(file, lists)
        else:
            target.unlink(missing_ok=True)
        joined = self.folder / "joined"
        with joined.open("wb") as file:
            self._format.join(file, parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(joined, self.path)
        shutil.rmtree(self.folder)
        return int(parts[-1].stem.split("-")[1]) - skipped, skipped

    def _parts(self) -> list[Path]:
        found = self.folder.glob(f"[0-9]*{self.path.suffix}")
        return sorted(part for part in found if not part.name.endswith(_SKIPPED))

    def _write_part(self) -> None:
        rows = joined_rows(self._pending)
        self._pending = []
        part = self.folder / f"{self._first:012d}-{rows.end:012d}{self.path.suffix}"
        if rows.bad:
            names = rows.bad_names or [""] * len(rows.bad)
            with replacing(part.with_suffix(_SKIPPED)) as file:
                for (number, reason), name in zip(rows.bad, names, strict=True):
                    record = {"row": number, **({"file": name} if name else {}), "reason": reason}
                    file.write(json.dumps(record).encode() + b"\n")
        with replacing(part) as file:
            self._format.write(file, rows)
        self._first = rows.end

    def _stored_request(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = read_json(self.folder / "request.json", SMALL_BYTES)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{printable(str(self.folder))}: its request.json cannot be read ({printable(str(error))}); start anew "
                "with --force after removing the folder"
            ) from error
        return found

    def _write_request(self, more: dict[str, Any]) -> None:
        with replacing(self.folder / "request.json") as file:
            file.write(json.dumps({**self.request, **more}, indent=1).encode())

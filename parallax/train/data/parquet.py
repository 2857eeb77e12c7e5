"""Rows of Parquet files and of Arrow files (IPC, Feather).

The address of a row is a file, a row group (Parquet) or record batch (Arrow), and an index in the group. Opening a file
reads only its metadata. A row group can only be decoded as a whole, so decoded columns are kept in an LRU cache.
Shuffled reading is fast only if all groups fit into the cache. Uncompressed arrays of Arrow files are mapped and use no
memory.
"""

from __future__ import annotations

import glob
import mmap
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from parallax.common.units import format_bytes, parse_bytes
from parallax.errors import ConfigError, DataError, printable
from parallax.model.source import ModelConfig
from parallax.plan.tier import AUTO
from parallax.train.data.columns import Array, Columns, listed, takes_names
from parallax.train.data.indexed import IndexedDataConfig
from parallax.train.data.order import Numbers, Seeds
from parallax.train.data.paths import check_sets, data_path, files_below, found_file
from parallax.train.data.table import INPUTS, Table, Values, timed

_SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc")
_OPEN_FILES = 32
_END_BYTES, _MIDDLE_BYTES = 2**16, 2**12  # bytes of a file in its digest; the end has the metadata
_MOST_HELD = 2**15  # arrays in the cache; Linux lets a process have twice as many mappings
_MAPPED_BYTES = 2**10  # bytes that a mapped array counts in the cache
_ACCEPTED = "accepted are numbers, and lists of numbers of equal length"


@dataclass(frozen=True, kw_only=True)
class ParquetDataConfig(IndexedDataConfig):
    """Columns of Parquet and Arrow files: numbers, and lists of numbers of equal length.

    ``path``: a file; a folder, whose .parquet, .pq, .arrow, .feather and .ipc files are read in the order of their
        names; or a pattern such as ``rows/train-*.parquet``.
    ``inputs``, ``targets``: the columns for the model and for the loss. A list of names is passed to the model as
        keyword arguments. With auto, the targets are the first of labels, label, targets, target and y that exists, and
        the inputs are all other columns but the index of pandas.
    ``stack``: combine the input columns into one float32 tensor of shape (rows, columns).
    ``cache``: the maximum bytes of decoded row groups in each process.
    """

    name: str = "parquet"
    path: str = ""
    inputs: list[str] | str = AUTO
    targets: list[str] | str = AUTO
    stack: bool = False
    cache: int | str = "1GiB"

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_bytes(self.cache, "data.cache")

    @property
    def label(self) -> str:
        return f"data.path={printable(self.path)}"

    def table(self, model: ModelConfig, *, quiet: bool = True) -> Table:  # noqa: ARG002
        return self._table(model, Columns.chosen)

    def unlabelled(self, model: ModelConfig, *, quiet: bool = True) -> Table:  # noqa: ARG002
        return self._table(model, Columns.unlabelled)

    def _table(self, model: ModelConfig, choose: Callable[..., Columns]) -> Table:
        paths = list(_paths(self.path))
        if not paths:
            raise DataError(
                f"{self.label}: there is no file; accepted are a file, a folder with {', '.join(_SUFFIXES)} files, and "
                "a pattern such as rows/train-*.parquet"
            )
        schema = _open(paths[0]).schema
        named = {*listed(self.inputs), *listed(self.targets)}
        left_out = _index_columns(schema) - named
        known = [each for each in schema.names if each not in left_out]
        by_name = takes_names(model, known)
        columns = choose(self.label, known, self.inputs, self.targets, by_name=by_name)
        limit = parse_bytes(self.cache, "data.cache")
        return ParquetTable(paths, columns, limit, self.label, stack=self.stack)


class ParquetTable:
    """Rows of several files whose columns have the same names and types. ``limit``: the maximum bytes of decoded row
    groups in the cache of a process. ``stack``: whether to combine the input columns into one float32 array. ``label``:
    the name of the data in messages."""

    whole = False

    def __init__(
        self, paths: list[Path], columns: Columns, limit: int, label: str, *, stack: bool
    ) -> None:
        self._columns, self._stack = columns, stack
        names = columns.names(columns.parts)
        self._files = _Files(paths)
        self._groups: list[tuple[int, int]] = []  # file, and group in it
        ends, digest, first = [0], 0, None
        for index, path in enumerate(paths):
            file = _open(path)
            kinds = {name: _kind(file, name) for name in names}
            first = first or kinds
            for name in names:
                if kinds[name] != first[name]:
                    raise DataError(
                        f"{file.where}: the column {printable(name)} has the type {kinds[name]}, and in "
                        f"{printable(str(paths[0]))} {first[name]}; the files of a table need the same types"
                    )
            for group, rows in enumerate(file.rows):
                if rows:
                    self._groups.append((index, group))
                    ends.append(ends[-1] + rows)
            digest = _digest(path, digest)
        if not self._groups:
            raise DataError(f"{label}: the files have no rows")
        self._starts, self._ends = np.array(ends[:-1]), np.array(ends[1:])
        self._cache = _Cache(limit)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.fingerprint = f"{ends[-1]}-{zlib.crc32(repr(columns).encode(), digest):08x}"
        size = self._check_metadata(names)
        self.remarks = [] if size <= limit else [_advice(label, size, limit)]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:  # noqa: ARG002
        """Return the ``parts`` (inputs, targets) of ``rows`` in the dtypes of the columns. The engine later converts
        float64 values and integer targets. ``seeds`` is ignored."""
        groups = np.searchsorted(self._ends, rows, side="right")
        places = rows - self._starts[groups]
        wanted = [(int(group), groups == group) for group in np.unique(groups)]
        arrays: dict[str, Array] = {}
        for name in self._columns.names(parts):
            for group, chosen in wanted:
                values = self._values(group, name)
                if name not in arrays:
                    arrays[name] = np.empty((len(rows), *values.shape[1:]), values.dtype)
                with timed("read"):
                    arrays[name][chosen] = values[places[chosen]]
        found = self._columns.values(arrays, parts)
        if self._stack and INPUTS in parts:
            names = self._columns.parts[INPUTS]
            flat = [arrays[name].reshape(len(rows), -1).astype(np.float32) for name in names]
            found[INPUTS] = np.concatenate(flat, axis=1)
        return found

    def _values(self, group: int, name: str) -> Array:
        """Return the values of one column in one row group."""
        if (known := self._cache.get((group, name))) is not None:
            return known
        index, number = self._groups[group]
        file = self._files.get(index)
        with timed("decode"):
            try:
                values = _decoded(file.column(number, name))
            except _RowError as error:
                row = self._starts[group] - self._starts[self._first_of(index)] + error.row
                raise DataError(
                    f"{file.where}: column {printable(name)}, row {row:,}: {error}; {_ACCEPTED}: mend the row, or "
                    "name other columns (data.inputs, data.targets)"
                ) from error
            except _arrow_errors() as error:
                raise DataError(
                    f"{file.where}: column {printable(name)} cannot be read ({_reason(error)}); copy the file again"
                ) from error
        shape = self._shapes.setdefault(name, values.shape[1:])
        if values.shape[1:] != shape:
            row = self._starts[group] - self._starts[self._first_of(index)]
            raise DataError(
                f"{file.where}: column {printable(name)}, row {row:,}: it has shape {values.shape[1:]}, and other rows "
                f"{shape}; {_ACCEPTED}"
            )
        if file.maps(values):
            self._cache.put((group, name), values, _MAPPED_BYTES)
        else:
            values = _shared(values)
            self._cache.put((group, name), values, values.nbytes)
        return values

    def _first_of(self, file: int) -> int:
        """Return the index of the first row group of ``file``."""
        return next(number for number, (index, _) in enumerate(self._groups) if index == file)

    def _check_metadata(self, names: tuple[str, ...]) -> int:
        """Check the columns ``names`` of all row groups, so that errors appear before training. Return the bytes of
        these columns when they are decoded; a column whose size the metadata do not tell counts as 0 bytes. A row group
        is decoded here only if its metadata show that it may have nulls or lists of unequal length."""
        lengths: dict[str, float] = {}
        size = 0.0
        for group, (index, number) in enumerate(self._groups):
            file = self._files.get(index)
            for name in names:
                length = file.values_per_row(number, name)
                if lengths.setdefault(name, length) != length or not length.is_integer():
                    self._values(0, name)
                    length = self._values(group, name).size / file.rows[number]
                kind, _ = _leaf(file.schema.field(name).type)
                size += length * file.rows[number] * kind.bit_width / 8
        return int(size)


def _shared(values: Array) -> Array:
    """Return a copy of ``values`` in anonymous shared memory, which does not count against the rank's memory budget."""
    copied = np.frombuffer(mmap.mmap(-1, max(1, values.nbytes)), values.dtype, values.size)
    copied = copied.reshape(values.shape)
    copied[...] = values
    _pyarrow().default_memory_pool().release_unused()
    return copied


def _advice(label: str, size: int, limit: int) -> str:
    return (
        f"{label}: decoded, the columns take {format_bytes(size)}, more than data.cache={format_bytes(limit)}, so "
        "shuffled reading decodes a row group for almost each row: raise data.cache, or write uncompressed Arrow "
        "files, which are mapped (pyarrow.feather.write_feather(table, file, compression='uncompressed'))"
    )


class _Cache:
    """An LRU cache of arrays with at most ``limit`` bytes, or with a single larger array."""

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._held: OrderedDict[tuple[int, str], tuple[Array, int]] = OrderedDict()

    def get(self, key: tuple[int, str]) -> Array | None:
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key][0]

    def put(self, key: tuple[int, str], values: Array, size: int) -> None:
        self._held[key] = values, size
        self._bytes += size
        while len(self._held) > (_MOST_HELD if self._bytes <= self._limit else 1):
            _, (_, freed) = self._held.popitem(last=False)
            self._bytes -= freed


# ------------------------------------------------------------------------------------------------ files


class _File(Protocol):
    """A file of a table. ``rows``: the number of rows of each row group."""

    where: str
    schema: Any
    rows: list[int]

    def column(self, group: int, name: str) -> Any:
        """Return the values of a column in a row group as an Arrow array."""

    def values_per_row(self, group: int, name: str) -> float:
        """Return the number of values per row of a column in a row group, from the metadata. NaN means that some values
        are null; 0 means that the metadata do not tell the number."""

    def maps(self, values: Array) -> bool:
        """Return whether ``values`` are a view of the mapped file."""


class _Files:
    """The files of a table that are open in this process. A forked worker opens its own."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths, self._process = paths, os.getpid()
        self._open: OrderedDict[int, _File] = OrderedDict()

    def get(self, index: int) -> _File:
        if self._process != os.getpid():
            self._process, self._open = os.getpid(), OrderedDict()
        if index not in self._open:
            if len(self._open) == _OPEN_FILES:
                self._open.popitem(last=False)
            self._open[index] = _open(self._paths[index])
        self._open.move_to_end(index)
        return self._open[index]


class _ParquetFile:
    """A Parquet file, read without threads."""

    def __init__(self, path: Path, where: str) -> None:
        self.where = where
        self._file = _pyarrow().parquet.ParquetFile(path, pre_buffer=False)
        self.schema = self._file.schema_arrow
        self._groups = self._file.metadata
        count = self._groups.num_row_groups
        self.rows = [self._groups.row_group(number).num_rows for number in range(count)]
        self._leaves: dict[str, int] = {}
        for index in range(self._groups.num_columns):
            self._leaves.setdefault(self._file.schema.column(index).path.split(".")[0], index)

    def column(self, group: int, name: str) -> Any:
        return self._file.read_row_group(group, columns=[name], use_threads=False).column(name)

    def values_per_row(self, group: int, name: str) -> float:
        if (index := self._leaves.get(name)) is None:  # a name with a dot
            return 0.0
        found = self._groups.row_group(group).column(index)
        known = found.statistics
        if known is not None and known.has_null_count and known.null_count:
            return float("nan")
        return float(found.num_values / self.rows[group])

    def maps(self, values: Array) -> bool:  # noqa: ARG002
        return False


class _ArrowFile:
    """An Arrow file in the file format or, as Hugging Face writes it, the stream format.

    An uncompressed file is mapped. A compressed file has one reader for each column, so that only requested columns are
    decompressed.
    """

    def __init__(self, path: Path, where: str) -> None:
        arrow = _pyarrow()
        self.where = where
        self._data = arrow.memory_map(str(path)).read_buffer()
        self._ipc, self._source = arrow.ipc, arrow.BufferReader
        self._is_file = self._data[:6].to_pybytes() == b"ARROW1"
        self._batches: dict[str | None, Any] = {}
        self.schema = self._reader(None).schema
        first = next(self._each(None), None)
        self._mapped = first is None or all(map(self._holds, _buffers(first)))
        # Of a compressed file, the narrowest column says how many rows a batch has.
        width = {field.name: _width(field.type) for field in self.schema}
        narrow = None if self._mapped else min(width, key=lambda name: width[name])
        self.rows = [each.num_rows for each in self._each(narrow)]

    def column(self, group: int, name: str) -> Any:
        key = None if self._mapped else name
        if key not in self._batches:
            self._batches[key] = self._reader(key) if self._is_file else list(self._each(key))
        batches = self._batches[key]
        return (batches.get_batch(group) if self._is_file else batches[group]).column(name)

    def values_per_row(self, group: int, name: str) -> float:  # noqa: ARG002
        return 0.0

    def maps(self, values: Array) -> bool:
        return self._contains(values.__array_interface__["data"][0])

    def _holds(self, buffer: Any) -> bool:
        return buffer is None or not buffer.size or self._contains(buffer.address)

    def _contains(self, address: int) -> bool:
        return bool(0 <= address - self._data.address < self._data.size)

    def _reader(self, name: str | None) -> Any:
        fields = None if name is None else [self.schema.get_field_index(name)]
        options = self._ipc.IpcReadOptions(use_threads=False, included_fields=fields)
        opened = self._ipc.open_file if self._is_file else self._ipc.open_stream
        return opened(self._source(self._data), options=options)

    def _each(self, name: str | None) -> Iterator[Any]:
        reader = self._reader(name)
        if self._is_file:
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from reader


def _buffers(batch: Any) -> Iterator[Any]:
    for column in batch.columns:
        yield from column.buffers()


def _open(path: Path) -> _File:
    """Open a file. Raises :class:`DataError` for a file that is neither Parquet nor Arrow."""
    where = printable(str(path))
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        found: _File = (_ParquetFile if magic == b"PAR1" else _ArrowFile)(path, where)
    except PermissionError as error:
        raise DataError(f"{where}: it cannot be read; make it readable") from error
    except _arrow_errors() as error:
        raise DataError(
            f"{where}: it is no Parquet or Arrow file ({_reason(error)}); {_other_table(path)}"
        ) from error
    names = found.schema.names
    if len(set(names)) < len(names) or not names:
        raise DataError(
            f"{where}: it needs columns with different names; it has {', '.join(names)}"
        )
    return found


def _other_table(path: Path) -> str:
    """Return advice for an error message about a file that is neither Parquet nor Arrow."""
    builders = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json"}
    if (builder := builders.get(path.suffix.lower())) is None:
        return "remove it, or copy it again"
    return (
        "read it with data=dataset data.target=datasets:load_dataset data.kwargs.split=train "
        f"data.kwargs.path={builder} data.kwargs.data_files={printable(str(path))}"
        + (" data.kwargs.sep='\\t'" if path.suffix.lower() == ".tsv" else "")
    )


def _paths(text: str) -> Iterator[Path]:
    """Yield the files that ``data.path`` names, in the same order on every machine."""
    path = Path(text).expanduser().absolute()
    if glob.has_magic(text) and not path.exists():
        parts = path.parts
        place = next(index for index, part in enumerate(parts) if glob.has_magic(part))
        root = Path(*parts[:place])
        names = glob.glob(str(Path(*parts[place:])), root_dir=root, recursive=True)
        names = [name for name in names if not (root / name).is_dir()]
    else:
        root = data_path("data.path", text)
        if not root.is_dir():
            yield root
            return
        label = f"data.path={printable(text)}"
        names = files_below(root, _SUFFIXES, label, hidden=(".", "_"))
        check_sets(root, names, label, patterns=True)
    for name in sorted(names):
        yield found_file(root, name, f"data.path={printable(text)}")


def _digest(path: Path, digest: int) -> int:
    """Return ``digest``, updated with the size of a file, its end (which has the metadata), and bytes from its
    middle."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for start, count in ((max(0, size - _END_BYTES), _END_BYTES), (size // 2, _MIDDLE_BYTES)):
            file.seek(start)
            digest = zlib.crc32(file.read(count), digest)
    return zlib.crc32(str(size).encode(), digest)


# ---------------------------------------------------------------------------------------------- columns


class _RowError(Exception):
    """The values of a row do not form an array. ``row``: the index of the row in its row group."""

    def __init__(self, row: int, text: str) -> None:
        super().__init__(text)
        self.row = row


def _kind(file: _File, name: str) -> str:
    """Return the type of a column as text. Raises :class:`DataError` for a column that is missing or cannot be an
    array."""
    if name not in file.schema.names:
        raise DataError(
            f"{file.where}: it has no column {printable(name)}; its columns are "
            f"{printable(', '.join(file.schema.names))}: set data.inputs=[NAME,...] and data.targets=NAME"
        )
    types = _pyarrow().types
    kind, depth = _leaf(file.schema.field(name).type)
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise DataError(
            f"{file.where}: the column {printable(name)} has the type {file.schema.field(name).type}; {_ACCEPTED}: "
            "name other columns (data.inputs, data.targets), or convert it to numbers first"
        )
    return "list of " * depth + str(kind)


def _index_columns(schema: Any) -> set[str]:
    """Return the columns that pandas wrote for the index of a frame, which numbers or names the rows."""
    found = (schema.pandas_metadata or {}).get("index_columns", ())
    return {each for each in found if isinstance(each, str)}


def _leaf(kind: Any) -> tuple[Any, int]:
    """Return, for the Arrow type ``kind``, the type of the innermost values of nested lists, and the depth of the
    lists."""
    types, kind, depth = _pyarrow().types, _plain(kind), 0
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind, depth = _plain(kind.value_type), depth + 1
    return kind, depth


def _plain(kind: Any) -> Any:
    """Return the storage type of ``kind``, if it is an extension type such as tensors of a fixed shape; otherwise
    ``kind``."""
    return getattr(kind, "storage_type", kind)


def _width(kind: Any) -> int:
    """Return the bits per value of type ``kind``; a large number for lists and text, which have no fixed width."""
    try:
        return int(kind.bit_width)
    except ValueError:
        return 2**31


def _decoded(found: Any) -> Array:
    """Return a column as an array of shape (rows, …). Raises :class:`_RowError` for a null, and for lists that differ
    in length."""
    arrow = _pyarrow()
    values = found.combine_chunks() if isinstance(found, arrow.ChunkedArray) else found
    shape = [len(values)]
    while True:
        tail = list(getattr(values.type, "shape", ()))
        values = getattr(values, "storage", values)
        inner = max(1, int(np.prod(shape[1:], dtype=np.int64)))
        if values.null_count:
            nulls = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
            raise _RowError(int(nulls[0]) // inner, "it is null, or has a null")
        if arrow.types.is_fixed_size_list(values.type):
            shape += tail or [values.type.list_size]
        elif arrow.types.is_list(values.type) or arrow.types.is_large_list(values.type):
            lengths = np.diff(_numbers(values.offsets))
            if (wrong := np.flatnonzero(lengths != lengths[0])).size:
                row = int(wrong[0])
                raise _RowError(
                    row // inner, f"its list has {lengths[row]} values, and others {lengths[0]}"
                )
            shape.append(int(lengths[0]))
        else:
            return _numbers(values).reshape(shape)
        values = values.flatten()


def _numbers(values: Any) -> Array:
    """Return a numpy array that shares the memory of the numeric Arrow array ``values``. Arrow's own conversion would
    import pandas."""
    kind, first, count = values.type, values.offset, len(values)
    data = values.buffers()[1] or b""
    if _pyarrow().types.is_boolean(kind):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return bits[first : first + count].astype(np.bool_)
    dtype = np.dtype(kind.to_pandas_dtype())
    return np.frombuffer(data, dtype, count, first * dtype.itemsize)


# ---------------------------------------------------------------------------------------------- pyarrow


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"data=parquet: it needs pyarrow ({printable(str(error))}); install it with pip install "
            "'parallax-train[parquet]'"
        ) from error
    return pyarrow


def _arrow_errors() -> tuple[type[Exception], ...]:
    return _pyarrow().ArrowException, OSError, ValueError


def _reason(error: Exception) -> str:
    return printable((str(error).splitlines() or [""])[0])

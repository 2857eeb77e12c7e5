"""Rows of arrays in .npy, .npz and .safetensors files. The files are mapped into memory."""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from parallax.errors import ConfigError, DataError, printable
from parallax.model.source import ModelConfig
from parallax.plan.tier import AUTO
from parallax.train.data.columns import (
    Array,
    Columns,
    Names,
    digest_of_columns,
    listed,
    takes_names,
)
from parallax.train.data.indexed import IndexedDataConfig
from parallax.train.data.order import Numbers, Seeds
from parallax.train.data.paths import data_path, inside
from parallax.train.data.table import INPUTS, TARGETS, Table, Values, timed

_SAFETENSORS = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "BF16": "<u2",  # numpy has no such type; the rows are viewed as torch's
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
_LOCAL_HEADER = 30  # bytes of a zip member's own header, without name and extra field


@dataclass(frozen=True, kw_only=True)
class ArraysDataConfig(IndexedDataConfig):
    """Arrays in files; the first dimension is the row.

    ``path``: a folder with .npy files, or one .npz or .safetensors file. ``inputs``, ``targets``: names of the arrays
    for the model and for the loss. A name is the name of a file in the folder, without the suffix .npy, or the name of
    an array in the file. Several inputs are passed to the model as keyword arguments. With auto, the targets are the
    first of labels, label, targets, target and y that exists, and the inputs are all other arrays.
    """

    name: str = "arrays"
    path: str = ""
    inputs: list[str] | str = AUTO
    targets: list[str] | str = AUTO

    @property
    def label(self) -> str:
        return f"data.path={printable(self.path)}"

    def table(self, model: ModelConfig, *, quiet: bool = True) -> Table:  # noqa: ARG002
        return self._table(model, Columns.chosen)

    def unlabelled(self, model: ModelConfig, *, quiet: bool = True) -> Table:  # noqa: ARG002
        """Return rows with inputs only, from a folder or a file. If ``path`` is a single .npy file, its array is the
        input."""
        path = data_path("data.path", self.path)
        if path.suffix != ".npy" or path.is_dir():
            return self._table(model, Columns.unlabelled)
        by_name = model.name == "huggingface"
        name = next(iter(listed(self.inputs)), path.stem)
        columns = Columns({INPUTS: (name,), TARGETS: ()}, by_name)
        return ArraysTable(columns, {name: _of_npy(path.parent, path.stem)}, self.label)

    def _table(self, model: ModelConfig, choose: Callable[..., Columns]) -> ArraysTable:
        path = data_path("data.path", self.path)
        inputs, targets = _without_suffix(self.inputs), _without_suffix(self.targets)
        if path.is_dir():
            openers = _of_folder(path, [*listed(inputs), *listed(targets)])
        else:
            openers = _of_file(path)
        columns = choose(self.label, openers, inputs, targets, by_name=takes_names(model, openers))
        arrays = {name: openers[name]() for name in columns.names(columns.parts)}
        return ArraysTable(columns, arrays, self.label)


class ArraysTable:
    """Rows of several arrays of equal length."""

    whole = False

    def __init__(self, columns: Columns, arrays: Mapping[str, Mapped], label: str) -> None:
        self._columns, self._arrays = columns, arrays
        for name, array in self._arrays.items():
            if not array.values.ndim:
                raise DataError(
                    f"{label}: {printable(name)} is one number; an array needs rows in its first dimension"
                )
        lengths = {name: len(array.values) for name, array in self._arrays.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{printable(name)} {rows:,}" for name, rows in lengths.items())
            raise DataError(
                f"{label}: the arrays have several numbers of rows ({shown}); inputs and targets need the same"
            )
        self._rows = next(iter(lengths.values()))
        if not self._rows:
            raise DataError(f"{label}: the arrays have no rows")
        self.fingerprint = digest_of_columns(
            list(self._arrays), self._rows, lambda name, rows: self._arrays[name].values[rows]
        )

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:  # noqa: ARG002
        """Return the ``parts`` (inputs, targets) of ``rows`` in the dtype of the file. The engine later converts
        float64 values and integer targets. ``seeds`` is ignored."""
        with timed("read"):
            found = {name: self._arrays[name].rows(rows) for name in self._columns.names(parts)}
        return self._columns.values(found, parts)


@dataclass(frozen=True)
class Mapped:
    """An array that is mapped from a file. ``bfloat16``: the array holds the bits of bfloat16 values, as integers."""

    values: Array
    bfloat16: bool = False

    def rows(self, rows: Numbers) -> Any:
        found = self.values[rows]
        return torch.from_numpy(found).view(torch.bfloat16) if self.bfloat16 else found


Openers = dict[str, Callable[[], Mapped]]
"""For each name of an array, a function that opens it."""


def _without_suffix(names: Names) -> Names:
    if isinstance(names, str):
        return names.removesuffix(".npy")
    return [name.removesuffix(".npy") for name in names]


def _of_folder(root: Path, named: list[str]) -> Openers:
    """Return a mapping from the name of an array to the function that opens it. The arrays are all .npy files in the
    folder ``root``, and those of ``named`` that are in subfolders."""
    names = sorted(each.stem for each in root.glob("*.npy"))
    names += [name for name in named if "/" in name]
    if not names:
        raise DataError(f"data.path={printable(str(root))}: the folder has no .npy file")
    return {name: partial(_of_npy, root, name) for name in names}


def _of_file(path: Path) -> Openers:
    """Return a mapping from the name of each array in one .npz or .safetensors file to the function that opens the
    array."""
    kinds = {".npz": _of_npz, ".safetensors": _of_safetensors}
    if path.suffix == ".npy":
        raise ConfigError(
            f"data.path={printable(str(path))}: one .npy file holds inputs or targets; name its folder, and the files "
            "in data.inputs and data.targets"
        )
    if path.suffix not in kinds:
        raise ConfigError(
            f"data.path={printable(str(path))}: accepted are a folder and .npz and .safetensors files; for Parquet and "
            "Arrow files data=parquet"
        )
    return kinds[path.suffix](path)


def _of_npy(root: Path, name: str) -> Mapped:
    path = inside(root, f"{name}.npy", "data.inputs, data.targets")
    try:
        with path.open("rb") as file:
            return Mapped(_mapped_npy(file, path, path.stat().st_size, printable(str(path))))
    except OSError as error:
        raise DataError(
            f"{printable(str(path))}: it cannot be read ({error.strerror}); make it readable"
        ) from error


def _mapped_npy(file: BinaryIO, path: Path, end: int, where: str) -> Array:
    """Return the array in .npy format whose data begin at the current position of ``file`` and end at ``end``. The
    array is mapped from ``path``, the path of ``file``."""
    shape, fortran, dtype = _npy_header(file, where)
    start = file.tell()
    size = _bytes_of(shape, dtype)
    if start + size > end:
        raise DataError(
            f"{where}: it ends after {max(0, end - start):,} of {size:,} bytes of its array; copy it again"
        )
    if not size:
        return np.empty(shape, dtype)
    mapped = np.memmap(
        path, dtype, mode="r", offset=start, shape=shape, order="F" if fortran else "C"
    )
    return np.asarray(mapped)


def _npy_header(file: Any, where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape of the .npy data in ``file``, whether they are in Fortran order (column-major), and their dtype.
    Raises :class:`DataError` for Python objects, which need pickle, and for structured types."""
    formats = np.lib.format
    try:
        version = formats.read_magic(file)
        # Version 3 differs from 2 in the encoding of the names of records alone.
        read = {(1, 0): formats.read_array_header_1_0, (2, 0): formats.read_array_header_2_0}
        if version not in read:
            raise DataError(f"{where}: it has records (.npy version {version[0]}), not numbers")
        shape, fortran, dtype = read[version](file)
    except (ValueError, EOFError, SyntaxError, OSError, zipfile.BadZipFile, zlib.error) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"{where}: it is no .npy array ({printable(reason)})") from error
    if dtype.hasobject:
        raise DataError(
            f"{where}: it holds Python objects, which would be unpickled; save an array of numbers (numpy.stack of "
            "rows of equal shape)"
        )
    if dtype.kind not in "biufc" or any(count < 0 for count in shape):
        raise DataError(
            f"{where}: it has the type {dtype} and shape {shape}; accepted are numbers: name other arrays "
            "(data.inputs=NAME, data.targets=NAME), or save numbers"
        )
    return shape, fortran, dtype


def _bytes_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    size = dtype.itemsize
    for count in shape:
        size *= count
    return size


def _of_npz(path: Path) -> Openers:
    with _reading_zip(path), zipfile.ZipFile(path) as archive:
        members = [each for each in archive.infolist() if each.filename.endswith(".npy")]
    if not members:
        raise DataError(f"{printable(str(path))}: it has no .npy member")
    return {each.filename.removesuffix(".npy"): partial(_of_member, path, each) for each in members}


@contextlib.contextmanager
def _reading_zip(path: Path) -> Iterator[None]:
    """A context that raises :class:`DataError` for a zip archive that cannot be read."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(
            f"{printable(str(path))}: it is no .npz file ({printable(str(error))})"
        ) from error


def _of_member(path: Path, member: zipfile.ZipInfo) -> Mapped:
    """Return the array in a member of a zip archive. An uncompressed member is mapped; a compressed member is
    decompressed into memory."""
    where = f"{printable(str(path))}: {printable(member.filename)}"
    if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1:
        with path.open("rb") as file:
            file.seek(member.header_offset)
            header = file.read(_LOCAL_HEADER)
            if len(header) < _LOCAL_HEADER or header[:4] != b"PK\3\4":
                raise DataError(f"{where}: the archive has no member at {member.header_offset}")
            names = int.from_bytes(header[26:28], "little")
            extra = int.from_bytes(header[28:30], "little")
            start = file.seek(names + extra, os.SEEK_CUR)
            end = min(start + member.file_size, path.stat().st_size)
            return Mapped(_mapped_npy(file, path, end, where))
    with _reading_zip(path), zipfile.ZipFile(path) as archive, archive.open(member) as packed:
        shape, fortran, dtype = _npy_header(packed, where)
        size = _bytes_of(shape, dtype)
        data = packed.read(size) if size <= member.file_size else b""
    if len(data) < size:
        raise DataError(
            f"{where}: it has {member.file_size:,} bytes, and its array needs {size:,}; save it again"
        )
    return Mapped(np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C"))


def _of_safetensors(path: Path) -> Openers:
    where = printable(str(path))
    try:
        with safe_open(path, framework="np"):  # checks the header and the offsets
            pass
    except (SafetensorError, OSError) as error:
        raise DataError(f"{where}: it is no .safetensors file ({printable(str(error))})") from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    if not header:
        raise DataError(f"{where}: it has no tensors")
    return {name: partial(_of_tensor, path, 8 + size, name, each) for name, each in header.items()}


def _of_tensor(path: Path, begin: int, name: str, entry: dict[str, Any]) -> Mapped:
    """Return the tensor ``name`` of the safetensors file ``path``. ``entry``: the tensor's entry in the header of the
    file. ``begin``: the byte at which the data of all tensors start."""
    kind, shape = entry["dtype"], tuple(entry["shape"])
    if kind not in _SAFETENSORS:
        raise DataError(
            f"{printable(str(path))}: {printable(name)} has the type {kind}; accepted are {', '.join(_SAFETENSORS)}"
        )
    dtype = np.dtype(_SAFETENSORS[kind])
    if not _bytes_of(shape, dtype):
        return Mapped(np.empty(shape, dtype))
    offset = begin + entry["data_offsets"][0]
    values = np.memmap(path, dtype, mode="r", offset=offset, shape=shape)
    return Mapped(np.asarray(values), bfloat16=kind == "BF16")

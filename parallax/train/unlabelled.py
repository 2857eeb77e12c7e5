"""New rows for a trained model: inputs without targets, read from files of any supported kind.

Each kind of data returns such rows from :meth:`~parallax.train.data.indexed.IndexedDataConfig.unlabelled`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from parallax.common.typed import defaults
from parallax.errors import ConfigError, DataError, printable
from parallax.model.block import transform
from parallax.model.source import ModelConfig
from parallax.train.data.decoding import SUFFIXES
from parallax.train.data.indexed import IndexedDataConfig
from parallax.train.data.order import Numbers, Seeds
from parallax.train.data.paths import data_path
from parallax.train.data.source import DataConfig, Shapes
from parallax.train.data.table import INPUTS, TARGETS, Table, Values

SKIPPED = "skipped"
"""The part of a batch that lists its bad rows: JSON pairs of row number and reason."""
STOP, SKIP = "stop", "skip"
_KINDS = {
    (".npy",): ("arrays", "tokens"),
    (".npz", ".safetensors"): ("arrays",),
    (".parquet", ".pq"): ("parquet", "chat"),
    (".arrow", ".feather", ".ipc"): ("parquet",),
    tuple(f".{each}" for each in SUFFIXES): ("images",),
    (".wav", ".flac", ".ogg", ".mp3"): ("audio",),
    (".tar",): ("shards",),
    (".jsonl",): ("chat",),
    (".bin",): ("tokens",),
}
_OF_ROWS = frozenset({"name", "path", "labels", "validation", "inputs", "targets"})
_HEAD_BYTES = 8192


def settings_for(path: str, stored: DataConfig) -> DataConfig:
    """Return the data settings with which ``path`` is read. ``stored``: the run's own data settings. If their kind can
    read ``path``, return them with the new path. Otherwise return the settings of another kind, with the values that
    this kind has in common with ``stored``, such as the size of images."""
    kinds = _kinds_of(data_path("--inputs", path))
    if stored.name in kinds:
        labels = {"labels": ""} if hasattr(stored, "labels") else {}
        return replace(stored, path=path, **labels)  # type: ignore[call-arg]
    if hasattr(stored, "target") and kinds[0] == "chat":
        raise ConfigError(
            f"--inputs {printable(path)}: parallax reads such files as conversations, and the rows of the run are "
            f"those of data.target={printable(stored.target)}: choose other rows with data.kwargs.KEY=VALUE or another "
            "data.target in place of --inputs, or name a kind, such as data=chat"
        )
    kind = next(each for each in DataConfig.kinds() if defaults(each)["name"] == kinds[0])
    common = {each.name for each in fields(kind)} & {each.name for each in fields(stored)}
    return kind(path=path, **{key: getattr(stored, key) for key in common - _OF_ROWS})


def _kinds_of(path: Path) -> tuple[str, ...]:
    """Return the names of the kinds of data that can read ``path``. For a folder, its first file of a known type
    decides."""
    for file in [path] if path.is_file() else _walk(path):
        for suffixes, kinds in _KINDS.items():
            if file.name.lower().endswith(suffixes):
                return kinds
    texts = (file for file in ([path] if path.is_file() else _walk(path)) if _is_text(file))
    if next(texts, None) is not None:
        return ("text",)
    raise ConfigError(
        f"--inputs {printable(str(path))}: no kind of data is known for it; name one, for example data=images or "
        "data=dataset data.target=package.module:factory"
    )


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        yield from (Path(folder, each) for each in sorted(names) if not each.startswith("."))


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(_HEAD_BYTES)


@dataclass(frozen=True, kw_only=True)
class UnlabelledDataConfig(IndexedDataConfig):
    """The rows of the data ``kind``, in order and without targets. ``bad``: the reaction to a row that cannot be read:
    stop raises an error; skip puts another row in its place, and lists the bad row in the part ``skipped`` of the
    batch."""

    name: str = ""
    kind: IndexedDataConfig
    bad: str = STOP
    shuffle: bool = False

    @classmethod
    def of(cls, kind: DataConfig, bad: str) -> UnlabelledDataConfig:
        """Return the settings for the rows of ``kind``, with ``bad``, the reaction to a row that cannot be read. Raises
        :class:`ConfigError` for data whose rows cannot be accessed by number."""
        if not isinstance(kind, IndexedDataConfig):
            raise ConfigError(
                f"data={kind.name}: its rows have no numbers, so they cannot be predicted; use a kind of data that has "
                "files, or data=dataset"
            )
        given = {key: getattr(kind, key) for key in ("workers", "prefetch")}
        return cls(name=kind.name, kind=kind, bad=bad, validation=0, **given)

    @property
    def label(self) -> str:
        return self.kind.label

    @property
    def pads_rows(self) -> bool:
        return self.kind.pads_rows

    def shapes(self, model: ModelConfig) -> Shapes | None:
        return self.kind.shapes(model)

    def tables(self, model: ModelConfig, *, quiet: bool = True) -> tuple[Table, dict[str, Table]]:
        found = UnlabelledTable(self.kind.unlabelled(model, quiet=quiet), skips=self.bad == SKIP)
        if not len(found):
            raise DataError(f"{self.label}: it has no rows")
        return found, {INPUTS: found}


class UnlabelledTable:
    """The inputs of ``table``, with None as targets. With ``skips``, a row that cannot be read is replaced by another
    row."""

    whole = False

    def __init__(self, table: Table, *, skips: bool) -> None:
        self._table, self._skips = table, skips
        self.fingerprint = table.fingerprint
        self.whole_batches = getattr(table, "whole_batches", False)
        self.pads = getattr(table, "pads", False)
        self._spare: int | None = None

    def __len__(self) -> int:
        return len(self._table)

    def row_names(self, rows: Numbers) -> list[str] | None:
        """Return the file of each row; None if rows are not files."""
        names = getattr(self._table, "row_names", None)
        return None if names is None else names(rows)

    def lengths(self, rows: Numbers) -> Numbers | None:
        """Return the length of each row without its padding; None if rows are not padded."""
        lengths = getattr(self._table, "lengths", None)
        return None if lengths is None else lengths(rows)

    @property
    def padded_length(self) -> int:
        """The length of a row with its padding; 0 if rows are not padded."""
        return int(getattr(self._table, "padded_length", 0))

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:  # noqa: ARG002
        bad: list[tuple[int, str]] = []
        try:
            inputs = self._inputs(rows, seeds)
        except DataError as error:
            if not self._skips:
                raise DataError(f"{error} (--bad skip leaves such rows out)") from error
            inputs, bad = self._without_bad(rows, seeds)
        return {INPUTS: inputs, TARGETS: None, SKIPPED: json.dumps(bad)}

    def _inputs(self, rows: Numbers, seeds: Seeds) -> Any:
        return self._table.read(rows, seeds, frozenset({INPUTS}))[INPUTS]

    def _without_bad(self, rows: Numbers, seeds: Seeds) -> tuple[Any, list[tuple[int, str]]]:
        """Return the inputs of ``rows``, and a list of (bad row, error). In the inputs, each bad row is replaced by a
        readable row."""
        bad: list[tuple[int, str]] = []
        sound = list[int]()
        for place in range(len(rows)):
            if (reason := self._fault(rows[place : place + 1], seeds[place : place + 1])) is None:
                sound.append(place)
            else:
                bad.append((int(rows[place]), reason))
        if not sound:
            spare = np.full(len(rows), self._spare_row(), rows.dtype)
            return self._inputs(spare, seeds), bad
        taken = np.zeros(len(rows), np.int64)
        taken[sound] = np.arange(len(sound))
        values = self._inputs(rows[sound], seeds[sound])
        return transform(values, lambda part: part[taken], (Tensor, np.ndarray)), bad

    def _fault(self, row: Numbers, seed: Seeds) -> str | None:
        try:
            self._inputs(row, seed)
        except DataError as error:
            return str(error)
        return None

    def _spare_row(self) -> int:
        """Return the number of the first readable row. Its inputs stand in for those of bad rows if all requested
        rows are bad. Raises :class:`DataError` if no row can be read."""
        if self._spare is None:
            for number in range(len(self)):
                row = np.array([number])
                if self._fault(row, row.astype(np.uint64)) is None:
                    self._spare = number
                    return number
            raise DataError("--bad skip: none of the rows can be read")
        return self._spare

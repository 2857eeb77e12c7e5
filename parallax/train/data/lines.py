"""The lines of text files as rows. A line is read from its file when the row is needed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from parallax.errors import DataError, printable
from parallax.train.data.order import Numbers, Seeds
from parallax.train.data.table import INPUTS, Values, timed
from parallax.train.data.tokenizer import TextTokenizer

_PIECE_BYTES = 2**20


class LineTable:
    """Rows of one line each, as int64 ids of shape (rows, ``sequence``). The ids are the bytes of the line or, with a
    ``tokenizer``, its tokens, with padding at the end. The table uses 8 bytes of memory for each line. Names are
    relative to ``root``."""

    whole = False

    def __init__(
        self, root: Path, files: Sequence[Path], sequence: int, tokenizer: TextTokenizer | None
    ) -> None:
        self._root, self._files = root, files
        self._sequence, self._tokenizer = sequence, tokenizer
        self.padded_length = sequence
        self._padding = (tokenizer.end or 0) if tokenizer else 0
        digest, starts = 0, list[Numbers]()
        for file in files:
            found, digest = _line_starts(file, digest)
            starts.append(found)
        self._starts = starts
        # The last start of a file is its end.
        self._ends = np.cumsum([len(each) - 1 for each in starts])
        kind = tokenizer.digest[:16] if tokenizer else "bytes"
        self.fingerprint = f"{digest:08x}/{len(self)}/{sequence}/{kind}"

    def __len__(self) -> int:
        return int(self._ends[-1])

    def row_names(self, rows: Numbers) -> list[str] | None:
        """Return the file of each row, with its line number from 1; None if there is only one file."""
        if len(self._files) == 1:
            return None
        return [self._place(int(row)) for row in rows]

    def lengths(self, rows: Numbers) -> Numbers:
        return np.array([len(ids) for ids in self._ids(rows)], np.int64)

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:  # noqa: ARG002
        found = np.full((len(rows), self._sequence), self._padding, np.int64)
        for place, ids in enumerate(self._ids(rows)):
            if len(ids) > self._sequence:
                unit = "tokens" if self._tokenizer else "bytes"
                raise DataError(
                    f"{self._place(int(rows[place]))}: the line has {len(ids):,} {unit}, more than the model's "
                    f"{self._sequence:,}; shorten it"
                )
            found[place, : len(ids)] = ids
        return {INPUTS: torch.from_numpy(found)}

    def _ids(self, rows: Numbers) -> Sequence[Sequence[int] | NDArray[np.uint8]]:
        """Return the ids of each line, without padding."""
        with timed("read"):
            lines = [self._line(int(row)) for row in rows]
        if self._tokenizer is None:
            return [np.frombuffer(line, np.uint8) for line in lines]
        with timed("tokenize"):
            return self._tokenizer.encode([line.decode("utf-8", "replace") for line in lines])

    def _line(self, row: int) -> bytes:
        file, start, end = self._span(row)
        with self._files[file].open("rb") as opened:
            opened.seek(start)
            return opened.read(end - start).rstrip(b"\r\n")

    def _span(self, row: int) -> tuple[int, int, int]:
        """Return the index of the file that holds the row, and the byte offsets in this file where the row's line
        starts and ends."""
        file = int(np.searchsorted(self._ends, row, side="right"))
        line = row - (int(self._ends[file - 1]) if file else 0)
        return file, int(self._starts[file][line]), int(self._starts[file][line + 1])

    def _place(self, row: int) -> str:
        file = int(np.searchsorted(self._ends, row, side="right"))
        line = row - (int(self._ends[file - 1]) if file else 0) + 1
        path = self._files[file]
        named = path.relative_to(self._root) if path != self._root else path
        return f"{printable(str(named))}:{line}"


def _line_starts(path: Path, digest: int) -> tuple[Numbers, int]:
    """Return the byte offsets at which the lines of a file start, followed by the size of the file. The second result
    is ``digest``, updated with the content of the file."""
    found, size, last = [np.zeros(1, np.int64)], 0, b"\n"
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            ends = np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + size + 1
            found.append(ends)
            digest, size, last = zlib.crc32(piece, digest), size + len(piece), piece[-1:]
    if last != b"\n":
        found.append(np.array([size]))
    return np.concatenate(found), digest

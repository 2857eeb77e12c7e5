"""A file of token ids, which one process writes and all processes map, and rows of its tokens.

Tokens that are not targets of the loss, such as a question in a chat, are stored as their id plus ``NO_TARGET``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from parallax.common.files import cache_directory, replacing
from parallax.errors import ConfigError, DataError
from parallax.model.source import ModelConfig
from parallax.train.data.order import Numbers, Seeds
from parallax.train.data.table import INPUTS, TARGETS, Values

Ids = NDArray[Any]  # of any integer type

NO_TARGET = 1 << 31
PADDING = -(1 << 62)  # instead of an id, beyond the end of a document
IGNORED = -100  # the target that losses do not count
_HEADER_BYTES = 512
_ALIGNMENT = 8
_COUNTED_TOKENS = 2**26  # for the entropy; more would take longer than a hundred steps
_COUNTED_ROWS = 256


def check_vocabulary(model: ModelConfig, needed: int, label: str) -> None:
    """Raise :class:`ConfigError` if the vocabulary of ``model`` has fewer than ``needed`` tokens. Error messages call
    the data ``label``."""
    if not model.vocabulary:
        raise ConfigError(
            f"model={model.name}: this model takes no text, and {label} has nothing else; use data=dataset "
            "data.target=package.module:function"
        )
    if model.vocabulary < needed:
        raise ConfigError(
            f"{vocabulary_key(model)}={model.vocabulary}: {label} has {needed:,} tokens; set the model's vocabulary to "
            f"{needed} or more"
        )


def vocabulary_key(model: ModelConfig) -> str:
    """Return the setting that sets the size of the vocabulary of ``model``."""
    return "model.kwargs.vocabulary" if model.name == "custom" else "model.vocabulary"


# ------------------------------------------------------------------------------------------ the file


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Tokenized documents.

    ``ends``    the index after the last token of each document
    ``firsts``  the index of the first target in each document, counted from the document's start
    ``digest``  a digest of the content
    ``notes``   numbers about the tokenizer
    """

    tokens: Ids
    ends: Numbers
    firsts: Numbers
    digest: str
    notes: dict[str, int]


class TokenWriter:
    """Appends documents to a token file. Call :meth:`begin` first."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._dtype = file, np.dtype(np.uint32)
        self._ends, self._firsts = array("q"), array("q")
        self._digest, self.count, self._notes = hashlib.sha256(), 0, dict[str, int]()
        file.write(b" " * _HEADER_BYTES)

    def begin(self, dtype: Any, **notes: int) -> None:
        """Set the dtype of the tokens, and numbers to store with them."""
        self._dtype, self._notes = np.dtype(dtype), notes

    def add(self, tokens: Any) -> None:
        """Append tokens to the current document."""
        data = np.asarray(tokens, dtype=self._dtype).tobytes()
        self._digest.update(data)
        self._file.write(data)
        self.count += len(data) // self._dtype.itemsize

    def end_document(self, first: int = 1) -> None:
        """End the current document. ``first``: the index of the first target in it."""
        self._ends.append(self.count)
        self._firsts.append(first)

    def close(self) -> None:
        """Write the index of documents and the header."""
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        for numbers in (self._ends, self._firsts):
            self._digest.update(numbers.tobytes())
            self._file.write(numbers.tobytes())
        header = {
            "dtype": self._dtype.name,
            "tokens": self.count,
            "documents": len(self._ends),
            "digest": self._digest.hexdigest(),
            "notes": self._notes,
        }
        self._file.seek(0)
        self._file.write(json.dumps(header).encode())


def open_token_file(kind: str, known: Any, write: Callable[[TokenWriter], None]) -> TokenFile:
    """Return a token file from the cache. If the cache does not have the file, ``write`` creates it. The file is
    identified by ``kind`` and by ``known``, which is JSON data.

    One process of a host writes the file, and the other processes wait. The file gets its name only when it is
    complete.
    """
    key = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]
    path = cache_directory() / f"{kind}-{key}.tokens"
    try:
        if (found := _mapped(path)) is not None:
            return found
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            if (found := _mapped(path)) is None:
                with replacing(path) as file:
                    writer = TokenWriter(file)
                    write(writer)
                    if not writer.count:
                        raise DataError(f"data={kind}: the files hold no tokens; name others")
                    writer.close()
                found = _mapped(path)
    except OSError as error:
        raise DataError(
            f"cannot keep tokens in {path} ({error.filename}: {error.strerror}): make it readable, or point "
            "XDG_CACHE_HOME to a folder with space"
        ) from error
    assert found is not None
    return found


def _mapped(path: Path) -> TokenFile | None:
    """Return the content of a complete token file; None for any other file."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
            size = os.fstat(file.fileno()).st_size
        dtype, count, documents = np.dtype(header["dtype"]), header["tokens"], header["documents"]
        table = _HEADER_BYTES + -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if size != table + 2 * 8 * documents or not count or not documents:
            return None
        numbers = np.memmap(path, np.int64, "r", table, (2, documents))
        tokens = np.memmap(path, dtype, "r", _HEADER_BYTES, (count,))
        return TokenFile(tokens, numbers[0], numbers[1], header["digest"], header["notes"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A context in which no other process of this host writes ``path``."""
    lock = path.with_name(f".{path.name}.lock")
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: each makes its own
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


# ------------------------------------------------------------------------------------------ rows


class RowsOfTokens(Protocol):
    """Rows of equal length, by number."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def gather(self, rows: Numbers) -> NDArray[np.int64]:
        """Return the ids of ``rows`` as they are stored, with ``PADDING`` after the end of a document."""


class PackedRows:
    """Rows of one stream, divided every ``length`` tokens. An incomplete row at the end is dropped."""

    def __init__(self, tokens: Ids, length: int) -> None:
        rows = len(tokens) // length
        self._windows = tokens[: rows * length].reshape(rows, length)

    def __len__(self) -> int:
        return len(self._windows)

    def gather(self, rows: Numbers) -> NDArray[np.int64]:
        return self._windows[rows].astype(np.int64)

    def first_token(self, row: int) -> int:
        return row * self._windows.shape[1]


class DocumentRows:
    """Rows that never span two documents. Row i has the tokens from ``starts[i]`` to ``stops[i]``, at most
    ``length``."""

    def __init__(self, tokens: Ids, starts: Numbers, stops: Numbers, length: int) -> None:
        self._tokens, self._starts, self._stops = tokens, starts, stops
        self._length = length

    def __len__(self) -> int:
        return len(self._starts)

    def gather(self, rows: Numbers) -> NDArray[np.int64]:
        found = np.full((len(rows), self._length), PADDING, dtype=np.int64)
        for place, (start, stop) in enumerate(zip(self._starts[rows], self._stops[rows])):
            found[place, : stop - start] = self._tokens[start:stop]
        return found

    def first_token(self, row: int) -> int:
        return int(self._starts[row])


def continued(tokens: Ids, ends: Numbers, length: int) -> DocumentRows:
    """Return rows of at most ``length`` tokens that never span two documents. A long document continues in the next
    rows. A single token at the end of a document is dropped, because it has no target."""
    begins = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    counts = np.maximum((ends - begins + length - 2) // length, 0)
    documents = np.repeat(np.arange(len(ends)), counts)
    within = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[documents] + within * length
    return DocumentRows(tokens, starts, np.minimum(starts + length, ends[documents]), length)


class TokenTable:
    """Rows of tokens: int64 inputs of shape (rows, sequence) and the next tokens as targets, or -100 for tokens that
    are not targets of the loss. With ``labelled``, the inputs are a mapping with labels, as models of transformers
    expect.

    ``padding``: the id after the end of a document. ``vocabulary``: the size of the vocabulary.
    """

    whole = False

    def __init__(
        self,
        rows: RowsOfTokens,
        fingerprint: str,
        vocabulary: int,
        *,
        padding: int = 0,
        labelled: bool = False,
    ) -> None:
        self._rows, self.fingerprint, self._vocabulary = rows, fingerprint, vocabulary
        self._padding, self._labelled = padding, labelled

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:  # noqa: ARG002
        raw = self._rows.gather(rows)
        beyond = raw == PADDING
        ids = np.where(beyond, self._padding, raw & (NO_TARGET - 1))
        targets = np.where(beyond | (raw >= NO_TARGET), IGNORED, ids)
        if not self._labelled:
            found: Values = {INPUTS: ids[:, :-1], TARGETS: targets[:, 1:]}
            return {part: torch.from_numpy(np.ascontiguousarray(found[part])) for part in parts}
        labels = torch.from_numpy(targets)
        mask = torch.from_numpy((~beyond).astype(np.int64))
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": mask, "labels": labels}
        return {INPUTS: inputs, TARGETS: labels}

    @cached_property
    def frequencies(self) -> NDArray[np.float64]:
        """The frequency of each token among the targets of all rows. With more than 64Mi tokens, only evenly spaced
        rows are counted."""
        counts = np.zeros(self._vocabulary, dtype=np.int64)
        length = self._rows.gather(np.zeros(1, dtype=np.int64)).size
        numbers = np.arange(0, len(self), -(-len(self) * length // _COUNTED_TOKENS))
        for start in range(0, len(numbers), _COUNTED_ROWS):
            raw = self._rows.gather(numbers[start : start + _COUNTED_ROWS])
            counts += np.bincount(raw[(raw >= 0) & (raw < NO_TARGET)], minlength=self._vocabulary)
        return counts / max(1, counts.sum())

    @property
    def unigram_entropy(self) -> float:
        """The loss, in nats per token, of a model that knows only the frequency of each token."""
        return entropy(self.frequencies)


def entropy(shares: NDArray[np.float64]) -> float:
    """Return the entropy, in nats, of the distribution ``shares``, which add up to 1."""
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())


def outside(found: NDArray[np.int64], vocabulary: int) -> tuple[int, int] | None:
    """Return the position (row, column) of an id in ``found`` that exceeds the vocabulary; None if there is none."""
    wrong = ((found < 0) & (found != PADDING)) | (found >= vocabulary)
    if not wrong.any():
        return None
    row, column = np.argwhere(wrong)[0]
    return int(row), int(column)

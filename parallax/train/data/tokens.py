"""Rows of token files written by other programs: nanoGPT, llm.c, numpy and Megatron."""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallax.errors import ConfigError, DataError, check_choice, printable
from parallax.model.source import ModelConfig
from parallax.plan.tier import AUTO
from parallax.train.data.indexed import IndexedDataConfig
from parallax.train.data.order import Numbers, Permutation, Seeds
from parallax.train.data.paths import check_sets, data_path, files_below
from parallax.train.data.source import Shapes
from parallax.train.data.table import Table, Values
from parallax.train.data.token_file import (
    DocumentRows,
    Ids,
    PackedRows,
    TokenTable,
    check_vocabulary,
    continued,
    entropy,
    outside,
    vocabulary_key,
)

DTYPES = (AUTO, "uint16", "uint32")
_SUFFIXES = (".bin", ".npy")
_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # the type by magic number and version
_LLM_C_INTS = 256  # 32-bit numbers before the tokens, of which the third is the number of tokens
_CHECKED_TOKENS, _FEWEST_TOKENS = 2**16, 32
_SAMPLED_BLOCKS, _BLOCK = 64, 4096  # blocks and tokens per block in the digest of a file
_MIXED_KEY = 0x317D  # constant, so that the order of a source's rows does not depend on the seed
_MOST_ROWS = 2**62  # of an epoch; two epochs are still counted in 64 bits
_MOST_ROWS = 2**62  # of an epoch
_EXACT_ROWS = 2**31  # products of numbers of rows below fit into int64


@dataclass(frozen=True, kw_only=True)
class TokensDataConfig(IndexedDataConfig):
    """Token files of other programs: ``.bin`` of nanoGPT and llm.c, ``.npy`` of numpy, and ``.bin`` with ``.idx`` of
    Megatron.

    ``path``: a file, or a folder with token files.
    ``dtype``: the type of the numbers in a ``.bin`` file without a header: uint16 or uint32; auto is uint16.
    ``documents``: packed divides each file's stream of tokens into rows; single starts a new row for each document,
        with padding at the end, and needs Megatron's files.
    ``mixture``: the names of several sources and their shares of the rows, such as ``data.mixture={web: 0.7, code:
        0.3}``. Each name is a file or folder, relative to ``path`` if ``path`` is set.
    """

    name: str = "tokens"
    path: str = ""
    dtype: str = AUTO
    documents: str = "packed"
    mixture: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("data.dtype", self.dtype, DTYPES)
        check_choice("data.documents", self.documents, ("packed", "single"))
        for name, weight in self.mixture.items():
            fits = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not fits or not 0 < weight < math.inf:
                raise ConfigError(
                    f"data.mixture.{printable(str(name))}={printable(str(weight))}: accepted are numbers above 0"
                )

    @property
    def pads_rows(self) -> bool:
        return self.documents != "packed"

    def tables(self, model: ModelConfig, *, quiet: bool = True) -> tuple[Table, dict[str, Table]]:
        """Return the training rows, and a mapping from the name of each held-out set to its rows. A mixture has a
        held-out set for each source."""
        if not self.mixture or isinstance(self.validation, Mapping):
            return super().tables(model, quiet=quiet)
        parts, sets = list[Table](), dict[str, Table]()
        for name, source in self._sources().items():
            training, held_out = source.tables(model, quiet=quiet)
            parts.append(training)
            sets |= dict(zip([name], held_out.values()))
        return self._mixed(parts), sets

    def table(self, model: ModelConfig, *, quiet: bool = True) -> Table:
        """Return all rows. Raises :class:`DataError` for a file that contradicts its header."""
        if self.mixture:
            sources = self._sources().values()
            return self._mixed([each.table(model, quiet=quiet) for each in sources])
        check_vocabulary(model, 1, "data=tokens")
        files = list(self._files(data_path("data.path", self.path)))
        rows = JoinedRows([self._rows(each, model.sequence + 1) for each in files], files, model)
        if not len(rows):
            raise DataError(
                f"data.path={printable(self.path)}: no file has {model.sequence} + 1 tokens, which a row needs; name "
                "longer files or a shorter model.sequence"
            )
        digest = hashlib.sha256("".join(each.digest() for each in files).encode()).hexdigest()
        fingerprint = f"{digest[:16]}/{self.documents}/{model.sequence}"
        return TokenTable(rows, fingerprint, model.vocabulary)

    def shapes(self, model: ModelConfig) -> Shapes:
        def rows_of_tokens(rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
            tokens = torch.empty(rows, model.sequence, dtype=torch.int64, device="meta")
            return (tokens,), tokens

        return rows_of_tokens

    def tokens_per_row(self, model: ModelConfig) -> int:
        return model.sequence

    def _sources(self) -> dict[str, TokensDataConfig]:
        """Return the settings of each source of the mixture."""
        root = Path(self.path) if self.path else Path()
        for name in self.mixture:
            data_path(f"data.mixture.{printable(str(name))}: data.path", str(root / str(name)))
        return {
            str(name): replace(self, path=str(root / str(name)), mixture={})
            for name in self.mixture
        }

    def _mixed(self, parts: Sequence[Table]) -> Table:
        weights = [Fraction(str(each)) for each in self.mixture.values()]
        return MixedTable(parts, weights, shuffle=self.shuffle)

    def _files(self, path: Path) -> Iterator[TokensOnDisk]:
        """Yield the token files of ``path``, a file or a folder, in sorted order."""
        if not path.is_dir():
            found = [path.with_suffix(".bin") if path.suffix == ".idx" else path]
        else:
            label = f"data.path={printable(self.path)}"
            names = files_below(path, _SUFFIXES, label)
            check_sets(path, names, label)
            found = sorted(path / each for each in names)
        if not found:
            raise DataError(
                f"data.path={printable(self.path)}: no token files there; accepted are {' and '.join(_SUFFIXES)}"
            )
        for file in found:
            tokens = open_tokens_on_disk(file, "uint16" if self.dtype == AUTO else self.dtype)
            if self.dtype != "uint16" and file.suffix == ".bin" and tokens.ends is None:
                _check_width(tokens, self.dtype)
            yield tokens

    def _rows(self, file: TokensOnDisk, length: int) -> PackedRows | DocumentRows:
        if self.documents == "packed":
            return PackedRows(file.tokens, length)
        if file.ends is None:
            raise DataError(
                f"data.documents=single: {_named(file.path)} does not say where documents end, which only files of "
                "Megatron (.bin with .idx) do; use data.documents=packed"
            )
        return continued(file.tokens, file.ends, length)


class JoinedRows:
    """The rows of several files, one file after another. All ids must be in the vocabulary of ``model``."""

    def __init__(
        self,
        parts: Sequence[PackedRows | DocumentRows],
        files: Sequence[TokensOnDisk],
        model: ModelConfig,
    ) -> None:
        self._parts, self._files, self._length = parts, files, model.sequence + 1
        self._vocabulary, self._key = model.vocabulary, vocabulary_key(model)
        self._ends = np.cumsum([len(each) for each in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, rows: Numbers) -> NDArray[np.int64]:
        """Return the ids of ``rows``. Raises :class:`DataError` for an id that exceeds the model's vocabulary."""
        found = np.empty((len(rows), self._length), dtype=np.int64)
        owners = np.searchsorted(self._ends, rows, side="right")
        for owner in np.unique(owners):
            part, chosen = self._parts[owner], owners == owner
            own = rows[chosen] - (self._ends[owner] - len(part))
            found[chosen] = ids = part.gather(own)
            if (place := outside(ids, self._vocabulary)) is not None:
                index = part.first_token(int(own[place[0]])) + place[1]
                raise DataError(
                    f"{_named(self._files[owner].path)}: token {index:,} is {ids[place]}, and {self._key}="
                    f"{self._vocabulary}; set the model's vocabulary to that of the tokenizer, or data.dtype to that "
                    "of the file"
                )
        return found


class MixedTable:
    """A mixture of the rows of ``parts``, with the shares ``weights``.

    An epoch is just long enough to contain each row of each part: the part with the most rows per weight is read once,
    and each other part starts again in a new order when it ends. Parts are interleaved evenly: after any number of
    rows, the number of rows from each part differs from its share by at most the number of parts.
    """

    whole = False

    def __init__(self, parts: Sequence[Any], weights: Sequence[Fraction], *, shuffle: bool) -> None:
        self._parts, self._shuffle = parts, shuffle
        shares = [each / sum(weights) for each in weights]
        rows = [math.ceil(len(part) / share) for part, share in zip(parts, shares)]
        self._rows, once = max(rows), rows.index(max(rows))
        if self._rows >= _MOST_ROWS:
            raise ConfigError(
                f"data.mixture: with these weights an epoch has {float(self._rows):.0e} rows, because it has each "
                "row of each source; give the source with the smallest weight a larger one"
            )
        exact = [share * self._rows for share in shares]
        self.counts = [math.floor(each) for each in exact]
        others = [each for each in range(len(parts)) if each != once]
        others.sort(key=lambda each: self.counts[each] - exact[each])
        for each in others[: self._rows - sum(self.counts)]:
            self.counts[each] += 1
        identified = [f"{each.fingerprint}*{n}" for each, n in zip(parts, self.counts)]
        self.fingerprint = f"mixed({', '.join(identified)}){'' if shuffle else ' in order'}"

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:
        found: Values = {}
        for part, places, numbers in self._drawn(rows):
            for name, values in self._parts[part].read(numbers, seeds[places], parts).items():
                if name not in found:
                    found[name] = values.new_empty(len(rows), *values.shape[1:])
                found[name][torch.from_numpy(places)] = values
        return found

    @property
    def unigram_entropy(self) -> float:
        """The loss, in nats per token, of a model that knows only the frequency of each token."""
        shares = [count / self._rows for count in self.counts]
        return entropy(sum(each.frequencies * share for each, share in zip(self._parts, shares)))

    def _drawn(self, rows: Numbers) -> Iterator[tuple[int, Numbers, Numbers]]:
        """Yield (part, positions in ``rows``, row numbers in the part) for each part that has some of ``rows``.

        Rows are assigned to one part after the other. Let n be the number of rows that earlier parts have left, and c
        the number of these rows that the part gets. Of the first r of the n rows, it gets round(r · c / n), for every
        r.
        """
        places, left = np.arange(len(rows)), self._rows
        numbers = rows.astype(np.int64 if self._rows < _EXACT_ROWS else object)
        for part, count in enumerate(self.counts):
            before = (numbers * count + left // 2) // left
            drawn = ((numbers + 1) * count + left // 2) // left > before
            if drawn.any():
                yield part, places[drawn], self._in_part(part, before[drawn].astype(np.int64))
            places, numbers = places[~drawn], (numbers - before)[~drawn]
            left -= count

    def _in_part(self, part: int, drawn: Numbers) -> Numbers:
        size = len(self._parts[part])
        rounds, found = drawn // size, drawn % size
        if self._shuffle:
            for each in np.unique(rounds):
                order = Permutation(size, _MIXED_KEY, part, int(each))
                found[rounds == each] = order(found[rounds == each])
        return found


# ------------------------------------------------------------------------------------------ files


@dataclass(frozen=True, slots=True)
class TokensOnDisk:
    """A mapped file of tokens. ``ends``: the index after the last token of each document; None if the file has no
    documents."""

    path: Path
    tokens: Ids
    ends: Numbers | None = None

    def digest(self) -> str:
        """Return a digest of the number of tokens, their dtype, the documents, and evenly spaced blocks of tokens."""
        found = hashlib.sha256(f"{len(self.tokens)} {self.tokens.dtype}".encode())
        step = max(1, len(self.tokens) // _SAMPLED_BLOCKS)
        for start in (*range(0, len(self.tokens), step), max(0, len(self.tokens) - _BLOCK)):
            found.update(self.tokens[start : start + min(step, _BLOCK)].tobytes())
        if self.ends is not None:
            found.update(self.ends.tobytes())
        return found.hexdigest()


def open_tokens_on_disk(path: Path, dtype: str) -> TokensOnDisk:
    """Return the token file ``path``, mapped. ``dtype``: the type of the numbers in a ``.bin`` file without
    ``.idx``."""
    index = path.with_suffix(".idx")
    try:
        if path.suffix == ".npy":
            return TokensOnDisk(path, _of_numpy(path))
        if path.suffix != ".bin":
            raise DataError(
                f"data.path: {_named(path)} is no token file; accepted are {' and '.join(_SUFFIXES)}"
            )
        if index.is_file():
            return _of_megatron(path, index)
        head = np.fromfile(path, "<i4", 3)
        if found := _LLM_C.get(tuple(head[:2].tolist())):
            return TokensOnDisk(path, _of_llm_c(path, int(head[2]), np.dtype(found)))
        return TokensOnDisk(
            path, _of_numbers(path, np.dtype(dtype).newbyteorder("<"), "data.dtype")
        )
    except OSError as error:
        raise DataError(
            f"data.path: cannot read {_named(path)} ({error.strerror}); make it readable"
        ) from error


def _check_width(file: TokensOnDisk, dtype: str) -> None:
    """Raise :class:`DataError` if the tokens seem to be halves of wider integers: every second token is zero or close
    to zero."""
    found = np.asarray(file.tokens[:_CHECKED_TOKENS])
    wide, most = (("uint32", 3), ("64 bits", 0))[dtype == "uint32"]
    halves, others = found[1::2], found[::2]
    if len(halves) < _FEWEST_TOKENS or halves.max() > most or len(np.unique(others)) <= most + 8:
        return
    help_ = "set data.dtype=uint32, or uint16 if they are right"
    if dtype == "uint32":
        help_ = "write them as uint32 (tokens.astype('uint32').tofile(FILE))"
    raise DataError(
        f"data.path: {_named(file.path)}: every second token is {halves.max()} or less, as if its numbers had "
        f"{wide}: {help_}"
    )


def _of_numbers(path: Path, dtype: Any, where: str) -> Ids:
    size = path.stat().st_size
    if not size or size % dtype.itemsize:
        raise DataError(
            f"{_named(path)}: its {size:,} bytes are no whole number of {dtype.name} tokens, as {where} says"
        )
    return np.memmap(path, dtype, "r")


def _of_llm_c(path: Path, count: int, dtype: Any) -> Ids:
    size, needed = path.stat().st_size, 4 * _LLM_C_INTS + count * dtype.itemsize
    if count < 1 or size != needed:
        raise DataError(
            f"{_named(path)}: its header promises {count:,} tokens in {needed:,} bytes, and it has {size:,}; write it "
            "again"
        )
    return np.memmap(path, dtype, "r", 4 * _LLM_C_INTS, (count,))


def _of_numpy(path: Path) -> Ids:
    try:
        found = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise DataError(
            f"{_named(path)}: it is no array of numbers ({printable(str(error)):.200}); write it with numpy.save"
        ) from error
    if found.ndim != 1 or found.dtype.kind not in "ui":
        raise DataError(
            f"{_named(path)}: it is an array of {found.dtype} with shape {found.shape}; accepted are whole numbers in "
            "one dimension"
        )
    return found


def _of_megatron(path: Path, index: Path) -> TokensOnDisk:
    """Return the tokens of Megatron's indexed dataset.

    The ``.idx`` file has four parts: a header (magic, version, dtype, number of sequences, number of document bounds);
    the length of each sequence (int32); its byte offset in the ``.bin`` file (int64); and the document bounds as
    indices of sequences (int64).
    """
    with index.open("rb") as file:
        head = file.read(_HEADER.size)
        size = os.fstat(file.fileno()).st_size
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise DataError(
            f"{_named(index)}: it does not begin with MMIDIDX, as indexes of Megatron do; remove it to read "
            f"{printable(path.name)} without one"
        )
    _, version, code, sequences, bounds = _HEADER.unpack(head)
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise DataError(
            f"{_named(index)}: it has version {version} and type {code}; accepted are version 1 and types "
            f"{', '.join(map(str, _MEGATRON_DTYPES))}, whole numbers"
        )
    needed = _HEADER.size + 12 * sequences + 8 * bounds
    if (
        not sequences or bounds < 2 or size not in (needed, needed + sequences)
    ):  # the larger size includes modes
        raise DataError(
            f"{_named(index)}: its header promises {sequences:,} sequences and {bounds:,} document bounds in "
            f"{needed:,} bytes, and it has {size:,}; write it again"
        )
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    tokens = _of_numbers(path, dtype, printable(index.name))
    lengths = np.memmap(index, "<i4", "r", _HEADER.size, (sequences,)).astype(np.int64)
    starts = np.memmap(index, "<i8", "r", _HEADER.size + 4 * sequences, (sequences,))
    documents = np.memmap(index, "<i8", "r", _HEADER.size + 12 * sequences, (bounds,))
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    _check_index(index, len(tokens), lengths, starts, ends, dtype.itemsize)
    if documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise DataError(
            f"{_named(index)}: its document bounds do not lead from 0 to {sequences:,}, the number of sequences; "
            "write it again"
        )
    return TokensOnDisk(path, tokens[: ends[-1]], ends[documents[1:]])


def _check_index(
    index: Path, tokens: int, lengths: Numbers, starts: Numbers, ends: Numbers, size: int
) -> None:
    """Raise :class:`DataError` unless the sequences are contiguous within ``tokens`` tokens of ``size`` bytes each."""
    wrong = (lengths < 0) | (starts != ends[:-1] * size) | (ends[1:] > tokens)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise DataError(
            f"{_named(index)}: sequence {at:,} begins at byte {starts[at]:,} and has {lengths[at]:,} tokens; it must "
            f"follow the one before it, at byte {ends[at] * size:,}, and end within the {tokens:,} tokens of the .bin "
            "file; write both files again"
        )


def _named(path: Path) -> str:
    return printable(str(path))

"""Rows of text. The text is collected once into a file that all ranks map."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import math
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallax.common.files import cache_directory, replacing
from parallax.common.units import parse_bytes
from parallax.errors import ConfigError, DataError, check_choice, check_positive, printable
from parallax.model.source import BYTES, ModelConfig
from parallax.plan.tier import AUTO
from parallax.train.data.indexed import HELD_OUT, IndexedDataConfig
from parallax.train.data.lines import LineTable
from parallax.train.data.paths import check_folder_link, check_sets, data_path, found_file
from parallax.train.data.progress import progress
from parallax.train.data.source import Shapes
from parallax.train.data.table import Table
from parallax.train.data.token_file import (
    Ids,
    PackedRows,
    TokenFile,
    TokenTable,
    TokenWriter,
    check_vocabulary,
    continued,
    open_token_file,
)
from parallax.train.data.tokenizer import digest_of_tokenizer, open_tokenizer, write_tokens

DOCUMENTS = ("packed", "single", "lines")
MINIMUM_ROWS = 4
PIECE_BYTES = 2**20
DIGEST_BYTES = 64
_AUTO_SHARE, _AUTO_BYTES = (
    0.05,
    2**17,
)  # held out by default; more would take longer than a hundred steps
_TABLES = (".parquet", ".pq", ".arrow", ".feather")
_ARCHIVES = (".gz", ".tgz", ".zip", ".bz2", ".xz", ".zst", ".tar")
NOT_TEXT_OF_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
)


@dataclass(frozen=True, kw_only=True)
class TextDataConfig(IndexedDataConfig):
    """Bytes or tokens of text files.

    ``path``: a folder or a file; auto is the source code of Python's standard library.
    ``pattern``: the names of the files to read in a folder, such as ``*.txt``.
    ``max_bytes``: the maximum bytes of text to read.
    ``tokenizer``: a ``tokenizer.json``, or a folder written by ``save_pretrained`` of transformers; empty for bytes.
    ``documents``: packed joins all files to one stream, with the tokenizer's end-of-text token after each file, and
        divides the stream into rows; single starts a new row for each file; lines makes each line a row. Short rows are
        padded.
    ``field``: the key of the text in each line of ``.jsonl`` files; each line then counts as a separate file.

    A ``validation`` share holds out the end of a packed stream; auto is a twentieth, at most 128 Ki bytes or tokens.
    With single and lines, random rows are held out.
    """

    name: str = "text"
    path: str = "auto"
    pattern: str = "*"
    max_bytes: int | str = "64MiB"
    tokenizer: str = ""
    documents: str = DOCUMENTS[0]
    field: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("path", "pattern"):
            # Most likely the user's shell variable is not set. As a path, an empty text would be the current folder.
            if not getattr(self, key):
                raise ConfigError(
                    f"data.{key}=: it is empty; name a folder or a pattern of files, or leave it out"
                )
        parse_bytes(self.max_bytes, "data.max_bytes")
        check_choice("data.documents", self.documents, DOCUMENTS)
        if self.field and (not self.tokenizer or self.documents == "lines"):
            raise ConfigError(
                f"data.field={printable(self.field)}: it needs a tokenizer (data.tokenizer=FOLDER), and "
                "data.documents=packed or single"
            )
        if self.documents != "packed" and not self.tokenizer:
            raise ConfigError(
                f"data.documents={self.documents}: it needs a tokenizer (data.tokenizer=FOLDER); bytes are packed"
            )

    @property
    def pads_rows(self) -> bool:
        return self.documents != "packed"

    def tables(self, model: ModelConfig, *, quiet: bool = True) -> tuple[Table, dict[str, Table]]:
        """Return the training and held-out rows of ``model.sequence`` bytes or tokens. ``quiet`` hides the progress
        bars."""
        if isinstance(self.validation, Mapping) or self.documents != "packed":
            return super().tables(model, quiet=quiet)
        training, held_out = split_text(self, model, quiet=quiet)
        return training, {HELD_OUT: held_out} if len(held_out) else {}

    def table(self, model: ModelConfig, *, quiet: bool = True) -> Table:
        """Return all rows of the text."""
        if self.documents == "packed":
            return split_text(replace(self, validation=0), model, quiet=quiet)[0]
        found = open_tokens(self, model, quiet=quiet)
        rows = continued(found.tokens, found.ends, model.sequence + 1)
        fingerprint = f"{found.digest[:16]}/{self.documents}/{model.sequence}"
        return TokenTable(
            rows, fingerprint, found.notes["vocabulary"], padding=found.notes["padding"]
        )

    def unlabelled(self, model: ModelConfig, *, quiet: bool = True) -> Table:  # noqa: ARG002
        """Return a row for each line of the files, with padding at the end of the row. The setting ``documents`` is
        ignored."""
        if self.field:
            raise DataError("data.field: rows without targets are lines; write the texts as lines")
        files = [file.path for file in find_text(self, sys.maxsize)]
        if not files:
            raise DataError(
                f"data.path={printable(self.path)}: there is no text in files that match data.pattern="
                f"{printable(self.pattern)}"
            )
        root = data_path("data.path", self.path) if self.path != "auto" else files[0].parent
        if not self.tokenizer:
            check_vocabulary(model, BYTES, "data=text without data.tokenizer")
            return LineTable(root, files, model.sequence, None)
        tokenizer = open_tokenizer(self.tokenizer)
        check_vocabulary(model, tokenizer.vocabulary, f"data.tokenizer={printable(self.tokenizer)}")
        return LineTable(root, files, model.sequence, tokenizer)

    def stream(self, model: ModelConfig, *, quiet: bool = True) -> tuple[Ids, str, int]:
        """Return all bytes or tokens as one stream, its digest, and the size of the vocabulary."""
        if self.tokenizer:
            found = open_tokens(self, model, quiet=quiet)
            return found.tokens, found.digest, found.notes["vocabulary"]
        check_vocabulary(model, BYTES, "data=text without data.tokenizer")
        corpus = open_corpus(self, quiet=quiet)
        return corpus.bytes, corpus.digest, BYTES

    def shapes(self, model: ModelConfig) -> Shapes:
        def text(rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
            tokens = torch.empty(rows, model.sequence, dtype=torch.int64, device="meta")
            return (tokens,), tokens

        return text

    def tokens_per_row(self, model: ModelConfig) -> int:
        return model.sequence

    def held_out(self, size: int) -> int:
        """Return how many of ``size`` bytes or tokens are held out."""
        if self.validation == AUTO:
            return min(round(size * _AUTO_SHARE), _AUTO_BYTES)
        return round(size * float(self.validation))


def split_text(
    config: TextDataConfig, model: ModelConfig, *, quiet: bool = True
) -> tuple[TokenTable, TokenTable]:
    """Return the training rows and the held-out rows of a packed stream, each a window of ``model.sequence`` + 1 bytes
    or tokens. The end of the stream is held out."""
    sequence, unit = model.sequence, "tokens" if config.tokenizer else "bytes"
    check_positive("sequence", sequence)
    stream, digest, vocabulary = config.stream(model, quiet=quiet)
    training = len(stream) - config.held_out(len(stream))
    parts = [PackedRows(part, sequence + 1) for part in (stream[:training], stream[training:])]
    whole = config.validation == 0
    if len(parts[0]) < MINIMUM_ROWS or (len(parts[1]) < 1 and not whole):
        held_out = _AUTO_SHARE if config.validation == AUTO else float(config.validation)
        share = min((1 - held_out) / MINIMUM_ROWS, held_out or 1)
        raise DataError(
            f"data.path={printable(config.path)} holds {len(stream):,} {unit} of text: rows of "
            f"{sequence} + 1 {unit} with data.validation={config.validation} need about "
            f"{math.ceil((sequence + 2) / share):,}; name more text (data.path, data.pattern, data.max_bytes) or a "
            f"shorter sequence{f'. {remedy}' if (remedy := _remedy(config)) else ''}"
        )
    fingerprint = f"{digest[:16]}/{training}+{len(stream) - training}/{sequence}"
    one, other = (TokenTable(rows, fingerprint, vocabulary) for rows in parts)
    return one, other


# ---------------------------------------------------------------------------------------------- corpus


@dataclass(frozen=True, slots=True)
class Corpus:
    """The collected text, mapped from its cache file, and the SHA-256 of its content."""

    bytes: NDArray[np.uint8]
    digest: str


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of the corpus. Its size and modification time tell whether a cached corpus is still valid."""

    path: Path
    size: int
    modified_ns: int


def open_corpus(config: TextDataConfig, *, quiet: bool = True) -> Corpus:
    """Return the corpus of ``config``, mapped from its cache file, which is written first if there is no valid one.

    The cache file has a digest (64 hex digits) followed by the text. Several ranks may write the cache file at the same
    time. They write equal bytes to separate temporary files, and rename these to the same name.
    """
    files, size, known = _chosen(config)
    path = (
        cache_directory()
        / f"text-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]}.bin"
    )
    try:
        if not path.is_file() or path.stat().st_size != DIGEST_BYTES + size:
            _gather(files, size, path, quiet=quiet)
        text = np.memmap(path, dtype=np.uint8, mode="r", offset=DIGEST_BYTES)
        with path.open("rb") as file:
            return Corpus(text, file.read(DIGEST_BYTES).decode("ascii"))
    except OSError as error:
        raise DataError(
            f"cannot gather {size:,} bytes of text into {path} ({error.filename}: {error.strerror}): "
            "make it readable, or point XDG_CACHE_HOME to a folder with space"
        ) from error


def open_tokens(config: TextDataConfig, model: ModelConfig, *, quiet: bool = True) -> TokenFile:
    """Return the tokens of the files of ``config``, mapped from their cache file, which is written first if there is no
    valid one. Raises :class:`ConfigError` if the vocabulary of ``model`` is too small."""
    files, size, known = _chosen(config)
    lines, named = config.documents == "lines", f"data.tokenizer={printable(config.tokenizer)}"

    def write(writer: TokenWriter) -> None:
        tokenizer = open_tokenizer(config.tokenizer)
        check_vocabulary(model, tokenizer.vocabulary, named)
        dtype = np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32
        writer.begin(dtype, vocabulary=tokenizer.vocabulary, padding=tokenizer.end or 0)
        with progress("tokenizing text", size, quiet=quiet, in_bytes=True) as advance:
            parts = _parts(files, size)
            write_tokens(tokenizer, parts, writer, advance, lines=lines, field=config.field)

    digest = digest_of_tokenizer(data_path("data.tokenizer", config.tokenizer))
    fields = [config.field] if config.field else []
    found = open_token_file("text", [known, digest, lines, *fields], write)
    check_vocabulary(model, found.notes["vocabulary"], named)
    return found


def _parts(files: list[TextFile], size: int) -> Iterator[tuple[Path, int, bool]]:
    """Yield (file, bytes to read, whether this is the whole file) for each of ``files``. At most ``size`` bytes are
    read in total."""
    for file in files:
        taken = min(file.size, size)
        size -= taken
        yield file.path, taken, taken == file.size


def _chosen(config: TextDataConfig) -> tuple[list[TextFile], int, list[Any]]:
    """Return the files to read, the bytes to read in total, and the properties by which a cache file is recognized as
    valid."""
    limit = parse_bytes(config.max_bytes, "data.max_bytes")
    files = list(find_text(config, limit))
    if config.path != "auto" and (root := data_path("data.path", config.path)).is_dir():
        names = [each.path.relative_to(root).as_posix() for each in files]
        check_sets(root, names, f"data.path={printable(config.path)}")
    size = min(limit, sum(file.size for file in files))
    if not size:
        raise DataError(
            f"data.path={printable(config.path)}: no text in files that match data.pattern="
            f"{printable(config.pattern)}; "
            + (_remedy(config) or "name another folder or pattern")
            + " (a file with a NUL byte in its first 8 KiB is no text)"
        )
    _check_objects(config.field, files)
    known = [
        config.path,
        config.pattern,
        limit,
        [(os.fsencode(f.path).hex(), f.size, f.modified_ns) for f in files],
    ]
    return files, size, known


def _remedy(config: TextDataConfig) -> str:
    """Return what to do with the first table or archive among the files of ``config``; empty if there is none."""
    root = Path(config.path).expanduser().absolute()
    for path in _walk(root, frozenset()):
        if fnmatch.fnmatch(path.name, config.pattern) or path == root:
            name, shown = path.name.lower(), printable(path.name)
            if name.endswith(_TABLES):
                return (
                    f"{shown} is a table: write its texts as JSON lines, pandas.read_parquet(FILE)[['text']].to_json("
                    "'texts.jsonl', orient='records', lines=True), and read them with data.field=text "
                    "data.tokenizer=FOLDER; data=parquet reads columns of numbers"
                )
            if name.endswith(_ARCHIVES):
                return (
                    f"{shown} is an archive: unpack it (tar xf, gunzip, unzip) and name the folder; data=shards reads "
                    "samples in tar files"
                )
    return ""


def _check_objects(field: str, files: list[TextFile]) -> None:
    """Raise :class:`DataError` if ``field`` is empty and a ``.jsonl`` file holds texts in JSON objects, or if ``field``
    is set and a file is not a ``.jsonl`` file."""
    for file in files:
        where = f"data.path: {printable(str(file.path))}"
        if file.path.suffix != ".jsonl":
            if field:
                raise DataError(
                    f"{where} is no .jsonl file, of which data.field={printable(field)} is; narrow data.pattern "
                    "(data.pattern=*.jsonl), or convert a table: pandas.read_csv(FILE).to_json('texts.jsonl', "
                    "orient='records', lines=True)"
                )
        elif not field:
            with file.path.open("rb") as opened:
                if re.match(rb'\s*\{[^\n]*"text"\s*:\s*"', opened.read(PIECE_BYTES)):
                    raise DataError(
                        f"{where} has texts in JSON objects; read them with data.field=text and data.tokenizer=FOLDER"
                    )


def find_text(config: TextDataConfig, limit: int) -> Iterator[TextFile]:
    """Yield the text files in ``path``, in the same order on every machine, until they have ``limit`` bytes in
    total."""
    auto = config.path == "auto"
    root = Path(sysconfig.get_paths()["stdlib"] if auto else config.path).expanduser().absolute()
    if not root.exists():
        raise DataError(
            f"data.path={printable(config.path)}: there is no {printable(str(root))}; name a folder with text"
        )
    found = 0
    for path in _walk(root, NOT_TEXT_OF_STDLIB if auto else frozenset()):
        if found >= limit:
            return
        name = path.relative_to(root).as_posix()
        if (
            root.is_dir()
            and not fnmatch.fnmatch(path.name, config.pattern)
            and not fnmatch.fnmatch(name, config.pattern)
        ):
            continue
        if auto and path.suffix != ".py":
            continue
        if path.is_symlink() and path != root and not auto:
            found_file(
                root, name, f"data.path={printable(config.path)}, data.pattern={config.pattern}"
            )
        if file := _text_file(path):
            found += file.size
            yield file


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Yield the files below ``root`` in sorted order. Raises :class:`DataError` for a folder that cannot be listed,
    since its rows would silently be missing."""

    def stop(error: OSError) -> None:
        raise DataError(
            f"data.path: cannot list {error.filename} ({error.strerror}); make it readable"
        ) from error

    if not root.is_dir():
        yield root
        return
    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = sorted(set(folders) - skipped)
        if not skipped:
            for name in folders:
                check_folder_link(root, Path(folder, name).relative_to(root), "data.path")
        yield from (Path(folder, name) for name in sorted(names))


def _text_file(path: Path) -> TextFile | None:
    """Return the text file at ``path``; None if the file is not regular, is empty, or contains no text."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            head, status = file.read(8192), os.fstat(file.fileno())
    except OSError as error:
        raise DataError(
            f"data.path: cannot read {printable(str(path))} ({error.strerror}); make it readable or narrow data.pattern"
        ) from error
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        with contextlib.suppress(UnicodeError):
            head[: len(head) // 4 * 4].decode("utf-16")
            raise DataError(
                f"data.path: {printable(str(path))} is UTF-16; convert it (iconv -f UTF-16 -t UTF-8 IN > OUT), or "
                "narrow data.pattern"
            )
    return (
        TextFile(path, status.st_size, status.st_mtime_ns) if head and b"\0" not in head else None
    )


def _gather(files: list[TextFile], size: int, path: Path, *, quiet: bool) -> None:
    digest, left = hashlib.sha256(), size
    with (
        replacing(path) as target,
        progress("gathering text", size, quiet=quiet, in_bytes=True) as advance,
    ):
        target.write(b" " * DIGEST_BYTES)
        for file in files:
            with file.path.open("rb") as source:
                expected = min(file.size, left)
                while expected and (piece := source.read(min(expected, PIECE_BYTES))):
                    digest.update(piece)
                    target.write(piece)
                    advance(len(piece))
                    expected, left = expected - len(piece), left - len(piece)
            if expected:
                raise DataError(
                    f"{printable(str(file.path))} became shorter while it was read: start again"
                )
        target.seek(0)
        target.write(digest.hexdigest().encode("ascii"))

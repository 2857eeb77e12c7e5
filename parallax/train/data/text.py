"""Rows of text: collected once into a file that each rank maps, in a new order in each epoch, exactly resumable."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import math
import os
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import DownloadColumn, Progress
from torch import Tensor

from parallax.common.files import cache_directory, replacing
from parallax.common.units import parse_bytes
from parallax.errors import CheckpointError, ConfigError, DataError, check_positive, printable
from parallax.model.source import BYTES, ModelConfig
from parallax.plan.tier import AUTO
from parallax.runtime.batch import Rows
from parallax.train.data.source import DataConfig, Shapes, Source

Windows = NDArray[np.uint8]  # (rows, sequence + 1)

MINIMUM_ROWS = 4
ROWS_PER_COUNT = 4096
PIECE_BYTES = 2**20
DIGEST_BYTES = 64
_AUTO_SHARE, _AUTO_BYTES = (
    0.05,
    2**17,
)  # held out by default; more would take longer than a hundred steps
NOT_TEXT_OF_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
)


@dataclass(frozen=True, kw_only=True)
class TextDataConfig(DataConfig):
    """Bytes of text files.

    ``path``: a folder or a file; auto is the source code of Python's standard library. ``pattern``: for names of files
    below a folder, such as ``*.txt``. ``validation``: the share of the text that is held out; auto is a twentieth, at
    most 128 KiB. ``max_bytes``: the most text that is read.
    """

    name: str = "text"
    path: str = "auto"
    pattern: str = "*"
    validation: float | str = AUTO
    max_bytes: int | str = "64MiB"

    def __post_init__(self) -> None:
        for key in ("path", "pattern"):
            # Of a variable that is not set, most likely; as a path it would be this folder.
            if not getattr(self, key):
                raise ConfigError(
                    f"data.{key}=: it is empty; name a folder or a pattern of files, or leave it out"
                )
        parse_bytes(self.max_bytes, "data.max_bytes")
        if self.validation != AUTO and not (
            isinstance(self.validation, int | float) and 0 < self.validation < 1
        ):
            raise ConfigError(
                f"data.validation={printable(str(self.validation))}: accepted are auto and shares between 0 and 1"
            )

    @property
    def identifies_rows(self) -> bool:
        return True

    def open(self, model: ModelConfig, seed: int, *, quiet: bool = True) -> TextSource:
        """Return rows of ``model.sequence`` bytes. ``quiet`` hides the progress bar of collecting text."""
        if not model.vocabulary:
            raise ConfigError(
                f"model={model.name}: this model takes no text, and data=text has nothing else; use data=custom "
                "data.target=package.module:function"
            )
        if model.vocabulary < BYTES:
            raise ConfigError(
                f"model.vocabulary={model.vocabulary}: text needs {BYTES}, one for each value of a byte"
            )
        return TextSource(self, model.sequence, seed, quiet=quiet)

    def shapes(self, model: ModelConfig) -> Shapes:
        def text(rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
            tokens = torch.empty(rows, model.sequence, dtype=torch.int64, device="meta")
            return (tokens,), tokens

        return text

    def tokens_per_row(self, model: ModelConfig) -> int:
        return model.sequence

    def check_size(self, source: Source, model: ModelConfig, rows: int) -> None:
        assert isinstance(source, TextSource)
        if len(source) < rows:
            raise DataError(
                f"trainer.global_batch={rows}: the text of data.* has {len(source)} training rows of "
                f"{model.sequence} + 1 bytes; use trainer.global_batch={len(source)} or less, or name more text "
                "(data.path, data.pattern, data.max_bytes)"
            )

    def held_out(self, size: int) -> int:
        """Return how many of ``size`` bytes of text are held out."""
        if isinstance(self.validation, str):
            return min(round(size * _AUTO_SHARE), _AUTO_BYTES)
        return round(size * self.validation)


class WindowRows:
    """Rows of text that become tensors on request: row i is window ``order[i]``; its targets are one byte later."""

    def __init__(self, windows: Windows, order: NDArray[np.int64]) -> None:
        self._windows = windows
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def inputs(self, start: int, stop: int) -> Tensor:
        """Return the bytes of rows [start, stop): int64, (rows, sequence)."""
        return torch.from_numpy(self._windows[self._order[start:stop], :-1].astype(np.int64))

    def targets(self, start: int, stop: int) -> Tensor:
        """Return the byte after each input: int64, (rows, sequence)."""
        return torch.from_numpy(self._windows[self._order[start:stop], 1:].astype(np.int64))


class TextSource:
    """Text as rows of bytes, in a new random order in each epoch, exactly resumable.

    Each rank maps one file and reads only its rows, so no rank holds the corpus. The last bytes are held out
    (``config.validation``); the rest is split into windows of ``sequence`` + 1 bytes that do not overlap. With n
    windows, row g of the run is in epoch g // n at place g % n of that epoch's order, so one number, the position,
    determines all following rows, whatever the batch size.
    """

    def __init__(
        self, config: TextDataConfig, sequence: int, seed: int, *, quiet: bool = True
    ) -> None:
        check_positive("sequence", sequence)
        corpus = open_corpus(config, quiet=quiet)
        training = len(corpus.bytes) - config.held_out(len(corpus.bytes))
        self._training = _windows(corpus.bytes[:training], sequence)
        self._held_out = _windows(corpus.bytes[training:], sequence)
        if len(self._training) < MINIMUM_ROWS or len(self._held_out) < 1:
            held_out = _AUTO_SHARE if isinstance(config.validation, str) else config.validation
            share = min((1 - held_out) / MINIMUM_ROWS, held_out)
            raise DataError(
                f"data.path={printable(config.path)} holds {len(corpus.bytes):,} bytes of text: rows of "
                f"{sequence} + 1 bytes with data.validation={config.validation} need about "
                f"{math.ceil((sequence + 2) / share):,}; name more text (data.path, data.pattern, "
                "data.max_bytes) or a shorter sequence"
            )
        self.fingerprint = (
            f"{corpus.digest[:16]}/{training}+{len(corpus.bytes) - training}/{sequence}"
        )
        self._seed = seed
        self._position = 0
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self._training)

    def batch(self, rows: int) -> Rows:
        """Return the next ``rows`` rows; a batch may continue into the next epoch."""
        check_positive("rows", rows)
        position, taken, parts = self._position, 0, []
        while taken < rows:
            epoch, place = divmod(position + taken, len(self))
            parts.append(self._order(epoch)[place : place + rows - taken])
            taken += len(parts[-1])
        self._position += rows
        for epoch in [epoch for epoch in self._orders if epoch < self._position // len(self)]:
            del self._orders[epoch]
        return WindowRows(self._training, np.concatenate(parts))

    @property
    def validation_rows(self) -> int:
        return len(self._held_out)

    def validation(self, index: int, rows: int) -> Rows:
        """Return held-out rows [index · rows, (index + 1) · rows), modulo their number."""
        order = np.arange(index * rows, (index + 1) * rows, dtype=np.int64) % len(self._held_out)
        return WindowRows(self._held_out, order)

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Return the loss, in nats per byte, of a model that knows only the frequency of each byte value."""
        counts = np.zeros(256, dtype=np.int64)
        # Bincount widens to 8 bytes each: never all at once.
        for start in range(0, len(self), ROWS_PER_COUNT):
            counts += np.bincount(
                self._training[start : start + ROWS_PER_COUNT].ravel(), minlength=256
            )
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows taken so far, the seed of their order, and the digest of the corpus."""
        return {"position": self._position, "seed": self._seed, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, in the row order of its seed, even if this run has another seed.

        Raises :class:`CheckpointError` for another corpus, split or sequence, for which the position means other rows.
        """
        if state["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"the checkpoint was trained on text {printable(str(state['fingerprint']))}, but data.* now "
                f"gives {self.fingerprint} (content/training+validation bytes/sequence): restore the text "
                "and the settings, or start a new run"
            )
        self._position, self._seed = int(state["position"]), int(state["seed"])
        self._orders.clear()

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Return the epoch's permutation of the windows. It sorts Philox's raw numbers, which are equal in all numpy
        versions; ``Generator.permutation`` may change."""
        if epoch not in self._orders:
            key = np.array([self._seed % 2**64, epoch], dtype=np.uint64)
            draws = np.random.Philox(key=key).random_raw(len(self))
            self._orders[epoch] = np.argsort(draws, kind="stable").astype(np.int64)
        return self._orders[epoch]


def _windows(text: NDArray[np.uint8], sequence: int) -> Windows:
    """Return a view of ``text`` of shape (rows, sequence + 1); last bytes that do not fill a window are omitted."""
    rows = len(text) // (sequence + 1)
    return text[: rows * (sequence + 1)].reshape(rows, sequence + 1)


# ---------------------------------------------------------------------------------------------- corpus


@dataclass(frozen=True, slots=True)
class Corpus:
    """The collected text, mapped from its cache file, and the SHA-256 of its content."""

    bytes: NDArray[np.uint8]
    digest: str


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of the corpus, with the properties that validate the cache."""

    path: Path
    size: int
    modified_ns: int


def open_corpus(config: TextDataConfig, *, quiet: bool = True) -> Corpus:
    """Return the corpus of ``config``, mapped from its cache file. The text is collected first if no cache file matches
    the present files.

    The cache file is the digest (64 hex digits) followed by the text. Ranks that collect at the same time write equal
    bytes to different temporary files, of which the last one renamed remains.
    """
    limit = parse_bytes(config.max_bytes, "data.max_bytes")
    files = list(find_text(config, limit))
    size = min(limit, sum(file.size for file in files))
    if not size:
        raise DataError(
            f"data.path={printable(config.path)}: no text in files that match data.pattern="
            f"{printable(config.pattern)}; name another folder or pattern (a file with a NUL byte in its "
            "first 8 KiB is no text)"
        )
    known = [
        config.path,
        config.pattern,
        limit,
        [(os.fsencode(f.path).hex(), f.size, f.modified_ns) for f in files],
    ]
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


def find_text(config: TextDataConfig, limit: int) -> Iterator[TextFile]:
    """Yield the text files in ``path``, in the same order on every machine, until they hold ``limit`` bytes."""
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
        if file := _text_file(path):
            found += file.size
            yield file


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Yield files in sorted order. A folder that cannot be listed raises, because its rows would otherwise be missing
    silently."""

    def stop(error: OSError) -> None:
        raise DataError(
            f"data.path: cannot list {error.filename} ({error.strerror}); make it readable"
        ) from error

    if not root.is_dir():
        yield root
        return
    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = sorted(set(folders) - skipped)
        yield from (Path(folder, name) for name in sorted(names))


def _text_file(path: Path) -> TextFile | None:
    """Return the file; None if it is not regular, is empty, or holds no text."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            head, status = file.read(8192), os.fstat(file.fileno())
    except OSError as error:
        raise DataError(
            f"data.path: cannot read {printable(str(path))} ({error.strerror}); make it readable or narrow data.pattern"
        ) from error
    return (
        TextFile(path, status.st_size, status.st_mtime_ns) if head and b"\0" not in head else None
    )


def _gather(files: list[TextFile], size: int, path: Path, *, quiet: bool) -> None:
    digest, left = hashlib.sha256(), size
    with replacing(path) as target, _Bar(size, quiet=quiet) as bar:
        target.write(b" " * DIGEST_BYTES)
        for file in files:
            with file.path.open("rb") as source:
                expected = min(file.size, left)
                while expected and (piece := source.read(min(expected, PIECE_BYTES))):
                    digest.update(piece)
                    target.write(piece)
                    bar.advance(len(piece))
                    expected, left = expected - len(piece), left - len(piece)
            if expected:
                raise DataError(
                    f"{printable(str(file.path))} became shorter while it was read: start again"
                )
        target.seek(0)
        target.write(digest.hexdigest().encode("ascii"))


class _Bar:
    """A progress bar that appears after a second."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._bar = Progress(
            *Progress.get_default_columns(),
            DownloadColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._task = self._bar.add_task("gathering text", total=total)
        self._shown_from = time.monotonic() + 1

    def advance(self, count: int) -> None:
        self._bar.update(self._task, advance=count)
        if time.monotonic() > self._shown_from:
            self._bar.start()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:  # rich prints an empty line for a bar that nobody has seen
            self._bar.stop()

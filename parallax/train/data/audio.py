"""Rows of audio: fixed-length windows of sound files, with a label for each file."""

from __future__ import annotations

import copy
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallax.errors import (
    ConfigError,
    DataError,
    check_choice,
    check_count,
    check_positive,
    printable,
)
from parallax.model.source import ModelConfig
from parallax.plan.tier import AUTO
from parallax.train.data.columns import Array
from parallax.train.data.indexed import IndexedDataConfig
from parallax.train.data.labels import labelled_files, numbered
from parallax.train.data.order import Numbers, Seeds, mixed
from parallax.train.data.paths import (
    check_class_folders,
    check_only_class,
    data_path,
    found_file,
    inside,
)
from parallax.train.data.table import INPUTS, TARGETS, Table, Values, timed

_WINDOWS = ("random", "first")
_OF_PIPES = 2**31 - 2**16  # bytes that a WAV file of unknown length promises, at least
_UNREAD = (".m4a", ".aac", ".wma", ".webm", ".amr", ".mp4", ".mka")
_ALSO = {".aif", ".oga", ".opus"}  # usual names of formats that soundfile calls otherwise


@dataclass(frozen=True, kw_only=True)
class AudioDataConfig(IndexedDataConfig):
    """Sound files (WAV, FLAC, OGG, MP3). Each row is a window of one file, as float32 of shape (channels, samples).

    ``path``: a folder with a subfolder of files for each class, or a CSV file with the columns path (relative to the
        CSV file's folder) and label.
    ``seconds``: the length of a window; shorter files are padded with zeros.
    ``rate``: samples per second, which must be equal in all files; auto is the rate of the first file.
    ``channels``: 1 averages all channels of a file; a larger number must equal the number of channels of every file.
    ``window``: random draws a new window of each training file in each epoch, and uses the beginning of held-out files;
        first always uses the beginning.
    """

    name: str = "audio"
    path: str = ""
    seconds: float = 1.0
    rate: int | str = AUTO
    channels: int = 1
    window: str = _WINDOWS[0]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("data.seconds", self.seconds)
        check_count("data.rate", self.rate)
        check_positive("data.channels", self.channels)
        check_choice("data.window", self.window, _WINDOWS)

    @property
    def label(self) -> str:
        return f"data.path={printable(self.path)}"

    def table(self, model: ModelConfig, *, quiet: bool = True) -> Table:  # noqa: ARG002
        path = data_path("data.path", self.path)
        clips = _of_folder(path) if path.is_dir() else _of_csv(path)
        if not clips.names:
            raise DataError(
                f"{self.label}: there is no sound file; accepted are a folder with a folder of files for each class, "
                "and a CSV file with the columns path and label"
            )
        return AudioTable(clips, self)

    def for_evaluation(self, table: Any) -> Table:
        found: Table = table.plain()
        return found

    def tables(self, model: ModelConfig, *, quiet: bool = True) -> tuple[Table, dict[str, Table]]:
        training: Any
        training, held_out = super().tables(model, quiet=quiet)
        for name, each in held_out.items():
            if (own := each.classes) != training.classes:  # type: ignore[attr-defined]
                other = min(set(own or ()) ^ set(training.classes or ()), default="numbers")
                raise DataError(
                    f"data.validation.{printable(name)}: its classes are not those of the training rows "
                    f"({printable(other)} is of one alone): make a folder for each class in both, or give the labels "
                    "as numbers in CSV files"
                )
        return training, held_out


@dataclass(frozen=True)
class Clips:
    """Sound files in ``root``, and the label of each file: an index into ``classes``, or a number from the CSV file."""

    root: Path
    names: list[str]
    labels: Array
    classes: tuple[str, ...] | None


class AudioTable:
    """Windows of sound files. ``classes``: the names of the labels; None if the labels are numbers."""

    whole = False

    def __init__(self, clips: Clips, config: AudioDataConfig) -> None:
        self._clips, self.classes = clips, clips.classes
        self._channels, self._random = config.channels, config.window == "random"
        with _opened(self._path(0)) as file:
            self.rate = file.samplerate if config.rate == AUTO else int(config.rate)
        self._samples = max(1, round(config.seconds * self.rate))
        self.fingerprint = self._identified()

    def __len__(self) -> int:
        return len(self._clips.names)

    def plain(self) -> AudioTable:
        """Return a table of the same files with each window at the beginning of its file."""
        found = copy.copy(self)
        found._random = False
        return found

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:
        """Return the ``parts`` (inputs, targets) of ``rows``: windows as float32 of shape (rows, channels, samples),
        and labels. ``seeds`` select the windows."""
        found: Values = {}
        if TARGETS in parts:
            found[TARGETS] = self._clips.labels[rows]
        if INPUTS in parts:
            with timed("decode"):
                windows = np.zeros((len(rows), self._channels, self._samples), dtype=np.float32)
                for window, row, drawn in zip(windows, rows.tolist(), mixed(seeds).tolist()):
                    self._fill(window, row, drawn)
            found[INPUTS] = windows
        return found

    def _fill(self, window: Array, row: int, drawn: int) -> None:
        """Write a window of the sound file with the number ``row`` into the array ``window``. If the file is shorter
        than a window, the rest of the array stays unchanged. ``drawn``: 64 random bits that select the window."""
        path = self._path(row)
        with _opened(path) as file:
            self._check(file, path)
            spare = file.frames - self._samples
            try:
                if spare > 0 and self._random:
                    file.seek(drawn * (spare + 1) >> 64)
                if file.channels == 1:
                    count = len(file.read(out=window[0]))
                else:
                    samples = file.read(self._samples, dtype="float32").T
                    count = samples.shape[1]
                    window[:, :count] = samples if self._channels > 1 else samples.mean(axis=0)
            except RuntimeError as error:
                raise DataError(
                    f"{printable(str(path))}: it cannot be decoded ({printable(str(error))})"
                ) from error
        if not count:
            raise DataError(f"{printable(str(path))}: it has no samples; remove it")
        if count < (wanted := min(self._samples, file.frames)):
            raise DataError(
                f"{printable(str(path))}: it ends {wanted - count:,} samples early; copy it again, or remove it"
            )

    def _check(self, file: Any, path: Path) -> None:
        """Raise :class:`DataError` if the sample rate or the number of channels of the file differs from the
        settings."""
        if file.samplerate != self.rate:
            raise DataError(
                f"{printable(str(path))}: it has {file.samplerate} samples per second, not data.rate={self.rate}: "
                f"convert it (ffmpeg -i IN -ar {self.rate} OUT), or set data.rate if all files have another rate"
            )
        if self._channels not in (1, file.channels):
            raise DataError(
                f"{printable(str(path))}: it has {file.channels} channel(s), not data.channels={self._channels}; with "
                "data.channels=1 a row is the mean of all"
            )

    def _path(self, row: int) -> Path:
        return self._clips.root / self._clips.names[row]

    def _identified(self) -> str:
        """Return a digest of the settings, and of the names, sizes and labels of the files."""
        clips = self._clips
        found = zlib.crc32(
            f"{clips.labels.dtype} {clips.classes}".encode("utf-8", "surrogateescape")
        )
        found = zlib.crc32(clips.labels.tobytes(), found)
        for row, name in enumerate(clips.names):
            size = self._path(row).stat().st_size
            found = zlib.crc32(f"{name} {size}".encode("utf-8", "surrogateescape"), found)
        window = "random" if self._random else "first"
        return f"{len(self)}-{found:08x}-{self._channels}x{self._samples}@{self.rate}-{window}"


def _of_folder(root: Path) -> Clips:
    """Return the sound files in the subfolders of ``root``. Each subfolder is a class, even if it has no files."""
    check_class_folders(root, f"data.path={printable(str(root))}")
    suffixes = _ALSO | {f".{name.lower()}" for name in _soundfile().available_formats()}
    classes = sorted(
        each.name
        for each in os.scandir(root)
        if each.is_dir() and not each.name.startswith((".", "__MACOSX"))
    )
    check_only_class(root, classes, f"data.path={printable(str(root))}")
    names, labels = [], []
    for label, folder in enumerate(classes):
        _check_folder(root, folder)
        for where, folders, files in os.walk(root / folder, onerror=_unreadable):
            folders.sort()
            for name in folders:
                if Path(where, name).is_symlink():
                    raise DataError(
                        f"data.path: the link {printable(str(Path(where, name)))} leads to a folder, and links to "
                        "folders are not followed; copy the folder"
                    )
            for file in sorted(files):
                path = Path(where, file)
                if path.suffix.lower() in _UNREAD:
                    raise DataError(
                        f"data.path: {printable(str(path))} has a format that is not read; convert it (ffmpeg -i IN "
                        "OUT.wav), or remove it"
                    )
                if path.suffix.lower() in suffixes and not file.startswith("."):
                    name = path.relative_to(root).as_posix()
                    if path.is_symlink() or not path.is_file():
                        found_file(root, name, "data.path")
                    names.append(name)
                    labels.append(label)
    return Clips(root, names, np.array(labels, dtype=np.int64), tuple(classes))


def _check_folder(root: Path, name: str) -> None:
    """Raise :class:`DataError` if ``name`` is a link to a folder outside of ``root``."""
    real, top = (root / name).resolve(), root.resolve()
    if real == top or not real.is_relative_to(top):
        raise DataError(
            f"data.path: the link {printable(name)} leads to {printable(str(real))}, which is not below the data's "
            "folder; remove it, or copy the folder"
        )


def _unreadable(error: OSError) -> None:
    raise DataError(
        f"data.path: cannot list {printable(str(error.filename))} ({error.strerror}); make it readable"
    )


def _of_csv(table: Path) -> Clips:
    """Return the sound files that a CSV file names, and their labels."""
    names, labels = [], []
    for line, name, label in labelled_files(table):
        inside(table.parent, name, f"{printable(str(table))}: line {line}")
        names.append(name)
        labels.append(label)
    return Clips(table.parent, names, *numbered(labels))


def _opened(path: Path) -> Any:
    """Open a sound file. Raises :class:`DataError` for a file in another format, and for one that ends early."""
    try:
        with path.open("rb") as file:
            head, size = file.read(8), os.fstat(file.fileno()).st_size
        promised = len(head) + int.from_bytes(head[4:], "little")
        # libsndfile reads a truncated WAV file as a shorter one. Programs that write into pipes put the largest size
        # into the header.
        if head.startswith(b"RIFF") and size < promised < _OF_PIPES:
            raise DataError(
                f"{printable(str(path))}: it ends after {size:,} of {promised:,} bytes; copy it again, or remove it"
            )
        return _soundfile().SoundFile(os.fsencode(path))  # any name, also one that is no text
    except (RuntimeError, OSError, TypeError, UnicodeError) as error:
        raise DataError(
            f"{printable(str(path))}: it cannot be read as sound ({printable(str(error))}); remove or replace it"
        ) from error


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: libsndfile is missing
        raise ConfigError(
            f"data=audio: it needs soundfile ({printable(str(error))}); install it with pip install "
            "'parallax-train[audio]'"
        ) from error
    return soundfile

"""Rows of image files: a folder for each class, or a table of files and labels."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from parallax.errors import DataError, printable
from parallax.model.source import ModelConfig
from parallax.train.data.checking import sound_items
from parallax.train.data.decoding import SKIP, SUFFIXES, ImageDataConfig, ImageDecoder
from parallax.train.data.index import Index, NameList, Names, cached, integers
from parallax.train.data.labels import labelled_files, numbered
from parallax.train.data.order import Numbers, Seeds
from parallax.train.data.paths import (
    check_class_folders,
    check_folder_link,
    check_only_class,
    data_path,
    found_file,
    inside,
)
from parallax.train.data.progress import progress
from parallax.train.data.source import Shapes
from parallax.train.data.stored import Encoded, EncodedStore, InMemory
from parallax.train.data.table import INPUTS, TARGETS, Table, Values, timed

_ENDS = tuple(f".{each}" for each in SUFFIXES)
_NO_CLASSES = ("__MACOSX", "@eaDir", "lost+found")  # folders of systems
_UNREAD = (".heic", ".heif", ".svg", ".psd", ".dng", ".cr2", ".nef", ".arw", ".tga", ".dcm")
_SETTLED_NS = 2 * 10**9  # a folder that changed later may change again without a new time


@dataclass(frozen=True, kw_only=True)
class ImagesDataConfig(ImageDataConfig):
    """Images in files.

    ``path``: a folder with a subfolder for each class, which may have subfolders of its own. The label is the index of
    the class among the sorted class names. Names that start with a dot and files without an image suffix are skipped.
    ``labels``: a CSV file with a header and the columns ``path``, relative to the folder, and ``label``. Labels are
    numbers or names. Numbers are read as int64 if all are whole, otherwise as float32. Names are numbered in sorted
    order. Held-out sets use the class numbers of the training rows.
    """

    name: str = "images"
    path: str = ""
    labels: str = ""

    @property
    def label(self) -> str:
        return f"data.path={printable(self.path)}"

    def shapes(self, model: ModelConfig) -> Shapes | None:
        return None if self.labels else super().shapes(model)  # labels may be whole or not

    def tables(self, model: ModelConfig, *, quiet: bool = True) -> tuple[Table, dict[str, Table]]:
        training, held_out = super().tables(model, quiet=quiet)
        if isinstance(self.validation, Mapping):
            for name, table in held_out.items():
                assert isinstance(table, ImageTable)
                table.number_as(training.classes, f"data.validation.{printable(name)}")  # type: ignore[attr-defined]
        return training, held_out

    def table(self, model: ModelConfig, *, quiet: bool = True) -> ImageTable:  # noqa: ARG002
        decoder = ImageDecoder(self)
        root = data_path("data.path", self.path)
        if not root.is_dir():
            raise DataError(
                f"{self.label}: it is a file; name a folder with a folder of images for each class"
            )
        index = self._index(root, quiet=quiet)
        files = Files(root, index)
        sound, broken = sound_items(self, decoder, files, index.digest, quiet=quiet)
        if any(files.changed(item) for item in broken):  # for example, because it was repaired
            files.forget_index()
            index = self._index(root, quiet=quiet)
            files = Files(root, index)
            sound, _ = sound_items(self, decoder, files, index.digest, quiet=quiet)
        store: EncodedStore = files
        if self.in_memory:
            store = InMemory(files, sound, self.label, quiet=quiet)
        return ImageTable(store, sound, index, decoder)

    def unlabelled(self, model: ModelConfig, *, quiet: bool = True) -> Table:  # noqa: ARG002
        """Return images without labels: all images in a folder and its subfolders, or the single image file
        ``path``."""
        path = data_path("data.path", self.path)
        root = path if path.is_dir() else path.parent
        # The advice of an error is the caller's.
        decoder = ImageDecoder(replace(self, broken=SKIP), augment=False)
        with progress("finding images", None, quiet=quiet) as advance:
            found = _FoundImages(advance)
            if path.is_dir():
                for _, _, images in _walk(root, "", self.label):
                    for name, status in images:
                        found.add(name, status, 0)
            else:
                found.add(path.name, path.stat(), 0)
        if not found.labels:
            raise DataError(
                f"{self.label}: it has no images; accepted are {', '.join(_ENDS)} files"
            )
        index = found.index({"classes": []})
        return ImageTable(Files(root, index), np.arange(len(found.labels)), index, decoder)

    def _index(self, root: Path, *, quiet: bool) -> Index:
        if self.labels:
            table = data_path("data.labels", self.labels)
            status = table.stat()
            key = [os.fsencode(each).hex() for each in (root, table)]
            return cached(
                "images",
                [*key, status.st_size, status.st_mtime_ns],
                partial(index_table, root, table, quiet=quiet),
            )
        check_class_folders(root, self.label)
        return cached(
            "images",
            [os.fsencode(root).hex()],
            partial(index_folder, root, self.label, quiet=quiet),
            partial(_unchanged, root),
        )


# ------------------------------------------------------------------------------------------------ files


class Files:
    """The image files in an index. Their names are relative to ``root``."""

    def __init__(self, root: Path, index: Index) -> None:
        self._root, self._index = os.fsencode(root), index
        self._names = Names(index.arrays["names"], index.arrays["names_ends"])
        self.sizes = index.arrays["sizes"]

    def read(self, items: Numbers) -> list[Encoded]:
        return [self._read(item) for item in items.tolist()]

    def where(self, item: int) -> str:
        return printable(os.fsdecode(self._path(item)))

    def name(self, item: int) -> str:
        """Return the path of the file number ``item``, relative to the root."""
        return os.fsdecode(self._names[item])

    def files(self, items: Numbers) -> Iterator[IO[bytes]]:
        """Yield an open file for each of ``items``."""
        for item in items.tolist():
            with self._readable(item), open(self._path(item), "rb", opener=_opener) as file:
                yield file

    def changed(self, item: int) -> bool:
        """Return whether the file has changed since the index was built."""
        try:
            status = os.stat(self._path(item))
        except OSError:
            return True
        times = self._index.arrays["times"]
        return (status.st_size, status.st_mtime_ns) != (self.sizes[item], times[item])

    def forget_index(self) -> None:
        """Remove the index from the cache, so that a new one is built when it is needed next."""
        if self._index.path is not None:
            self._index.path.unlink(missing_ok=True)

    def _path(self, item: int) -> bytes:
        return os.path.join(self._root, self._names[item])

    def _read(self, item: int) -> bytes:
        size = int(self.sizes[item])
        with self._readable(item), open(self._path(item), "rb", 0, opener=_opener) as file:
            found = file.read(size + 1)
            while len(found) < size and (more := file.read(size - len(found))):
                found += more
        if len(found) != size:
            self.forget_index()
            raise DataError(
                f"{self.where(item)}: it has changed since its size was read; start again"
            )
        return found

    @contextlib.contextmanager
    def _readable(self, item: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.forget_index()
            raise DataError(
                f"{self.where(item)}: it cannot be read ({error.strerror}); make it readable or remove it"
            ) from error


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe would block


# ------------------------------------------------------------------------------------------------ index


class _FoundImages:
    """Collects the names, sizes, times and labels of image files, from which an index is made. ``advance(n)`` shows
    that n more files were found."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._names, self._advance = NameList(), advance
        self._sizes, self._times, self.labels = array("q"), array("q"), array("q")

    def add(self, name: str, status: os.stat_result, label: int) -> None:
        self._names.append(os.fsencode(name))
        self._sizes.append(status.st_size)
        self._times.append(status.st_mtime_ns)
        self.labels.append(label)
        self._advance(1)

    def index(self, notes: dict[str, Any], **arrays: Any) -> Index:
        found = {"sizes": self._sizes, "times": self._times, "labels": self.labels}
        return Index(
            self._names.arrays("names")
            | {name: integers(values) for name, values in found.items()}
            | arrays,
            notes,
        )


def index_folder(root: Path, label: str, *, quiet: bool) -> Index:
    """Return an index of the images in the class folders in ``root``, in sorted order. A class folder may have
    subfolders. Error messages call the data ``label``."""
    begun = time.time_ns()
    folders, times = NameList(), array("q")
    with progress("finding images", None, quiet=quiet) as advance:
        found = _FoundImages(advance)
        classes, loose = _entries(root, "", label)
        check_only_class(root, classes, label)
        folders.append(b"")
        times.append(root.stat().st_mtime_ns)
        for number, name in enumerate(classes):
            before = len(found.labels)
            for folder, status, images in _walk(root, name, label):
                folders.append(os.fsencode(folder))
                times.append(status.st_mtime_ns)
                for image, details in images:
                    found.add(image, details, number)
            if len(found.labels) == before:
                raise DataError(
                    f"{label}: the folder {printable(name)} holds no images, so it is no class: remove it, or name a "
                    "folder that holds nothing but a folder of images for each class"
                )
    if not classes:
        what = f"{len(loose)} image(s), but no folders" if loose else "no folders"
        raise DataError(
            f"{label}: it has {what}: put the images of each class in a folder of its name, or name a table of files "
            "and labels (data.labels=FILE.csv)"
        )
    notes = {
        "classes": [os.fsencode(each).hex() for each in classes],
        "transient": max(times) > begun - _SETTLED_NS,
    }
    return found.index(notes, folder_times=integers(times), **folders.arrays("folders"))


def _unchanged(root: Path, index: Index) -> bool:
    """Return whether all folders of the index have the modification times that the index holds. Adding or removing a
    file changes the modification time of its folder."""
    names = Names(index.arrays["folders"], index.arrays["folders_ends"])
    place = os.fsencode(root)
    with contextlib.suppress(OSError):
        return all(
            os.stat(os.path.join(place, names[number])).st_mtime_ns == modified
            for number, modified in enumerate(index.arrays["folder_times"].tolist())
        )
    return False


_Image = tuple[str, os.stat_result]


def _walk(root: Path, first: str, label: str) -> Iterator[tuple[str, os.stat_result, list[_Image]]]:
    """Yield the folder ``first`` and each folder below it, with its images. Names are relative to ``root``. Symbolic
    links within ``root`` are followed."""
    waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [(first, ())]
    while waiting:
        folder, above = waiting.pop()
        status = (root / folder).stat()
        place = status.st_dev, status.st_ino
        if place in above:
            raise DataError(
                f"{label}: the link {printable(folder)} leads to a folder above it; remove it"
            )
        folders, images = _entries(root, folder, label)
        yield folder, status, images
        waiting += [(os.path.join(folder, each), (*above, place)) for each in reversed(folders)]


def _entries(root: Path, folder: str, label: str) -> tuple[list[str], list[_Image]]:
    """Return the sorted names of the subfolders and of the images of a folder."""
    folders, images = list[str](), list[_Image]()
    try:
        with os.scandir(root / folder) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                name = os.path.join(folder, entry.name)
                if entry.name.startswith(".") or entry.name in _NO_CLASSES:
                    continue
                if entry.is_dir():
                    check_folder_link(root, name, label)
                    folders.append(entry.name)
                elif entry.name.lower().endswith(_ENDS):
                    if entry.is_symlink() or not entry.is_file():
                        found_file(root, name, label)
                    images.append((name, entry.stat()))
                elif entry.name.lower().endswith(_UNREAD):
                    raise DataError(
                        f"{label}: {printable(name)} is an image of a format that is not read; convert it to PNG or "
                        "JPEG, or remove it"
                    )
    except OSError as error:
        raise DataError(
            f"{label}: cannot list {printable(os.fsdecode(error.filename or folder))} ({error.strerror}); make it "
            "readable"
        ) from error
    return folders, images


# ------------------------------------------------------------------------------------------------ table


def index_table(root: Path, table: Path, *, quiet: bool) -> Index:
    """Return an index of the files and labels in the CSV file ``table``, in its order. The files are in ``root``."""
    where = printable(str(table))
    with progress("finding images", None, quiet=quiet) as advance:
        found, texts = _FoundImages(advance), list[str]()
        for line, name, text in labelled_files(table):
            path = inside(root, name, f"{where}: line {line}")
            found.add(name, path.stat(), 0)
            texts.append(text)
    if not texts:
        raise DataError(f"{where}: it has no rows below its header")
    labels, classes = numbered(texts)
    notes = {"classes": [os.fsencode(each).hex() for each in classes or ()]}
    return found.index(notes, labels=labels)


# ------------------------------------------------------------------------------------------------- rows


class ImageTable:
    """Images as float32, with their labels: the ``rows`` of an index. ``classes``: the class names; empty if labels are
    numbers."""

    whole = False

    def __init__(
        self, store: EncodedStore, rows: Numbers, index: Index, decoder: ImageDecoder
    ) -> None:
        self._store, self._rows, self._decoder = store, rows, decoder
        self._labels = index.arrays["labels"][rows]
        self.in_memory = isinstance(store, InMemory)
        self.classes: list[str] = [
            os.fsdecode(bytes.fromhex(each)) for each in index.notes["classes"]
        ]
        self.fingerprint = _fingerprint(index, rows)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, rows: Numbers, seeds: Seeds, parts: frozenset[str]) -> Values:
        found: Values = {}
        if TARGETS in parts:
            found[TARGETS] = torch.from_numpy(self._labels[rows])
        if INPUTS in parts:
            items = self._rows[rows]
            with timed("read"):
                images = self._store.read(items)
            found[INPUTS] = self._decoder.batch(
                images, seeds, lambda place: self._store.where(int(items[place]))
            )
        return found

    def row_names(self, rows: Numbers) -> list[str]:
        """Return the file of each row, relative to the folder."""
        assert isinstance(self._store, Files)
        return [self._store.name(int(item)) for item in self._rows[rows]]

    def plain(self) -> ImageTable:
        """Return the table for evaluation, without random augmentation."""
        found = copy.copy(self)
        found._decoder = self._decoder.plain()
        return found

    def number_as(self, classes: Sequence[str], key: str) -> None:
        """Renumber the labels of a held-out set, so that they are indices into ``classes``, the classes of the training
        rows. Error messages name the set ``key``."""
        if bool(classes) != bool(self.classes):
            raise DataError(
                f"{key}: its labels are {'names' if self.classes else 'numbers'}, and those of the training rows are "
                f"{'names' if classes else 'numbers'}; use the same for both"
            )
        known = {each: number for number, each in enumerate(classes)}
        if unknown := [each for each in self.classes if each not in known]:
            raise DataError(
                f"{key}: the class {printable(unknown[0])} is not among the {len(classes)} of the training rows; "
                "remove it, or add training rows of it"
            )
        if self.classes:
            numbers = integers(known[each] for each in self.classes)
            self._labels, self.classes = numbers[self._labels], list(classes)


def _fingerprint(index: Index, rows: Numbers) -> str:
    """Return a digest of the rows' names, sizes and labels."""
    chosen = {
        key: value
        for key, value in index.arrays.items()
        if key in ("names", "names_ends", "sizes", "labels")
    }
    content = Index(chosen | {"rows": rows}, {"classes": index.notes["classes"]})
    return f"{content.digest()[:16]}/{len(rows)}"

"""Check the paths in settings and data files: only files inside of the data's own folder may be opened."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from parallax.errors import DataError, printable

_TRAINING = ("train", "training")
_HELD_OUT = ("val", "valid", "validation", "dev", "eval", "test", "testing")


def data_path(key: str, text: str) -> Path:
    """Return the file or folder ``text``, the value of the setting ``key``. Raises :class:`DataError` if it does not
    exist or cannot be read."""
    if not text:
        raise DataError(f"{key}=: it is empty; type {key}=FOLDER or {key}=FILE")
    path = Path(text).expanduser().absolute()
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(
            f"{key}={printable(text)}: {error.strerror}; name a file or folder that exists"
        ) from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise DataError(f"{key}={printable(text)}: it is neither a regular file nor a folder")
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise DataError(f"{key}={printable(text)}: it cannot be read; make it readable")
    return path


def files_below(
    root: Path, suffixes: Collection[str], label: str, hidden: tuple[str, ...] = ()
) -> list[str]:
    """Return the names of the files below the folder ``root`` that end in ``suffixes``, relative to ``root``. Folders
    whose names begin with one of ``hidden`` are left out. ``label``: the data's name, for error messages.

    Raises :class:`DataError` for a folder that cannot be listed and for links that :func:`found_file` or
    :func:`check_folder_link` refuses, because rows would be missing. A link to another folder inside of ``root`` is not
    followed, because the files of that folder are found at their own place.
    """
    found = list[str]()
    for folder, folders, names in os.walk(root, onerror=partial(_unlisted, label)):
        where = Path(folder).relative_to(root)
        folders[:] = [each for each in folders if not each.startswith(hidden)]
        for each in folders:
            check_folder_link(root, where / each, label)
        found += [
            (where / each).as_posix()
            for each in names
            if os.path.splitext(each)[1] in suffixes and not each.startswith("._")  # of macOS
        ]
    for name in found:
        found_file(root, name, label)
    return found


def _unlisted(label: str, error: OSError) -> None:
    raise DataError(
        f"{label}: cannot list {printable(str(error.filename))} ({error.strerror}); make it readable"
    ) from error


def check_folder_link(root: Path, name: Path | str, label: str) -> None:
    """Raise :class:`DataError` if the folder ``name`` in ``root`` is a link to a place outside of ``root``."""
    path = root / name
    if path.is_symlink() and not (real := path.resolve()).is_relative_to(root.resolve()):
        raise DataError(
            f"{label}: the link {printable(str(name))} leads to {printable(str(real))}, outside of the data's folder; "
            "copy the folder, or name its own place"
        )


def check_class_folders(root: Path, label: str) -> None:
    """Raise :class:`DataError` if the subfolders of ``root`` are data sets, such as train and val, because each
    subfolder would be read as a class. The message calls the data ``label``."""
    names = [each.name for each in os.scandir(root) if each.is_dir()]
    if sets := _sets([name for name in names if name.lower() in (*_TRAINING, *_HELD_OUT)]):
        raise _several(root, sets, f"{label}: it holds {{}}, which are sets of rows and no classes")


def check_only_class(root: Path, classes: Sequence[str], label: str) -> None:
    """Raise :class:`DataError` if there is only one class, and its folder in ``root`` holds nothing but folders,
    because these inner folders seem to be the classes. The message calls the data ``label``."""
    if len(classes) != 1 or not os.access(root / classes[0], os.R_OK | os.X_OK):
        return
    held = [each for each in os.scandir(root / classes[0]) if not each.name.startswith(".")]
    folders = sorted(each.name for each in held if each.is_dir())
    if 1 < len(folders) == len(held):
        name = printable(classes[0])
        raise DataError(
            f"{label}: its only class would be {name}, which holds the folders {', '.join(map(printable, folders[:9]))}"
            f": if these are the classes, use data.path={printable(str(root))}/{name}; otherwise put all files of "
            f"{name} into it"
        )


def check_sets(root: Path, names: Collection[str], label: str, *, patterns: bool = False) -> None:
    """Raise :class:`DataError` if all of the files ``names`` in ``root`` belong to data sets, such as train.bin and
    test/0.bin, because held-out rows would be trained on. ``patterns``: whether data.path may be a pattern."""
    if sets := _sets(names):
        raise _several(
            root,
            sets,
            f"{label}: it holds files of {{}}, which are sets of their own",
            patterns=patterns,
        )


def _sets(names: Collection[str]) -> dict[str, list[str]]:
    """Return a mapping from the name of each data set, such as train or val, to its files or folders among ``names``,
    with training sets first. The mapping is empty if a file or folder belongs to no data set, or if there are not both
    training sets and held-out sets."""
    found: dict[str, list[str]] = {}
    for name in names:
        words = re.split(r"[^a-z]+", name.lower())
        which = next((word for word in words if word in (*_TRAINING, *_HELD_OUT)), None)
        if which is None:
            return {}
        found.setdefault(which, []).append(name)
    sets = [each for each in (*_TRAINING, *_HELD_OUT) if each in found]
    several = any(each in _TRAINING for each in sets) and any(each in _HELD_OUT for each in sets)
    return {each: sorted(found[each]) for each in sets} if several else {}


def _several(
    root: Path, sets: Mapping[str, list[str]], what: str, *, patterns: bool = False
) -> DataError:
    """Return the error for a folder ``root`` with several data sets. ``sets``: data set → its files or folders.
    ``what``: the beginning of the message, with ``{}`` in place of the sets. The message also names the settings that
    read each set separately. ``patterns``: whether data.path may be a pattern."""
    used = list[str]()
    for number, (name, files) in enumerate(sets.items()):
        tops = {each.partition("/")[0] for each in files}
        others = (each for other in sets if other != name for each in sets[other])
        if len(files) == 1:
            place = files[0]
        elif len(tops) == 1 and not any(each.partition("/")[0] in tops for each in others):
            place = tops.pop()
        elif patterns:
            ends = {os.path.splitext(each)[1] for each in files}
            place = f"**/*{name}*{ends.pop() if len(ends) == 1 else ''}"
        else:
            place = ""
        key = f"data.validation.{name}.path" if number else "data.path"
        setting = f"{key}={printable(str(root / place))}" if place else ""
        used.append(f"'{setting}'" if "*" in place else setting)
    help_ = f"use {' '.join(used)}"
    if not all(used):
        help_ = (
            "put the files of each set in a folder of its own, and name them as data.path and as "
            f"data.validation.{list(sets)[-1]}.path"
        )
    names = " and ".join(
        f"{files[0]}/" if len(files) == 1 and (root / files[0]).is_dir() else name
        for name, files in sets.items()
    )
    return DataError(f"{what.format(printable(names))}: {help_}")


def inside(root: Path, name: str, where: str) -> Path:
    """Return the path of the regular file ``name`` in the folder ``root``. ``where``: the file and line that contain
    the name, for error messages.

    Raises :class:`DataError` for an absolute path, a path outside of the folder (also through a symbolic link), and
    anything that is not a regular file.
    """
    path, real = _resolved(root, name, where)
    if os.path.isabs(name) or not real.is_relative_to(root.resolve()):
        raise DataError(
            f"{where}: {printable(name)} is outside of {printable(str(root))}, the data's folder"
        )
    _check_regular(name, real, where)
    return path


def found_file(root: Path, name: str, where: str) -> Path:
    """Return the path of the file ``name`` that was found in the folder ``root``. A symbolic link may lead outside of
    the folder, because the folder's owner has made it. Raises :class:`DataError` for a broken link, and for anything
    that is not a regular file."""
    path, real = _resolved(root, name, where)
    _check_regular(name, real, where)
    return path


def _resolved(root: Path, name: str, where: str) -> tuple[Path, Path]:
    path = root / name
    try:
        return path, path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{where}: cannot open {printable(name)} ({reason})") from error


def _check_regular(name: str, real: Path, where: str) -> None:
    if not stat.S_ISREG(real.stat().st_mode):
        raise DataError(f"{where}: {printable(name)} is no regular file")

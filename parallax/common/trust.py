"""Class paths in files are imported only if the user has named them.

A configuration may name the user's own functions (``model.target=package.module:factory``), and a run directory
stores the configuration. A user who copies a directory from someone else has not agreed to its class paths:
importing them would run foreign code, or any function of any installed package with foreign arguments. So a class
path from a file counts only if the user has typed it: on this command line, or on the command line that made the
files, which is remembered in the user's cache by folder, key and class path."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from parallax.common.documents import DOCUMENT_BYTES, plain_yaml, read_bytes
from parallax.common.files import cache_directory
from parallax.errors import ConfigError, printable

KEYS = ("model.target", "data.target", "plan.schedule")
"""Settings that name functions."""
_WRITABLE_BY_OTHERS = 0o022


def class_paths(text: str) -> dict[str, str]:
    """Return key → class path in the text of a stored configuration; nothing is imported."""
    tree, found = plain_yaml(text), {}
    for key in KEYS:
        group, name = key.split(".")
        node = tree.get(group) if isinstance(tree, dict) else None
        value = node.get(name) if isinstance(node, dict) else None
        if isinstance(value, str) and ":" in value:
            found[key] = value
    return found


def remember(folder: Path, named: Mapping[str, str]) -> None:
    """Remember, in the user's cache, that the user has typed these class paths for the files in ``folder``. If the
    cache cannot be written, they must be typed again."""
    known = _known()
    lines = [
        line
        for line in (_line(folder, key, target) for key, target in named.items())
        if line not in known
    ]
    if lines:
        with contextlib.suppress(OSError):
            _file().parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(_file(), flags, 0o600), "w", encoding="ascii") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write("".join(f"{line}\n" for line in lines))


def check_named(file: Path, found: Mapping[str, str], typed: Collection[str] = ()) -> None:
    """Raise :class:`ConfigError` if ``file`` names class paths that the user has not typed. ``typed``: ``key=value``
    words of this command."""
    known = _known()
    named = {f"{key}={target}" for key, target in found.items()}
    unknown = [
        word
        for word in named
        if word not in typed and _line(file.parent, *word.split("=", 1)) not in known
    ]
    if unknown:
        listed = printable(" ".join(sorted(unknown)))
        raise ConfigError(
            f"{printable(str(file))} names {listed}: class paths in files are not imported unless you type them; if "
            f"you trust it, add {listed} to the command"
        )


def _file() -> Path:
    return cache_directory() / "named-class-paths.txt"


def _known() -> frozenset[str]:
    try:
        found = _file().stat()
        if found.st_uid != os.getuid() or found.st_mode & _WRITABLE_BY_OTHERS:
            return frozenset()  # other users could add class paths
        return frozenset(read_bytes(_file(), DOCUMENT_BYTES).decode("ascii").split())
    except (OSError, ValueError):
        return frozenset()


def _line(folder: Path, key: str, target: str) -> str:
    return hashlib.sha256(os.fsencode(f"{folder.resolve()}\0{key}={target}")).hexdigest()

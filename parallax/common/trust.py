"""Class paths in files: what a run directory or a plan names is imported at the user's own word only.

A configuration may name functions of the user's own (``model.target=package.module:factory``), and a run directory
keeps the configuration. Whoever copies a directory from somebody else has said nothing about what it names: importing
that would run their code, or any function of any installed package with arguments of their choice. So there is one
rule. A class path from a file counts only where the user has named it: on this command line, or on the one that made
the files, which is remembered in the user's cache by folder, key and class path.
"""

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
    """The functions that a stored configuration names, key by key; nothing is imported."""
    tree, found = plain_yaml(text), {}
    for key in KEYS:
        group, name = key.split(".")
        node = tree.get(group) if isinstance(tree, dict) else None
        value = node.get(name) if isinstance(node, dict) else None
        if isinstance(value, str) and ":" in value:
            found[key] = value
    return found


def remember(folder: Path, named: Mapping[str, str]) -> None:
    """The user has named these class paths, key by key, for the files in ``folder``. Where the cache cannot be written
    they must be named again."""
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
    """Raise :class:`ConfigError`, saying what to add to the command, where ``file`` names class paths that the user has
    not. ``typed``: ``key=value`` words of this command."""
    known = _known()
    words = {f"{key}={target}" for key, target in found.items()}
    unknown = [
        word
        for word in words
        if word not in typed and _line(file.parent, *word.split("=", 1)) not in known
    ]
    if unknown:
        listed = printable(" ".join(sorted(unknown)))
        raise ConfigError(
            f"{printable(str(file))} names {listed}, and what a file names is imported at your own word only: if you "
            f"trust it, add {listed} to the command"
        )


def _file() -> Path:
    return cache_directory() / "named-class-paths.txt"


def _known() -> frozenset[str]:
    try:
        found = _file().stat()
        if found.st_uid != os.getuid() or found.st_mode & _WRITABLE_BY_OTHERS:
            return frozenset()  # who can write it can name whatever they like
        return frozenset(read_bytes(_file(), DOCUMENT_BYTES).decode("ascii").split())
    except (OSError, ValueError):
        return frozenset()


def _line(folder: Path, key: str, target: str) -> str:
    return hashlib.sha256(os.fsencode(f"{folder.resolve()}\0{key}={target}")).hexdigest()

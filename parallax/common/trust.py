"""Import class paths found in files only if the user has typed them.

A configuration may name the user's own functions as class paths (``model.target=package.module:factory``), and a run
directory stores the configuration. A user who copies a directory from another person has not agreed to its class paths:
importing them would run foreign code, or any installed function with foreign arguments.

So a class path from a file is accepted in two cases: if the user has typed it on this command line, or if the user
typed it on the command line that made the files. In the second case the class path was stored in the user's cache, with
the folder and the key.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallax.common.documents import DOCUMENT_BYTES, plain_yaml, read_bytes
from parallax.common.files import cache_directory
from parallax.errors import ConfigError, printable

_OF_DATA = ("target", "transform", "collate")
KEYS = (
    "model.target",
    *(f"data.{name}" for name in _OF_DATA),
    "loss.target",
    "optimizer.target",
    "schedule.target",
    "plan.schedule",
    "callbacks",
)
"""Settings that name functions."""
_WRITABLE_BY_OTHERS = 0o022


def class_paths(text: str) -> dict[str, str]:
    """Return {key: class path} for the text of a stored configuration, without importing anything."""
    tree, found = plain_yaml(text), {}
    for key in KEYS:
        value: Any = tree
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, list):
            value = f"[{','.join(_targets(value))}]"
        if isinstance(value, str) and ":" in value:
            found[key] = value
    return found | _metrics(tree) | _validation_sets(tree)


def _metrics(tree: Any) -> dict[str, str]:
    """Return {``metrics.N.target``: class path} for the metrics that are not classes of torchmetrics."""
    entries = tree.get("metrics") if isinstance(tree, dict) else None
    targets = [
        (number, entry.get("target"))
        for number, entry in enumerate(entries if isinstance(entries, list) else [])
        if isinstance(entry, dict)
    ]
    return {
        f"metrics.{number}.target": target
        for number, target in targets
        if isinstance(target, str) and ":" in target and not re.match(r"torchmetrics[.:]", target)
    }


def _validation_sets(tree: Any) -> dict[str, str]:
    """Return {``data.validation.NAME.KEY``: class path} for the class paths in the settings of validation sets."""
    data = tree.get("data") if isinstance(tree, dict) else None
    sets = data.get("validation") if isinstance(data, dict) else None
    return {
        f"data.validation.{name}.{key}": own[key]
        for name, own in (sets.items() if isinstance(sets, dict) else ())
        for key in _OF_DATA
        if isinstance(own, dict) and isinstance(own.get(key), str) and ":" in own[key]
    }


def is_key(key: str) -> bool:
    """Return whether ``key`` is a setting whose value is a class path."""
    several = rf"metrics\.[0-9]{{1,3}}\.target|data\.validation\.[^.]+\.({'|'.join(_OF_DATA)})"
    return key in KEYS or re.fullmatch(several, key) is not None


def _targets(entries: Sequence[Any]) -> list[str]:
    """Return the class paths in a list.

    An entry is a class path, or a mapping that has the class path under ``target``.
    """
    found = [each.get("target") if isinstance(each, dict) else each for each in entries]
    return [str(each) for each in found]


def remember(folder: Path, named: Mapping[str, str]) -> None:
    """Store in the user's cache that the user has typed the class paths ``named`` for the files in ``folder``.

    ``named`` maps keys to class paths. If the cache cannot be written, the user must type them again next time.
    """
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
    """Raise :class:`ConfigError` if ``file`` contains class paths that the user has not typed.

    ``found`` maps the keys in the file to class paths. ``typed`` holds the ``key=value`` arguments of this command.
    """
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

"""Read plain data (JSON, YAML, text) from files that may be damaged or malicious, and change such data by path.

A plan, a profile, a manifest or a stored configuration may come from another person. It may be an endless file, a pipe
that no process writes to, YAML whose aliases expand a hundredfold, or a number of a million digits. So each kind of
file has a size limit, the number of values is limited, and only plain data is accepted. Invalid files raise OSError or
ValueError, which each reader turns into a message of one line.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml

from parallax.errors import ConfigError, printable

DOCUMENT_BYTES = 16 * 2**20  # a profile of 8,000 blocks
MANIFEST_BYTES = 256 * 2**20  # a checkpoint of a million tensors
SMALL_BYTES = 2**20  # measurements of a machine, the outcome of a sweep point
MOST_VALUES = 4 * 2**20  # values in one file; about 100 bytes each
MOST_DIGITS = 300  # digits of a whole number; larger ones exceed floating point
LARGEST_NUMBER = 10**36  # bytes, seconds, rows: sums and products of such numbers are finite
LARGEST = 2**17  # characters, and values, of a stored configuration: tens of times the usual
DEEPEST = 50  # nesting levels of a file read by a loader written in C
MOST_EVENTS = 2**19  # YAML events of such a file; a microsecond and a hundred bytes each


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises ValueError if ``path`` is not a regular file or holds more than ``most_bytes``.
    """
    with os.fdopen(_open(path), "rb") as file:
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise ValueError(f"it is longer than {most_bytes:,} bytes, the most that is read")
    return found


def read_text(path: Path, most_bytes: int) -> str:
    """Return the content of a regular file as text; see :func:`read_bytes`."""
    return read_bytes(path, most_bytes).decode("utf-8")


def read_lines(path: Path) -> Iterator[str]:
    """Yield the complete lines of a regular file of any length. A last line without a line end is skipped.

    Raises ValueError for a line that is not UTF-8 or is longer than 1 MiB.
    """
    handle = _open(path)
    with os.fdopen(handle, "rb") as file:
        while (line := file.readline(SMALL_BYTES)).endswith(b"\n"):
            yield line.decode("utf-8")
    if len(line) == SMALL_BYTES:
        raise ValueError(f"a line is longer than {SMALL_BYTES:,} bytes, the most that is read")


def read_json(path: Path, most_bytes: int, *, largest: float = math.inf) -> Any:
    """Return the data of a JSON file of at most ``most_bytes``. ``largest``: see :func:`plain_json`.

    Raises ValueError if the JSON is not accepted or the file is larger.
    """
    return plain_json(read_text(path, most_bytes), largest=largest)


def plain_json(text: str, *, largest: float = math.inf) -> Any:
    """Return the data of a JSON text.

    Raises ValueError for invalid JSON, for NaN or infinity, and for numbers whose absolute value is above ``largest``.
    """
    return _loaded(
        text,
        parse_float=partial(_finite, largest),
        parse_int=partial(_whole, largest),
        parse_constant=_refused,
    )


def any_json(text: str) -> Any:
    """Return the data of a JSON text. NaN and infinity are accepted, because users' own states may contain them."""
    return _loaded(text, parse_int=partial(_whole, math.inf))


def _loaded(text: str, **options: Any) -> Any:
    if text.count(",") + text.count("[") + text.count("{") > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES:,} values, the most that are read")
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _open(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe would block
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError("it is no plain file")
    return handle


def _finite(largest: float, digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number) or abs(number) > largest:
        raise ValueError(f"{digits[:40]} is no finite number up to {largest:g}")
    return number


def _whole(largest: float, digits: str) -> int:
    if len(digits) > MOST_DIGITS or abs(int(digits)) > largest:
        raise ValueError(
            f"{digits[:40]}, of {len(digits)} digits, is not a number up to {largest:g}"
        )
    return int(digits)


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


# ---- stored configurations


class _Loader(yaml.SafeLoader):
    """A YAML loader that accepts plain data only and rejects duplicate keys, because one of the two values would be
    lost.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep=deep)
        if len(found) < len(node.value):
            keys = [key.value for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), "<<")
            raise yaml.YAMLError(f"the key {twice} is there twice")
        return found


def plain_yaml(text: str) -> Any:
    """Return the data of a stored configuration. Raises :class:`ConfigError` if the text is invalid or too large."""
    if len(text) > LARGEST:
        raise ConfigError(
            f"the stored configuration is not plain YAML: it is longer than {LARGEST:,} letters"
        )
    try:
        tree = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the stored configuration is not plain YAML: {_first_line(error)}"
        ) from None
    if _size(tree, {}) > LARGEST:
        raise ConfigError(
            "the stored configuration is not plain YAML: its anchors repeat each other without end"
        )
    return tree


def check_flat(text: str, loader: Any) -> None:
    """Raise :class:`yaml.YAMLError` for YAML that could crash a loader written in C.

    Such YAML is nested too deeply, has too many values, or contains aliases, which Parallax never writes. ``loader``:
    the YAML loader class that parses ``text`` for this check.
    """
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=loader)):
        if count > MOST_EVENTS:
            raise yaml.YAMLError(
                f"it holds more than {MOST_EVENTS:,} values, the most that are read"
            )
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"it repeats the anchor {event.anchor}")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > DEEPEST:
            raise yaml.YAMLError(f"it is nested more than {DEEPEST} levels deep")


def _size(tree: Any, known: dict[int, int]) -> int:
    """Return the number of values in ``tree``.

    The values behind an alias count at each use of the alias. An alias that contains itself counts as zero. ``known``:
    {id of a list or dictionary: number of values}, which this function extends.
    """
    if not isinstance(tree, dict | list):
        return 1
    if id(tree) not in known:
        known[id(tree)] = 0
        inner = tree if isinstance(tree, list) else [*tree.keys(), *tree.values()]
        known[id(tree)] = 1 + sum(_size(value, known) for value in inner)
    return known[id(tree)]


def take_options(
    tree: dict[str, Any], groups: list[str], plain: dict[str, Any], fresh: dict[str, Any]
) -> None:
    """Apply options of the command line (``group=option``) to the configuration ``tree``.

    ``plain`` is the default configuration without these options, and ``fresh`` the default configuration with them. A
    group is replaced as a whole if it is listed in ``groups``, or if its dataclass differs between ``plain`` and
    ``fresh``. In all other groups, only the values that differ between ``plain`` and ``fresh`` are set.
    """
    for group, value in fresh.items():
        if group in groups or _kind(value) != _kind(plain[group]):
            tree[group] = value
    before = leaf_values(plain)
    for path, value in leaf_values(fresh).items():
        if before.get(path, ...) != value:
            _put(tree, path, value)


def take_keys(tree: dict[str, Any], keys: list[str], merged: dict[str, Any]) -> None:
    """Copy the values of the dotted ``keys`` from ``merged`` to ``tree``.

    For a key inside a list, copy the whole list.
    """
    for key in keys:
        place: tuple[str, ...] = ()
        node: Any = merged
        for part in key.split("."):
            if isinstance(node, dict):
                place, node = (*place, part), node[part]
        _put(tree, place, node)


def leaf_values(tree: dict[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return {path: value} for every value in ``tree`` that is not a dictionary. A path is ``prefix`` followed by the
    keys that lead to the value."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        path = (*prefix, str(key))
        found |= leaf_values(value, path) if isinstance(value, dict) and value else {path: value}
    return found


def leaves(tree: dict[str, Any]) -> dict[str, str]:
    """Return {dotted key: value as one line of text} for every value in ``tree``."""
    return {".".join(path): printable(shown(value)) for path, value in leaf_values(tree).items()}


def shown(value: Any) -> str:
    """Return ``value`` as YAML on one line, in which the text '3' and the number 3 differ."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
    )


def _kind(group: Any) -> Any:
    """Return the ``name`` of a configuration group, which selects its dataclass."""
    return group.get("name") if isinstance(group, dict) else None


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set the value in ``tree`` at ``path``."""
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[path[-1]] = value


def _first_line(error: Exception) -> str:
    return printable((str(error).splitlines() or [type(error).__name__])[0])

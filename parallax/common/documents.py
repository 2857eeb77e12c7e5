"""Files that somebody else may have written, as plain data: read no larger than they can be, and strictly.

A plan, a profile, a manifest or a stored configuration may be damaged, or made to do harm: a file without end, a pipe
that nobody writes to, three letters that become a hundred bytes each, a number of a million digits. So a file is read
up to what its kind can take, nothing becomes data before it was counted, nothing but data comes out of it, and nothing
of it is lost in silence. What is wrong with JSON is an OSError or a ValueError, which every reader turns into its own
one line. What was read is changed by path.
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
SMALL_BYTES = 2**20  # what was measured of a machine, what became of a point
MOST_VALUES = 4 * 2**20  # of one file: about 100 bytes each
MOST_DIGITS = 300  # of a whole number: more are no floating-point number
LARGEST_NUMBER = 10**36  # bytes, seconds, rows: sums and products of such numbers are finite
LARGEST = 2**17  # letters, and values, of a stored configuration: tens of times what one takes
DEEPEST = 50  # levels of a file that is read by a loader written in C
MOST_EVENTS = 2**19  # of such a file, which are a microsecond and a hundred bytes each


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """All of a plain file. Raises ValueError for what is none, and for more than ``most_bytes``."""
    with os.fdopen(_open(path), "rb") as file:
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise ValueError(f"it is longer than {most_bytes:,} bytes, the most that is read")
    return found


def read_text(path: Path, most_bytes: int) -> str:
    """The same as text."""
    return read_bytes(path, most_bytes).decode("utf-8")


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a plain file of any length, but for a last one that was cut short. Raises ValueError for one that
    is no text, or longer than any of ours."""
    handle = _open(path)
    with os.fdopen(handle, "rb") as file:
        while (line := file.readline(SMALL_BYTES)).endswith(b"\n"):
            yield line.decode("utf-8")
    if len(line) == SMALL_BYTES:
        raise ValueError(f"a line is longer than {SMALL_BYTES:,} bytes, the most that is read")


def read_json(path: Path, most_bytes: int, *, largest: float = math.inf) -> Any:
    """What a file of :func:`plain_json` holds."""
    return plain_json(read_text(path, most_bytes), largest=largest)


def plain_json(text: str, *, largest: float = math.inf) -> Any:
    """JSON as data, in which all numbers are finite, and none is above ``largest``. Raises ValueError for anything
    else."""
    return _loaded(
        text,
        parse_float=partial(_finite, largest),
        parse_int=partial(_whole, largest),
        parse_constant=_refused,
    )


def any_json(text: str) -> Any:
    """The same with NaN and infinity, which people's own states may hold."""
    return _loaded(text, parse_int=partial(_whole, math.inf))


def _loaded(text: str, **options: Any) -> Any:
    if text.count(",") + text.count("[") + text.count("{") > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES:,} values, the most that are read")
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _open(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
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
        raise ValueError(f"{digits[:40]}, of {len(digits)} digits, is no number up to {largest:g}")
    return int(digits)


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


# ---- stored configurations


class _Loader(yaml.SafeLoader):
    """YAML as data, in which a key that is there twice is a mistake: one of its values would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep=deep)
        if len(found) < len(node.value):
            keys = [key.value for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), "<<")
            raise yaml.YAMLError(f"the key {twice} is there twice")
        return found


def plain_yaml(text: str) -> Any:
    """The data of a stored configuration, whatever it is; no larger than a configuration can be."""
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
    """Raise :class:`yaml.YAMLError` where YAML is nested deeper than any file of ours, which loaders written in C do
    not survive, has more values, or repeats itself by anchors, which none of ours does."""
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
    """Values in ``tree``, those that anchors repeat as often as they are repeated; a loop counts for nothing."""
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
    """Change ``tree`` by options: ``plain`` is what there is without any, ``fresh`` with them. Their ``groups`` are
    taken whole, and so are those that became another kind; of the others what the options set."""
    for group, value in fresh.items():
        if group in groups or _kind(value) != _kind(plain[group]):
            tree[group] = value
    before = leaf_values(plain)
    for path, value in leaf_values(fresh).items():
        if before.get(path, ...) != value:
            _put(tree, path, value)


def take_keys(tree: dict[str, Any], keys: list[str], merged: dict[str, Any]) -> None:
    """Set dotted ``keys`` of ``tree`` to what they are in ``merged``; of what lies in a list, the whole list."""
    for key in keys:
        place: tuple[str, ...] = ()
        node: Any = merged
        for part in key.split("."):
            if isinstance(node, dict):
                place, node = (*place, part), node[part]
        _put(tree, place, node)


def leaf_values(tree: dict[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Paths and values of what is no dictionary."""
    found: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        path = (*prefix, str(key))
        found |= leaf_values(value, path) if isinstance(value, dict) and value else {path: value}
    return found


def leaves(tree: dict[str, Any]) -> dict[str, str]:
    """Dotted keys and their values as one line each."""
    return {".".join(path): printable(shown(value)) for path, value in leaf_values(tree).items()}


def shown(value: Any) -> str:
    """As YAML on one line, so that the text '3' and the number 3 look different."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
    )


def _kind(group: Any) -> Any:
    """The name that says which dataclass a group is."""
    return group.get("name") if isinstance(group, dict) else None


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set what is at ``path``."""
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[path[-1]] = value


def _first_line(error: Exception) -> str:
    return printable((str(error).splitlines() or [type(error).__name__])[0])

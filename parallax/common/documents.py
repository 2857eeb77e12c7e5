"""Stored configurations as plain data: read strictly, and changed by path.

A file may be damaged, or made to do harm, so nothing but data comes out of it, no larger than a configuration can be,
and nothing of it is lost in silence.
"""

from __future__ import annotations

import math
from typing import Any

import yaml

from parallax.errors import ConfigError, printable

LARGEST = 2**17  # letters, and values, of a stored configuration: tens of times what one takes
DEEPEST = 50  # levels of a file that is read by a loader written in C
MOST_EVENTS = 2**19  # of such a file, which are a microsecond and a hundred bytes each


class _Loader(yaml.SafeLoader):
    """YAML as data, in which a key that is there twice is a mistake: one of its values would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A dictionary."""
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

"""Plain data, as YAML gives it, into dataclasses: exactly their keys, each value as its annotation wants it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from parallax.common.documents import shown
from parallax.errors import ConfigError, UnknownKeyError, nearest, printable


def defaults(kind: type) -> dict[str, Any]:
    """What the fields of ``kind`` start from, also where ``kind()`` alone is refused."""
    made = [
        (field.name, field.default_factory() if callable(field.default_factory) else field.default)
        for field in dataclasses.fields(kind)
    ]
    return {name: value for name, value in made if value is not dataclasses.MISSING}


MOST_NAMED = 6  # mistakes in one line


class Mistakes:
    """Errors of one command line or file, collected so that all of them are said at once."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Around what may raise one; the block ends there, and nothing else."""
        try:
            yield
        except ConfigError as error:
            self.found.extend(error.parts or [error])

    def tell(self) -> None:
        """Raise one :class:`ConfigError` for all that were noted, in one line."""
        if len(self.found) < 2:
            for error in self.found:
                raise error
            return
        unknown = [error for error in self.found if isinstance(error, UnknownKeyError)]
        others = [str(error) for error in self.found if not isinstance(error, UnknownKeyError)]
        named = list(dict.fromkeys([*(e.short for e in unknown), *others]))
        more = [f"and {len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
        accepted = dict.fromkeys(e.accepted for e in unknown)
        error = ConfigError("; ".join([*named[:MOST_NAMED], *more, *accepted]))
        error.parts = tuple(self.found)
        raise error


def checked(
    kind: type,
    tree: Any,
    group: str,
    label: str = "",
    elsewhere: Callable[[str], str] = lambda key: "",
) -> dict[str, Any]:
    """A copy of ``tree`` that has exactly the keys of ``kind``; ``elsewhere`` gives the hint for a key that is known by
    another name or in another group."""
    prefix, hints = f"{group}." if group else "", typing.get_type_hints(kind)
    accepted = (
        f"{label} accepts {', '.join(sorted(hints))}"
        if group
        else f"groups and keys are {', '.join(hints)}"
    )
    if not isinstance(tree, dict):
        refuse(
            f"{group or 'configuration'}={shown(tree)}", f"keys and values are needed; {accepted}"
        )
    mistakes = Mistakes()
    for key in tree:
        if key not in hints:
            with mistakes.noting():
                hint = elsewhere(f"{prefix}{key}") or nearest(str(key), hints)
                unknown(f"{prefix}{key}={shown(tree[key])}", accepted, hint)
    mistakes.tell()
    for key in hints:
        if key not in tree:
            default = (
                f", the default is {shown(defaults(kind)[key])}" if key in defaults(kind) else ""
            )
            refuse(f"{prefix}{key}", f"missing; {accepted}{default}")
    return dict(tree)


def build(kind: type, values: dict[str, Any], prefix: str) -> Any:
    """``kind`` from ``values``, each as its annotation wants it; the dataclass judges what they mean."""
    read, mistakes, usual = {}, Mistakes(), defaults(kind)
    for key, hint in typing.get_type_hints(kind).items():
        if isinstance(values[key], str) and values[key] == usual.get(key):
            read[key] = values[key]  # auto, where only the dataclass knows what it means
            continue
        try:
            read[key] = _read(hint, values[key])
        except (ValueError, OverflowError):
            accepted = _accepted(hint, usual.get(key))
            with mistakes.noting():
                refuse(f"{prefix}{key}={shown(values[key])}", f"accepted is {accepted}")
    mistakes.tell()
    with in_one_line():
        return kind(**read)


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """What is wrong with a value, as a terminal can show it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(printable(str(error))) from None


def members(hint: Any) -> list[Any]:
    """The alternatives of a union, text last: almost everything can be read as text."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return sorted(typing.get_args(hint), key=lambda kind: kind is str) if union else [hint]


def _read(hint: Any, value: Any) -> Any:
    """``value`` as ``hint`` wants it, or ValueError."""
    for kind in members(hint):
        with contextlib.suppress(ValueError):
            return _read_as(kind, value)
    raise ValueError(value)


def _read_as(kind: Any, value: Any) -> Any:
    """One alternative. Text that spells a number is one, for ``${oc.env:STEPS}`` is always text."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    scalar = isinstance(value, int | float | str) and not isinstance(value, bool) and value != "???"
    if dataclasses.is_dataclass(origin) and type(value) is origin:
        return value  # a group that has been read before
    if origin is bool and (isinstance(value, bool) or value in ("true", "false")):
        return value in (True, "true")
    if origin is int and scalar and re.fullmatch(r"[+-]?[0-9]+", str(value)):
        return int(value)
    if origin is float and scalar and math.isfinite(float(value)):
        return float(value)
    if origin is str and scalar:
        return str(value)
    if origin is list and isinstance(value, list):
        return [_read(inner[0], item) for item in value]
    if origin is tuple and isinstance(value, list) and len(value) == len(inner):
        return tuple(_read(*pair) for pair in zip(inner, value))
    if origin is dict and isinstance(value, dict):
        return {_read(inner[0], key): _read(inner[1], item) for key, item in value.items()}
    if origin is Any:
        return _plain(value)
    raise ValueError(value)


def _plain(value: Any) -> Any:
    """Free values: whatever YAML writes and reads back as it was."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(value)


def _accepted(hint: Any, default: Any) -> str:
    """What ``hint`` accepts, in words."""
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    if len(kinds := members(hint)) > 1:
        example = f" such as {default}" if isinstance(default, str) else ""
        return " or ".join(_accepted(member, None) for member in kinds) + example
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is tuple:
        example = f" such as {shown(list(default))}" if isinstance(default, tuple) else ""
        return f"a list of {len(inner)}{example}"
    if origin is list:
        return f"a list, each {_accepted(inner[0], None)}"
    return words.get(origin, "keys and values, {key: value}")


def refuse(subject: str, why: str) -> NoReturn:
    """Raise :class:`ConfigError` in one line, whatever was typed."""
    raise ConfigError(printable(f"{_cut(subject)}: {why}"))


def unknown(subject: str, accepted: str, hint: str) -> NoReturn:
    """Raise for a key that nobody knows."""
    raise UnknownKeyError.of(_cut(subject), accepted, hint)


def _cut(subject: str) -> str:
    return subject if len(subject) <= 120 else f"{subject[:117]}..."


def fitting(hint: Any, value: Any, where: str = "") -> Any:
    """``value``, plain data that a file holds, as the annotation ``hint``, where it fits exactly: nothing is converted
    but lists into tuples and mappings into dataclasses. Raises ValueError, saying where it does not."""
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if dataclasses.is_dataclass(origin) and isinstance(origin, type):
        return origin(**_fitting_fields(origin, value, where))
    if origin is tuple and isinstance(value, list | tuple):
        hints = inner[:1] * len(value) if inner[-1] is ... else inner
        if len(hints) == len(value):
            pairs = enumerate(zip(hints, value))
            return tuple(fitting(each, item, f"{where}[{index}]") for index, (each, item) in pairs)
    elif type(value) in _FITTING.get(origin, ()):
        return value
    raise ValueError(
        f"{where or 'it'}={f'{value!r:.40}'}: accepted is {_NAMES.get(origin, 'a list')}"
    )


def _fitting_fields(kind: type, value: Any, where: str) -> dict[str, Any]:
    hints, known = typing.get_type_hints(kind), {each.name for each in dataclasses.fields(kind)}
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'}={f'{value!r:.40}'}: accepted are keys and values")
    if odd := [key for key in value if key not in known]:
        raise ValueError(f"{where}.{odd[0]!s:.40}: unknown key{nearest(str(odd[0]), known)}")
    required = known - defaults(kind).keys()
    if missing := sorted(required - value.keys()):
        raise ValueError(f"{where}.{missing[0]}: missing")
    return {key: fitting(hints[key], item, f"{where}.{key}") for key, item in value.items()}


_FITTING: dict[Any, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    str: (str,),
    bool: (bool,),
}
_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}

"""Convert plain data from YAML to dataclasses. Keys must match exactly, and values must have the annotated types."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from parallax.common.documents import shown
from parallax.errors import ConfigError, UnknownKeyError, nearest, printable

_field_types: dict[type, Mapping[str, Any]] = {}


def field_types(kind: type) -> Mapping[str, Any]:
    """Return the type of each field of the dataclass ``kind``.

    The result is cached, because Python would compile the annotations, which are text, at each call.
    """
    if kind not in _field_types:
        hints = typing.get_type_hints(kind)
        types = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
        _field_types[kind] = MappingProxyType(types)
    return _field_types[kind]


def defaults(kind: type) -> dict[str, Any]:
    """Return {field: default} for the fields of ``kind`` that have a default, without calling ``kind()``."""
    made = [
        (field.name, field.default_factory() if callable(field.default_factory) else field.default)
        for field in dataclasses.fields(kind)
    ]
    return {name: value for name, value in made if value is not dataclasses.MISSING}


MOST_NAMED = 6  # most mistakes in one message


class Mistakes:
    """Collects the errors of one command line or file, so that they are reported together."""

    def __init__(self) -> None:
        self.collected: list[ConfigError] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """A context that collects a :class:`ConfigError` raised inside and does not pass it on."""
        try:
            yield
        except ConfigError as error:
            self.collected.extend(error.parts or [error])

    def raise_collected(self) -> None:
        """Raise one :class:`ConfigError` for all collected errors, with a message of one line.

        No-op if there are none.
        """
        if len(self.collected) < 2:
            for error in self.collected:
                raise error
            return
        unknown = [error for error in self.collected if isinstance(error, UnknownKeyError)]
        others = [str(error) for error in self.collected if not isinstance(error, UnknownKeyError)]
        named = list(dict.fromkeys([*(e.short for e in unknown), *others]))
        more = [f"and {len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
        accepted = dict.fromkeys(e.accepted for e in unknown)
        error = ConfigError("; ".join([*named[:MOST_NAMED], *more, *accepted]))
        error.parts = tuple(self.collected)
        raise error


def checked(
    kind: type,
    tree: Any,
    group: str,
    label: str = "",
    elsewhere: Callable[[str], str] = lambda key: "",
    added: list[str] | None = None,
) -> dict[str, Any]:
    """Return a copy of ``tree``, the settings of one group, if its keys are exactly the fields of the dataclass
    ``kind``; otherwise raise ConfigError.

    ``group``: the key of the group, such as ``data``; empty if ``tree`` is the whole configuration. ``label``: the text
    for the group in error messages, such as ``data=audio``. ``elsewhere(key)`` returns a hint for a key that belongs to
    another group or has another name. If ``added`` is a list, missing keys get their defaults if they have any, and
    ``KEY=VALUE`` is appended to ``added`` for each.
    """
    prefix, hints = f"{group}." if group else "", field_types(kind)
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
            with mistakes.collecting():
                hint = elsewhere(f"{prefix}{key}") or nearest(str(key), hints)
                unknown(f"{prefix}{key}={shown(tree[key])}", accepted, hint)
    mistakes.raise_collected()
    values, usual = dict(tree), defaults(kind)
    for key in hints:
        if key in tree:
            continue
        default = f", the default is {shown(usual[key])}" if key in usual else ""
        if added is None or not default:
            refuse(f"{prefix}{key}", f"missing; {accepted}{default}")
        values[key] = list(usual[key]) if isinstance(usual[key], tuple) else usual[key]
        added.append(f"{prefix}{key}={shown(usual[key])}")
    return values


def build(kind: type, values: dict[str, Any], prefix: str) -> Any:
    """Return an instance of the dataclass ``kind``, with ``values`` converted to the annotated types.

    The dataclass itself checks what the values mean. ``prefix`` precedes the keys in error messages.
    """
    read, mistakes, usual = {}, Mistakes(), defaults(kind)
    for key, hint in field_types(kind).items():
        if isinstance(values[key], str) and values[key] == usual.get(key):
            read[key] = values[key]  # only the dataclass interprets values such as auto
            continue
        try:
            read[key] = _read(hint, values[key])
        except (ValueError, OverflowError):
            accepted = _accepted(hint, usual.get(key))
            with mistakes.collecting():
                refuse(f"{prefix}{key}={shown(values[key])}", f"accepted is {accepted}")
    mistakes.raise_collected()
    with in_one_line():
        return kind(**read)


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """A context that escapes the message of a :class:`ConfigError` raised inside, for printing to a terminal."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(printable(str(error))) from None


def members(hint: Any) -> list[Any]:
    """Return the member types of a union, or ``[hint]`` for another type.

    ``str`` comes last, because almost any value can be read as text.
    """
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return sorted(typing.get_args(hint), key=lambda kind: kind is str) if union else [hint]


def _read(hint: Any, value: Any) -> Any:
    """Return ``value`` converted to ``hint``; raise ValueError if that is impossible."""
    for kind in members(hint):
        with contextlib.suppress(ValueError):
            return _read_as(kind, value)
    raise ValueError(value)


def _read_as(kind: Any, value: Any) -> Any:
    """Return ``value`` converted to the type ``kind``, which is not a union. Raises ValueError if that is impossible.

    Text that spells a number may become a number, because ``${oc.env:STEPS}`` always yields text.
    """
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    scalar = isinstance(value, int | float | str) and not isinstance(value, bool) and value != "???"
    if isinstance(origin, type) and dataclasses.is_dataclass(origin) and isinstance(value, origin):
        return value  # a group that was converted before
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
    """Return ``value`` for a field of type Any. Raises ValueError for a value that YAML would not restore exactly."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(value)


def _accepted(hint: Any, default: Any) -> str:
    """Return a text that lists the values accepted by the annotation ``hint``.

    ``default``: the default value of the field. A text or tuple is included in the result as an example.
    """
    accepted = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    if len(kinds := members(hint)) > 1:
        example = f" such as {default}" if isinstance(default, str) else ""
        return " or ".join(_accepted(member, None) for member in kinds) + example
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is tuple:
        example = f" such as {shown(list(default))}" if isinstance(default, tuple) else ""
        return f"a list of {len(inner)}{example}"
    if origin is list:
        return f"a list, each {_accepted(inner[0], None)}"
    return accepted.get(origin, "keys and values, {key: value}")


def refuse(subject: str, why: str) -> NoReturn:
    """Raise :class:`ConfigError` with the message ``subject: why``, escaped and on one line."""
    raise ConfigError(printable(f"{_shortened(subject)}: {why}"))


def unknown(subject: str, accepted: str, hint: str) -> NoReturn:
    """Raise :class:`UnknownKeyError` for the key ``subject``, with an escaped message of one line.

    ``accepted``: a text with the keys that exist. ``hint``: a text that names the most similar key; it may be empty.
    """
    raise UnknownKeyError.of(_shortened(subject), accepted, hint)


def _shortened(subject: str) -> str:
    return subject if len(subject) <= 120 else f"{subject[:117]}..."


def convert_exactly(hint: Any, value: Any, where: str = "") -> Any:
    """Return ``value``, plain data from a file, converted to the annotation ``hint``.

    Lists are converted to tuples, and mappings to dataclasses. Any other value must have the annotated type already;
    otherwise ValueError is raised, and its message contains ``where``, the location of the value.
    """
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is types.UnionType and inner[-1] is types.NoneType:
        return None if value is None else convert_exactly(inner[0], value, where)
    if dataclasses.is_dataclass(origin) and isinstance(origin, type):
        return origin(**_convert_fields(origin, value, where))
    if origin is tuple and isinstance(value, list | tuple):
        hints = inner[:1] * len(value) if inner[-1] is ... else inner
        if len(hints) == len(value):
            pairs = enumerate(zip(hints, value))
            return tuple(
                convert_exactly(each, item, f"{where}[{index}]") for index, (each, item) in pairs
            )
    elif type(value) in _EXACT_TYPES.get(origin, ()):
        return value
    raise ValueError(
        f"{where or 'it'}={f'{value!r:.40}'}: accepted is {_NAMES.get(origin, 'a list')}"
    )


def _convert_fields(kind: type, value: Any, where: str) -> dict[str, Any]:
    hints = field_types(kind)
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'}={f'{value!r:.40}'}: accepted are keys and values")
    if odd := [key for key in value if key not in hints]:
        raise ValueError(f"{where}.{odd[0]!s:.40}: unknown key{nearest(str(odd[0]), hints)}")
    required = hints.keys() - defaults(kind).keys()
    if missing := sorted(required - value.keys()):
        raise ValueError(f"{where}.{missing[0]}: missing")
    return {key: convert_exactly(hints[key], item, f"{where}.{key}") for key, item in value.items()}


_EXACT_TYPES: dict[Any, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    str: (str,),
    bool: (bool,),
}
_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}

"""Find the options of a configuration group: each option is a dataclass in a module of its own.

A new option is one module in the group's package, with a dataclass derived from the group's base class, and one file
``configs/<group>/<name>.yaml``.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import pkgutil
from typing import Any, ClassVar

from parallax.common.typed import defaults, members


class Registered(abc.ABC):
    """The base class of the options of one configuration group.

    ``package`` is the name of the package that contains the options' modules.
    """

    package: ClassVar[str]

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The option's name."""

    @classmethod
    def kinds(cls) -> tuple[type[Any], ...]:
        """Return the dataclasses in all modules of the package, ordered by ``name``, with ``custom`` last."""
        base: Any = cls
        return _kinds(base, cls.package)


@functools.cache
def _kinds(base: Any, package: str) -> tuple[type[Any], ...]:
    found: list[type[Any]] = []
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        name = f"{package}.{module.name}"
        members = vars(importlib.import_module(name)).values()
        found += [
            each
            for each in members
            if isinstance(each, type)
            and issubclass(each, base)
            and each is not base
            and each.__module__ == name
            and "__dataclass_fields__" in vars(each)
            and "name" in defaults(each)  # a base class of several kinds has none
        ]

    def order(kind: type[Any]) -> tuple[bool, str]:
        name = defaults(kind)["name"]
        return name == "custom", name

    return tuple(sorted(found, key=order))


def dataclasses_of(hint: Any) -> list[type[Any]]:
    """Return the dataclasses that the annotation ``hint`` accepts: the members of a union, or all options of a
    registered base."""
    if isinstance(hint, type) and issubclass(hint, Registered):
        return list(hint.kinds())
    return [
        kind for kind in members(hint) if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]

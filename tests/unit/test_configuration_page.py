"""docs/configuration.md is what the code says, and says something of every setting."""

from __future__ import annotations

import dataclasses
import importlib.util
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallax.common.registered import dataclasses_of
from parallax.common.typed import members
from parallax.config import RunConfig

DOCS = Path(__file__).parents[2] / "docs"


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("configuration_page", DOCS / "configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current() -> None:
    written = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert written == "\n\n".join(generator().page()) + "\n", "`make docs` writes it anew"


def test_every_setting_has_a_description() -> None:
    kinds = [RunConfig]
    for hint in typing.get_type_hints(RunConfig).values():
        kinds += dataclasses_of(hint)
    missing = [
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, output in generator().descriptions(kind).items()
        if not output
        and not dataclasses.is_dataclass(members(typing.get_type_hints(kind)[name])[0])
    ]
    assert not [name for name in missing if not name.endswith(".name")], (
        "name it in its class's docstring: ``key``: meaning"
    )


@dataclass
class Described:
    """All of it. ``first``: one (see :func:`~a.b`). ``second`` and ``third``: two, of ``fourth`` parts.

    Of the rest. ``fifth`` has no colon.
    """

    first: int
    second: int
    third: int
    fourth: int
    fifth: int
    sixth: int = 6


@dataclass
class Derived(Described):
    """More. ``second``: its own."""


def test_descriptions_are_taken_from_the_docstring() -> None:
    assert generator().descriptions(Described, "group.") == {
        "first": "one (see `a.b`).",
        "second": "two, of `fourth` parts.",
        "third": "two, of `fourth` parts.",
        "fourth": "see `group.second`",
        "fifth": "`fifth` has no colon.",
        "sixth": "",
    }
    assert generator().descriptions(Derived)["first"] == "one (see `a.b`)."
    assert generator().descriptions(Derived)["second"] == "its own."
    assert generator()._introduction(Described) == "All of it.\n\nOf the rest."

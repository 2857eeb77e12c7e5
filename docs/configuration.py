"""Write docs/configuration.md from the dataclasses that a run's settings are read into.

    python docs/configuration.py > docs/configuration.md        # or: make docs

A field's description is in its class's docstring: from the sentence that begins with its name in double backticks to
the sentence that begins with another field's. A field that begins no sentence refers to the one that names it.
Options and what they set come from the files in configs/.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from parallax.common.documents import leaves, shown
from parallax.common.registered import dataclasses_of
from parallax.common.typed import defaults, field_types, members
from parallax.config import RunConfig

CONFIGS = Path(__file__).parents[1] / "configs"

INTRODUCTION = """# Settings

Write a setting as `key=value` behind any command that plans or trains: `parallax train model.layers=12
trainer.steps=200`. `group=option` chooses the file `configs/group/option.yaml`: `parallax train experiment=demo
swap=off`. `auto` leaves a choice to the planner, or asks the machine. [commands.md](commands.md) has the grammar.

This page is made from the code: `make docs` writes it."""

_WORDS = {
    type(None): "null",
    int: "integer",
    float: "number",
    str: "text",
    bool: "true, false",
    Any: "any",
}
_NAME = r"``\w+``"
_HEAD = re.compile(rf"(?:^|(?<=[.;] ))({_NAME}(?:(?:, | and |, and ){_NAME})*)(?::|(?=[ ,]))")


def main() -> int:
    """Print the page."""
    print("\n\n".join(page()))
    return 0


def page() -> Iterator[str]:
    """The page's blocks, one for each group and each of its kinds."""
    yield INTRODUCTION
    groups = {key: dataclasses_of(hint) for key, hint in field_types(RunConfig).items()}
    yield "## The run\n\n" + _introduction(RunConfig)
    yield _table(RunConfig, "", [key for key, kinds in groups.items() if not kinds])
    yield "\n".join(
        ["Groups:", "", *(f"- [`{key}`](#{key})" for key, kinds in groups.items() if kinds)]
    )
    for group, kinds in groups.items():
        if kinds:
            yield from _group(group, kinds)
    yield "## experiment"
    yield "Several settings at once. Settings that you type take precedence."
    yield _options("experiment")


def _group(group: str, kinds: list[type]) -> Iterator[str]:
    yield f"## {group}"
    if len(kinds) == 1:
        yield from filter(None, [_introduction(kinds[0])])
    yield _options(group)
    for kind in kinds:
        names = [field.name for field in dataclasses.fields(kind)]
        if len(kinds) > 1:
            yield f"### {group}: {defaults(kind)['name']}"
            yield _introduction(kind)
            names.remove("name")  # the option sets it
        yield _table(kind, f"{group}.", names)


def _options(group: str) -> str:
    """A line for each file of the group: its comment, and the keys that it sets."""
    chosen = {
        key: value
        for each in yaml.safe_load((CONFIGS / "config.yaml").read_text(encoding="utf-8"))[
            "defaults"
        ]
        if isinstance(each, dict)
        for key, value in each.items()
    }
    lines = ["| option | meaning | sets |", "|---|---|---|"]
    for file in sorted((CONFIGS / group).glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
        comment = " ".join(line for line in comments if not line.startswith("@package"))
        content = yaml.safe_load(text) or {}
        content.pop("defaults", None)
        where = "" if "@package _global_" in text else f"{group}."
        sets = ", ".join(f"`{where}{key}={value}`" for key, value in leaves(content).items())
        usual = ", the default" if chosen.get(group) == file.stem else ""
        lines.append(f"| `{group}={file.stem}`{usual} | {_cell(comment)} | {_cell(sets)} |")
    return "\n".join(lines)


def _table(kind: type, prefix: str, names: list[str]) -> str:
    found, values = descriptions(kind, prefix), defaults(kind)
    hints = field_types(kind)
    lines = ["| key | accepts | default | meaning |", "|---|---|---|---|"]
    for name in names:
        value = values.get(name, "???")
        lines.append(
            f"| `{prefix}{name}` | {_accepted(hints[name])} | {_default(value)} | {_cell(found[name])} |"
        )
    return "\n".join(lines)


def _default(value: Any) -> str:
    if value in ("???", ""):
        return "required" if value else "empty"
    return _cell(f"`{value:g}`" if isinstance(value, float) else f"`{shown(value)}`")


def _accepted(hint: Any) -> str:
    accepted_types = []
    for kind in members(hint):
        origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
        if origin is list:
            accepted_types.append(f"list of {_accepted(inner[0])}")
        elif origin is tuple:
            accepted_types.append(f"list of {len(inner)}: {_accepted(inner[0])}")
        else:
            accepted_types.append("keys and values" if origin is dict else _WORDS[origin])
    return " or ".join(accepted_types)


def descriptions(kind: type, prefix: str = "") -> dict[str, str]:
    """By field, from the docstrings of ``kind`` and its bases; "" for a field that none of them names."""
    found: dict[str, str] = {}
    classes = [each for each in kind.__mro__ if "__dataclass_fields__" in vars(each)]
    paragraphs = [paragraph for each in classes for paragraph in _paragraphs(each)]
    for text, heads in paragraphs:
        for head, end in zip(heads, [*(head.start() for head in heads[1:]), len(text)]):
            start = head.end() if text[head.end() - 1] == ":" else head.start()
            for name in _named(head):
                found.setdefault(name, text[start:end].strip(" ,;"))
    for name in [field.name for field in dataclasses.fields(kind) if field.name not in found]:
        homes = [home for home, comment in found.items() if f"``{name}``" in comment]
        found[name] = f"see ``{prefix}{homes[0]}``" if homes else ""
    return {name: _markdown(comment) for name, comment in found.items()}


def _introduction(kind: type) -> str:
    """What the docstring says of all fields."""
    found = [text[: heads[0].start()] if heads else text for text, heads in _paragraphs(kind)]
    return _markdown("\n\n".join(filter(None, map(str.strip, found))))


def _paragraphs(kind: type) -> list[tuple[str, list[re.Match[str]]]]:
    """The docstring's paragraphs, each in a line, and where each begins to speak of a field."""
    known = {field.name for field in dataclasses.fields(kind)}
    texts = [" ".join(each.split()) for each in inspect.cleandoc(kind.__doc__ or "").split("\n\n")]
    return [
        (text, [head for head in _HEAD.finditer(text) if known.issuperset(_named(head))])
        for text in texts
    ]


def _named(head: re.Match[str]) -> list[str]:
    return re.findall(r"``(\w+)``", head[1])


def _markdown(text: str) -> str:
    """Sphinx's marks as Markdown's."""
    text = re.sub(r":\w+:`~?\.?([\w.]+)`", r"`\1`", text)
    return text.replace("``", "`")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())

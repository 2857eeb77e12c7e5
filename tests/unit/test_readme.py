"""What README.md and docs/ say can be typed: commands parse and their settings exist, files and targets are there."""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallax import cli, config
from parallax.commands.options import class_paths_of
from parallax.config.multirun import Multirun
from parallax.errors import ConfigError

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.M | re.S)
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)]+)\)")
_SENTENCE = "in a sentence"
_REFUSED = "exit code 2"  # a comment behind a command that is shown because it is wrong


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Each command that a page shows, with its comment; those of the running text, which may be abbreviated, have
    "in a sentence" for one."""
    text = page.read_text(encoding="utf-8")
    blocks = [body for _, language, body in _BLOCK.findall(text) if language != "python"]
    indented = re.findall(r"^    (\S.*)$", text, re.M)
    for line in [*"\n".join(blocks).replace("\\\n", " ").splitlines(), *indented]:
        command, _, comment = line.strip().removeprefix("$ ").partition(" #")
        for part in command.split(" && "):
            yield part, comment
    spans = _SPAN.findall(_BLOCK.sub("", text))
    yield from ((" ".join(span.split()), _SENTENCE) for span in spans)


def arguments_of(command: str) -> list[str]:
    """What follows `parallax` in a command that begins with it, or that starts its ranks; empty for any other."""
    try:
        typed = shlex.split(command)
    except ValueError:
        return []
    typed = [word for word in typed if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if typed[:1] in (["torchrun"], ["python"]) and "-m" in typed:
        typed = typed[typed.index("-m") + 1 :]
    if typed[:1] and typed[0].startswith("launch/"):
        typed = ["parallax", "train", *(word for word in typed if re.match(r"[\w.]+=", word))]
    shown = typed[:1] == ["parallax"] and len(typed) > 1 and typed[1] in cli.COMMANDS
    return [word for word in typed[1:] if "…" not in word and word != "key=value"] if shown else []


@each_page
def test_every_command_parses_and_its_settings_exist(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "examples")
    for command, comment in commands(page):
        if typed := arguments_of(command):
            found = _mistake(typed, in_a_sentence=comment == _SENTENCE)
            wanted = _REFUSED in comment
            assert bool(found) == wanted, f"{command}: {found or 'is not refused'}"


def _mistake(typed: list[str], *, in_a_sentence: bool) -> str:
    """The error that the command would raise; a command in a sentence may lack arguments."""
    settings = [word for word in typed if "=" in word and word[0] != "-" and "..." not in word]
    try:
        if not in_a_sentence:
            parsed = cli._parse(typed)
            settings = [word for word in getattr(parsed, "overrides", ()) if "..." not in word]
        settings = [word for word in settings if not word.startswith("hydra/")]
        if typed[0] in ("explain", "simulate", "calibrate"):
            class_paths_of(argparse.Namespace(overrides=settings))
        elif "-m" in typed or "--array" in typed:
            points = Multirun.read(settings).points or ((),)
            folders = [word for word in settings if word.startswith("hydra.searchpath=")]
            config.compose([*folders, *(word.replace("'", "") for word in points[0])])
        elif settings and "--what-if" not in typed:
            config.compose(settings)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_wrong_setting_on_a_page_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Type\n\n```\nPYTHONPATH=. parallax train trainer.stepz=1\n```\n")
    with pytest.raises(AssertionError, match="stepz"):
        test_every_command_parses_and_its_settings_exist(page, pytest.MonkeyPatch())
    page.write_text("Type\n\n```\nparallax train trainer.steps=1 # exit code 2\n```\n")
    with pytest.raises(AssertionError, match="not refused"):
        test_every_command_parses_and_its_settings_exist(page, pytest.MonkeyPatch())


@each_page
def test_python_that_is_shown_compiles(page: Path) -> None:
    for _, language, body in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            compile(textwrap.dedent(body), page.name, "exec")


@each_page
def test_targets_and_modules_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for command, _ in commands(page):
        if found := re.match(r"make ([a-z-]+)(?: |$)", command):
            assert found[1] in targets, command
        if found := re.match(r"python -m ((?:benchmarks|tests)[\w.]*)", command):
            module = ROOT / found[1].replace(".", "/")
            assert module.is_dir() or module.with_suffix(".py").exists(), command


@each_page
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in _LINK.findall(_BLOCK.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in _anchors(target), f"{page.name}: {link}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_names_every_page() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert text.index("## Status") < text.index("## Install")
    linked = {link.partition("#")[0] for link in _LINK.findall(text)}
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= linked

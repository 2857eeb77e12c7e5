"""Tracebacks of errors in the user's code show the user's frames."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from parallax.common.targets import call_target
from parallax.common.terminal import print_exception
from parallax.errors import ConfigError
from parallax.plan.task import PlanTask

CODE = """
import json

def build(text):
    return inner(text)

def inner(text):
    try:
        return json.loads(text)
    except ValueError:
        return {}[text]
"""


@pytest.fixture
def mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exception:
    """The error of a function of the user's that Parallax calls."""
    (tmp_path / "traced_model.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(KeyError) as caught:
        call_target("model", "traced_model:build", {"text": "no json"})
    return caught.value


def _files(shown: str) -> list[str]:
    return [Path(line.split('"')[1]).name for line in shown.splitlines() if "  File " in line]


def test_only_frames_of_the_user_and_the_raising_one_are_shown(mistake: Exception) -> None:
    shown = print_exception(mistake)
    first, second = shown.split("During handling of the above exception")
    assert _files(first) == ["traced_model.py", "__init__.py", "decoder.py", "decoder.py"]
    assert _files(second) == ["traced_model.py"] * 2
    assert shown.splitlines()[-1] == "KeyError: 'no json'"
    assert "PARALLAX_TRACEBACK=full" in shown.splitlines()[0]


def test_all_frames_are_shown_on_request(
    mistake: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARALLAX_TRACEBACK", "full")
    shown = print_exception(mistake)
    assert "targets.py" in _files(shown)
    assert shown.splitlines()[-1] == "KeyError: 'no json'"


@pytest.mark.parametrize("call", [lambda: PlanTask(3), lambda: call_target("x", "y", None)])  # type: ignore[arg-type]
def test_an_error_without_code_of_the_user_is_shown_whole(call: Any) -> None:
    with pytest.raises((ValueError, ConfigError)) as caught:
        call()
    shown = print_exception(caught.value)
    assert _files(shown)[0] == Path(__file__).name
    assert "left out" not in shown

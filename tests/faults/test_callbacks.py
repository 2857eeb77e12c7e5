"""Callbacks of a configuration in whole runs: what they print, how they end a run, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from parallax.common.trust import class_paths
from parallax.config import compose, dump, load
from parallax.errors import ConfigError
from parallax.runtime.checkpoint import list_checkpoints
from tests.faults.commands import one_line, prepared
from tests.faults.killing import kill_at

Called = Callable[..., tuple[int, str, str]]
OWN = """
import parallax

class Ends(parallax.Callback):
    def __init__(self, step, rank=1):
        self.step, self.rank = step, rank

    def on_step_end(self, run):
        if run.step == self.step and run.rank == self.rank:
            run.stop(f"loss below {run.loss + 1:.0f}")

class Fails(parallax.Callback):
    def on_step_end(self, run):
        if run.step == 3 and run.rank == 1:
            raise KeyError("a mistake")

def nothing():
    return object()
"""


@pytest.fixture
def own(here: Path) -> None:
    (here / "own_callbacks.py").write_text(OWN)


def entries(*texts: str) -> str:
    return f"callbacks=[{','.join(texts)}]"


def test_entries_are_read_and_stored_as_they_are_written() -> None:
    word = entries("a.b:C", "{target: a.b:D, kwargs: {step: 3, names: [x]}, on_error: note}")
    config = compose(["trainer.steps=1", word])
    assert config.callbacks[0] == "a.b:C"
    assert load(dump(config)) == config
    assert class_paths(dump(config)) == {"callbacks": "[a.b:C,a.b:D]"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nowhere", r"callbacks\[0\].target=nowhere: accepted is package.module:factory"),
        ("{target: a:b, kwarg: 1}", r"callbacks\[0\].kwarg=1: unknown key; .*'kwargs'"),
        ("{target: a:b, on_error: ignore}", r"on_error=ignore: accepted are stop, note"),
        ("{kwargs: {}}", r"callbacks\[0\].target: missing"),
        ("3", r"callbacks\[0\]=3: keys and values are needed"),
    ],
)
def test_a_wrong_entry_is_refused_in_one_line(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        compose(["trainer.steps=1", entries(entry)])
    assert str(error.value).isprintable()


@pytest.mark.faults
@pytest.mark.usefixtures("own")
def test_a_callback_ends_a_run_which_the_same_command_resumes(called: Called) -> None:
    ends = "{target: own_callbacks:Ends, kwargs: {step: 3}}"
    run = prepared(*kill_at(), entries(ends), "trainer.steps=6")
    code, out, err = called("train", "--run-dir", str(run))
    assert (code, err) == (0, "")
    assert out.count("step 3: training ends: loss below ") == 1
    assert "3 steps; ended by loss below " in out
    assert json.loads((run / "summary.json").read_text())["ended"] == "callback"
    assert list_checkpoints(run / "checkpoints")[-1].name == "step-00000003"
    code, out, err = called("train", "--run-dir", str(run))
    assert (code, err) == (0, "")
    assert json.loads((run / "summary.json").read_text())["ended"] == "steps"


@pytest.mark.faults
@pytest.mark.usefixtures("own")
def test_an_error_of_a_callback_ends_the_run_and_is_not_tried_again(called: Called) -> None:
    run = prepared(
        *kill_at(), entries("own_callbacks:Fails"), "trainer.steps=6", "trainer.max_restarts=3"
    )
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 1
    assert err.count('raise KeyError("a mistake")') == 1
    last = err.splitlines()[-1]
    assert last.startswith("parallax: rank 1 (stage 1, replica 0) ")
    assert "the callback own_callbacks:Fails failed in on_step_end on rank 1: KeyError: " in last
    assert "restart" not in err


@pytest.mark.faults
@pytest.mark.usefixtures("own")
def test_an_error_of_a_callback_is_noted_once(called: Called) -> None:
    noted = "{target: own_callbacks:Fails, on_error: note}"
    run = prepared(*kill_at(), entries(noted), "trainer.steps=6")
    code, out, err = called("train", "--run-dir", str(run))
    assert code == 0
    what = "the callback own_callbacks:Fails failed in on_step_end on rank 1: KeyError: 'a mistake'"
    assert out.count(f"{what}; training continues without it") == 1
    assert one_line(err) == f"parallax: {what} (once); the run continued without it"


@pytest.mark.faults
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("own_callbacks:End", "module own_callbacks has no End (did you mean 'Ends'?)"),
        ("own_callbacks:Ends", "callbacks[0].kwargs: own_callbacks:Ends(step, rank=1): missing"),
        ("own_callbacks:nothing", "callback own_callbacks:nothing: object has no hook; hooks are"),
    ],
)
def test_a_callback_that_cannot_be_made_ends_the_command(
    called: Called, entry: str, message: str
) -> None:
    run = prepared(*kill_at(), entries(entry), "trainer.steps=2")
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 2
    assert message in one_line(err)
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.faults
@pytest.mark.usefixtures("own")
def test_a_copied_run_does_not_import_callbacks_that_were_not_typed(called: Called) -> None:
    run = prepared(*kill_at(), entries("own_callbacks:Fails"), "trainer.steps=2")
    copied = run.rename(run.parent / "copied")
    code, _, err = called("train", "--run-dir", str(copied))
    assert code == 2
    assert "callbacks=[own_callbacks:Fails]" in one_line(err)
    words = [each for each in one_line(err).split() if each.startswith(("model.", "data.", "call"))]
    code, _, err = called("train", "--run-dir", str(copied), *dict.fromkeys(words))
    assert (code, err) == (0, "")

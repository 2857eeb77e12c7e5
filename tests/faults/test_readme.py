"""What README.md shows is run: its own model, and its commands one after another."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.pool import ROOT

pytestmark = pytest.mark.faults
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.M | re.S)
SMALL = ["model.layers=2", "model.hidden=64", "model.heads=2", "model.sequence=64"]
QUICK = ["data.max_bytes=64KiB", "trainer.global_batch=4", "logger=none"]


def typed(beginning: str) -> list[str]:
    """The arguments of `parallax` in the README's line that begins so, but for its environment."""
    lines = [line for language, body in BLOCKS if not language for line in body.splitlines()]
    (line,) = [line for line in lines if f"parallax {beginning}" in line and "&&" not in line]
    return shlex.split(line.partition("parallax ")[2], comments=True)


def test_its_own_model_trains(here: Path, called: Callable[..., tuple[int, str, str]]) -> None:
    (body,) = [body for language, body in BLOCKS if language == "python"]
    assert len([line for line in body.splitlines() if line.strip()]) <= 15
    (here / "mymodel.py").write_text(body)
    code, out, err = called(*typed("train model=custom"), *QUICK, "trainer.steps=2", "name=own")
    assert code == 0, out + err
    assert (here / "runs" / "own" / "summary.json").exists()


def test_its_demo_and_its_five_commands_run(
    here: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    def run(*arguments: str) -> str:
        code, out, err = called(*arguments)
        assert code == 0, f"{arguments}: {out}{err}"
        return out

    assert "parallax train experiment=demo\n" in TEXT
    printed = run("train", "experiment=demo", *SMALL, *QUICK, "trainer.steps=2", "name=demo")
    assert "stage  blocks  replicas  activations" in printed
    first = [word for word in typed("train name=first model") if "layers" not in word]
    assert run(*first, *SMALL, *QUICK, "trainer.steps=2")
    again = run(*typed("train name=first trainer.steps"), "trainer.steps=3")
    assert "3 steps" in again
    planned = run(*typed("plan"), "model.layers=4", "model.hidden=256", "model.heads=4")
    assert "parameters in" in planned
    assert run(*typed("explain first"))
    run(*typed("export first"))
    assert list((here / "runs" / "first").rglob("*.safetensors"))

"""What a rank records of its steps on request: complete files, of the requested steps, and nothing otherwise."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from parallax.errors import ConfigError
from parallax.model.describe import describe
from parallax.model.factory.mlp import MLP, MLPConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.train.debug import DebugConfig, recorder
from tests.plans import make_plan


def recorded(folder: Path, config: DebugConfig, steps: int) -> None:
    chain = describe(MLPConfig(layers=2, hidden=16, embedding=4, sequence=4).build)
    engine = Engine.build(chain, make_plan(chain, global_batch=4), loss=MLP.loss)
    recording = recorder(config, folder, 0, torch.device("cpu"))
    batch = TensorRows(torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    try:
        for _ in range(steps):
            with recording.step():
                result = engine.step(batch)
            recording.add(result)
    finally:
        recording.close()
        engine.close()


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_off_leaves_nothing(tmp_path: Path) -> None:
    recorded(tmp_path, DebugConfig(), 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("steps", "seen"), [(5, {1, 2}), (2, {1}), (1, set())])
def test_a_trace_holds_the_requested_steps(tmp_path: Path, steps: int, seen: set[int]) -> None:
    """Also where the loop ends before they do."""
    recorded(tmp_path, DebugConfig(record="trace", steps=(2, 3)), steps)
    path = tmp_path / "trace-rank0.json"
    assert path.exists() == bool(seen)
    if seen:
        actions = [event for event in events(path) if event["ph"] != "M" and event["cat"] != "wait"]
        assert {event["args"]["step"] for event in actions} == seen
        assert {"forward", "backward", "update"} <= {event["cat"] for event in actions}


@pytest.mark.parametrize("steps", [4, 2])
def test_the_profiler_sees_every_operator(tmp_path: Path, steps: int) -> None:
    recorded(tmp_path, DebugConfig(record="profiler", steps=(2, 3)), steps)
    names = [event.get("name") for event in events(tmp_path / "profiler-rank0.json")]
    assert "aten::addmm" in names
    assert {f"step {n}" for n in (1, 2, 3, 4)} & set(names) == {
        f"step {n}" for n in (2, 3) if n <= steps
    }


def test_memory_has_every_allocation_and_a_line_for_each_step(tmp_path: Path) -> None:
    recorded(tmp_path, DebugConfig(record="memory", steps=(2, 2)), 3)
    found = events(tmp_path / "memory-rank0.json")
    assert [event for event in found if event.get("name") == "[memory]"]
    with (tmp_path / "memory-rank0.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["step"] for line in lines] == ["1", "2", "3"]
    assert all(int(line["resident_bytes"]) > 0 for line in lines)


@pytest.mark.parametrize("steps", [(0, 2), (3, 2)])
def test_steps_that_are_none(steps: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"debug\.steps"):
        DebugConfig(record="trace", steps=steps)

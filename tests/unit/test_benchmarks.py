"""Benchmarks run, and say what others read from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.pipeline import main

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "repetitions": 2,
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "sequence": 8,
    "vocabulary": 16,
    "rows": 1,
    "micro-batches": 3,
    "idle-micro-batches": 3,
    "idle-repetitions": 2,
}


@pytest.mark.slow
def test_pipeline_benchmark_prints_json_last() -> None:
    options = [f"--{key}={value}" for key, value in TINY.items()]
    command = [sys.executable, "-m", "benchmarks.pipeline", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    table, found = done.stdout, json.loads(done.stdout.splitlines()[-1])
    assert set(found["schedules"]) == {"1f1b", "gpipe"}
    for name, row in found["schedules"].items():
        assert name in table
        assert row["ratio"] == pytest.approx(row["ours_seconds"] / row["theirs_seconds"])
        assert 0 < row["low"] <= row["high"]
    assert found["overhead_microseconds"] == max(found["overhead_by_stage"]["ours"]) > 0
    assert found["torch"]
    assert found["cores"] >= 1


@pytest.mark.parametrize("argument", ["--rows=0", "--repetitions=1", "--colour=red"])
def test_pipeline_benchmark_refuses_nonsense(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([argument])
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err

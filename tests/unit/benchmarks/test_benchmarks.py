"""Benchmarks run, and say what others read from them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import pipeline_plans
from benchmarks.models import ResNetTask
from benchmarks.pipeline import main
from benchmarks.pipeline_plans import Heavy, Lopsided
from benchmarks.ratios import ratios
from benchmarks.swap import Row, Sizes, Way, _offload
from benchmarks.teams import Step, by_turns, check_same_losses
from benchmarks.workers import WayFailed, Worker
from parallax.model.describe import Chain

ROOT = Path(__file__).resolve().parents[3]
TINY = {
    "repetitions": 2,
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "sequence": 8,
    "vocabulary": 16,
    "rows": 1,
    "micro-batches": 4,
    "idle-micro-batches": 3,
    "idle-repetitions": 2,
}


RATIO = {"fastest", "median", "low", "high"}


def run(name: str, *options: str) -> str:
    """What a benchmark prints, in a process of its own: it starts processes that outlive a test."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.bench
def test_pipeline_benchmark_prints_json_last() -> None:
    table = run("pipeline", "--json", *(f"--{key}={value}" for key, value in TINY.items()))
    found = json.loads(table.splitlines()[-1])
    assert set(found["schedules"]) == {"1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"}
    for name, row in found["schedules"].items():
        assert name in table
        assert row["ratio"] == pytest.approx(row["ours_seconds"] / row["theirs_seconds"])
        assert 0 < row["low"] <= row["high"]
    stages = found["overhead_by_stage"]
    own = [
        ours - awake - plain
        for ours, awake, plain in zip(stages["ours"], stages["awake"], stages["plain"])
    ]
    assert found["overhead_microseconds"] == max(own) > 0
    assert min(stages["awake"]) >= 0
    assert found["torch"]
    assert found["cores"] >= 1


@pytest.mark.parametrize("argument", ["--rows=0", "--repetitions=1", "--colour=red"])
def test_pipeline_benchmark_refuses_nonsense(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([argument])
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.bench
def test_plans_benchmark_puts_what_was_predicted_beside_what_was_measured() -> None:
    sizes = {
        name: TINY[name] for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "rows")
    }
    sizes |= {
        "repetitions": 2,
        "micro-batches": 4,
        "width": 64,
        "inner": 32,
        "positions": 2,
        "batch": 4,
    }
    text = run("pipeline_plans", "--json", *(f"--{key}={value}" for key, value in sizes.items()))
    found = json.loads(text.splitlines()[-1])
    schedules = found["speedup"]["schedules"]
    assert set(schedules) == {"1f1b", "zb-h1", "interleaved"}
    one = found["speedup"]["one"]
    for name, row in schedules.items():
        assert row["reason"] is None, name
        assert name in row["plan"]
        assert row["predicted_speedup"] == pytest.approx(
            one["predicted_seconds"] / row["predicted_seconds"]
        )
        of_prediction = row["speedup"]["median"] / row["predicted_speedup"]
        assert set(row["speedup"]) == set(row["of_prediction"]) == RATIO
        assert row["of_prediction"]["median"] == pytest.approx(of_prediction)
        assert row["met"] == (of_prediction >= 0.95)
        assert row["step_over_prediction"] == pytest.approx(
            row["seconds"] / row["predicted_seconds"]
        )
    for where, name, replicas in (("last", "1→2", "[1, 2]"), ("first", "2→1", "[2, 1]")):
        part = found["uneven"][where]
        plans = part["plans"]
        assert set(plans) == {name, "3 stages", "3 replicas"}
        assert replicas in plans[name]["plan"]
        best = plans[part["best_even"]]
        assert part["over_uneven"] == best["over_uneven"]
        assert part["over_uneven"]["median"] == min(
            row["over_uneven"]["median"] for variant, row in plans.items() if variant != name
        )
        assert part["met"] == (part["over_uneven"]["median"] > 1)
        assert part["predicted"] == (part["predicted_over_uneven"] > 1)
        assert part["weight"] > 0
        assert part["chosen"]


@pytest.mark.parametrize("argument", ["--rows=0", "--light=1", "--colour=red"])
def test_plans_benchmark_refuses_nonsense(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        pipeline_plans.main([argument])
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("heavy_last", [True, False])
def test_the_heavy_block_is_one_block_and_its_passes_make_another_model(heavy_last: bool) -> None:
    def chain(passes: int) -> Chain:
        return Lopsided(
            light=3, width=8, inner=4, positions=2, passes=passes, heavy_last=heavy_last
        ).chain()

    blocks = chain(2).blocks
    assert len(blocks) == 4
    assert isinstance(blocks[-1 if heavy_last else 0].module, Heavy)
    # Or one's profile would be read for the other.
    assert chain(2).fingerprint() != chain(3).fingerprint()


def test_a_failed_step_ends_only_its_own_turns() -> None:
    def fail() -> Step:
        raise WayFailed("out of something")

    runs = by_turns({"fine": lambda: Step(seconds=1.0, loss=2.0, peak_bytes=3), "broken": fail}, 4)
    assert runs["fine"].seconds == [1.0] * 4
    assert runs["broken"].reason == "out of something"
    assert not runs["broken"].losses
    with pytest.raises(WayFailed, match="broken: out of something"):
        check_same_losses(runs)


@pytest.mark.bench
def test_swap_benchmark_puts_its_bars_at_the_top(tmp_path: Path) -> None:
    sizes = {
        "repetitions": 1,
        "layers": 3,
        "hidden": 64,
        "heads": 2,
        "sequence": 128,
        "rows": 16,
        "micro-batches": 4,
    }
    options = [f"--{key}={value}" for key, value in sizes.items()]
    found = json.loads(run("swap", "--json", f"--directory={tmp_path}", *options).splitlines()[-1])
    rows = {(row["mode"], row["fraction"]): row for row in found["rows"]}
    modes = {"plain", "offload", "recompute", "synchronous", "malloc", "loop", "auto"}
    assert {mode for mode, _ in rows} == modes
    assert {fraction for mode, fraction in rows if mode == "offload"} == {
        0.75,
        0.5,
        0.25,
        0.12,
        0.1,
    }
    ran = [row for row in rows.values() if row["reason"] is None]
    assert all(row["losses_equal"] for row in ran)
    for (mode, fraction), row in rows.items():
        if mode != "offload":
            assert row["reason"] is row["budget_bytes"] is row["budget_error"] is None
            continue
        assert row["budget_bytes"] == int(fraction * found["activation_bytes"])
        if row["reason"] is None:
            over = (row["peak_bytes"] - found["static_bytes"]) / row["budget_bytes"] - 1
            assert row["budget_error"] == pytest.approx(over)
            assert found["offload_over_plain"][str(fraction)] == row["over_plain"]
            assert set(found["offload_over_malloc"][str(fraction)]) == RATIO
    assert set(rows["offload", 0.5]["over_plain"]) == RATIO
    against = found["offload_over_recompute"]
    assert set(against) == {
        *RATIO,
        "fraction",
        "offload_peak_bytes",
        "recompute_peak_bytes",
        "at_equal_peak",
    }
    equal = against["at_equal_peak"]
    assert not equal or equal["offload_peak_bytes"] <= equal["recompute_peak_bytes"]
    assert set(found["auto_over_loop"]) == RATIO
    assert (rows["offload", 0.1]["reason"] is None) == ("budget_error" in rows["offload", 0.1])
    assert not list(tmp_path.iterdir())


def test_ten_percent_says_how_many_micro_batches_it_needs() -> None:
    sizes = Sizes(micro_batches=2)
    refused = _offload(sizes, 0.1, 600_000_000)
    assert isinstance(refused, Row)
    assert refused.reason is not None
    needed = int(refused.reason.rpartition("=")[2])
    assert isinstance(_offload(Sizes(micro_batches=needed), 0.1, 600_000_000), Way)
    assert isinstance(_offload(Sizes(micro_batches=needed - 1), 0.1, 600_000_000), Row)


@pytest.mark.slow
def test_host_adam_benchmark_prints_json_last() -> None:
    sizes = {
        "repetitions": 2,
        "layers": 1,
        "hidden": 32,
        "heads": 2,
        "vocabulary": 100,
        "sequence": 16,
        "threads": 1,
    }
    found = json.loads(
        run(
            "host_adam", "--json", *(f"--{key}={value}" for key, value in sizes.items())
        ).splitlines()[-1]
    )
    rows = {row["name"]: row for row in found["rows"]}
    assert {"parallax", "fused", "fused alone", "for-loop"} <= set(rows)
    assert set(rows) | set(found["did_not_run"]) == {
        "parallax",
        "fused",
        "fused alone",
        "for-loop",
        "DeepSpeed",
    }
    assert rows["fused"]["over_fused"]["median"] == 1
    assert found["ratio"] == rows["parallax"]["over_fused"]["median"] > 0
    for row in rows.values():
        assert set(row["over_fused"]) == RATIO
        assert row["seconds_per_1e9"] == pytest.approx(
            min(row["seconds"]) / found["parameters"] * 1e9
        )


def test_resnet_152_has_its_parameters() -> None:
    model = ResNetTask().build(torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 60_192_808


def test_ratios_are_of_neighbours() -> None:
    found = ratios([2.0, 6.0, 8.0], [1.0, 2.0, 4.0])
    assert found["median"] == 2.0
    assert found["fastest"] == 2.0
    assert found["low"] <= found["median"] <= found["high"]
    assert ratios([3.0], [2.0])["median"] == 1.5


@contextlib.contextmanager
def _echo(value: int) -> Iterator[tuple[int, Callable[[int], int]]]:
    yield value, lambda message: value // message


@pytest.mark.slow
def test_a_worker_answers_and_says_why_it_failed() -> None:
    worker = Worker("echo", _echo, 6)
    try:
        assert worker.ready() == 6
        assert worker.ask(2) == 3
        with pytest.raises(WayFailed, match="ZeroDivisionError") as failed:
            worker.ask(0)
        assert "Traceback" in failed.value.__notes__[0]
        with pytest.raises(WayFailed, match="its process ended"):
            worker.ask(2)
    finally:
        worker.close()


@pytest.mark.bench
def test_checkpoint_benchmark_prints_json() -> None:
    found = json.loads(run("checkpoint", "--quick", "--json"))
    assert [row["name"] for row in found["rows"]] == [
        *("parallax", "parallax, waited"),
        *("torch.save", "dcp.save", "dcp.async_save"),
    ]
    assert all(row["bytes_per_second"] > 0 < row["recovery_seconds"] for row in found["rows"])
    assert found["bytes"] > 10**6

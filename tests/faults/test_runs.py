"""Runs from end to end: their files, what they record, how they resume, and ranks that are killed."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from parallax.common.files import cache_directory
from parallax.errors import PlanError
from parallax.model.profiling import measure
from parallax.plan.profile import ModelProfile
from parallax.plan.simulation.calibrate import times
from parallax.run.prepare import PreparedRun
from parallax.run.processes import together
from tests.distributed.pool import Pool
from tests.faults.commands import (
    MODULE,
    NOISE,
    SETTLED,
    TINY,
    TORCHRUN,
    call,
    check_same_weights,
    finish,
    one_line,
    prepared,
    ranks,
    running,
    start,
    started,
    temporary,
    wait_for,
)


def test_train_and_resume(here: Path, called: Callable[..., tuple[int, str, str]]) -> None:
    settings = [*TINY, *SETTLED, "trainer.checkpoint_every=2"]
    code, out, err = called("train", *settings, "name=a", "cluster.devices=2", "trainer.steps=4")
    assert (code, err.strip()) == (0, "")
    assert "results: runs/a" in out
    run = Path("runs/a")
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.yaml",
        "plan.yaml",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "timeline.png",
        "tensorboard",
        "profile.json",
        "plan.inputs.json",
    }
    assert {"events-rank0.jsonl", "events-rank1.jsonl", "events-predicted.jsonl"} <= names
    summary = json.loads((run / "summary.json").read_text())
    for key in (
        "loss_first",
        "loss_last",
        "unigram_entropy",
        "step_seconds_median",
        "predicted_step_seconds",
    ):
        assert summary[key] > 0
    assert summary["steps"] == 4
    assert 0 <= summary["bubble_predicted"] < 1
    assert 0 <= summary["bubble_measured"] < 1
    assert [(rank["stage"], rank["replica"]) for rank in summary["ranks"]] == [(0, 0), (1, 0)]
    for rank in summary["ranks"]:
        assert rank["budget_bytes"] >= rank["predicted_peak_bytes"] > 0
        assert {
            "measured_peak_bytes",
            "offloaded_bytes_per_step",
            "stall_seconds_per_step",
        } <= rank.keys()
    assert [path.name for path in here.iterdir()] == ["runs"]
    assert temporary() == []

    # Counted where the process starts.
    more = ["trainer.steps=6", "debug=trace", "debug.steps=[2,2]"]
    code, out, err = called("train", *settings, "name=a", "cluster.devices=2", *more)
    assert (code, err.strip()) == (0, "")
    assert "runs/a resumes with its own settings, but " in out
    assert "trainer.steps: 4 -> 6" in out
    assert "continuing after step 4 from runs/a/checkpoints/step-00000004" in out
    for rank in range(2):
        assert steps_traced(run / f"trace-rank{rank}.json") == {5}
    steps = [
        json.loads(line)["step"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.faults
def test_torchrun_trains_the_same(here: Path, called: Callable[..., tuple[int, str, str]]) -> None:
    settings = [*TINY, *SETTLED, "trainer.steps=4", "logger=none"]
    code, _, err = called("train", *settings, "name=a", "cluster.devices=2")
    assert (code, err.strip()) == (0, "")
    code, out, err = call("-m", "parallax", "train", *settings, "name=b", launcher=TORCHRUN)
    assert code == 0
    assert not [line for line in err.splitlines() if line.startswith(NOISE)], err
    assert out.count("results: runs/b") == 1
    check_same_weights(Path("runs/a"), Path("runs/b"))


@pytest.mark.faults
def test_a_wrong_prediction_is_planned_again_and_corrected(
    called: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cached profile is fifty times too low; a run notices, stops, and resumes under another plan."""
    own = tmp_path / "cache" / "parallax"
    own.mkdir(parents=True)
    for file in cache_directory().glob("machine-*.json"):  # which is measured again if it never was
        shutil.copy(file, own)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "SECONDS_PER_BLOCK", 0.05)
    small = ["model.hidden=16", "model.sequence=16"]
    settings = [*TINY, *small, "cluster.devices=1", "plan=single", "trainer.microbatch=2"]
    code, _, err = called("plan", *settings)
    assert (code, err.strip()) == (0, "")
    (cached,) = own.glob("profile-*.json")
    cached.write_text(times(ModelProfile.load(cached), 0.02).to_json())

    training = ["trainer.steps=16", "trainer.checkpoint_every=8", "trainer.eval_every=0", "name=a"]
    code, out, err = called("train", *settings, *training, "plan.replan=auto")
    assert (code, err.strip()) == (0, "")
    assert out.count("another plan continues from here") == 1
    assert "planning again: a step takes" in out
    assert "continuing after step 8" in out
    run = Path("runs/a")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["ended"]) == (16, "steps")
    steps = [
        json.loads(line)["step"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]
    assert steps == list(range(1, 17))

    code, out, err = called("calibrate", "a", "--json")
    assert (code, err.strip()) == (0, "")
    found = json.loads(out)
    assert abs(found["second_error"]) <= max(0.05, abs(found["first_error"]))
    assert found["profile"] == str(cached)
    corrected = ModelProfile.load(cached)
    assert corrected == replace(
        ModelProfile.load(run / "profile-calibrated.json"), model=corrected.model
    )
    assert temporary() == []


def steps_traced(file: Path) -> set[int]:
    events = json.loads(file.read_text())["traceEvents"]
    return {event["args"]["step"] for event in events if "step" in event.get("args", {})}


@pytest.mark.parametrize("record", ["trace", "profiler", "memory"])
@pytest.mark.thorough  # what is recorded is asserted in the unit tests; a resumed run above traces a step
def test_every_rank_records_the_requested_steps(
    called: Callable[..., tuple[int, str, str]], record: str
) -> None:
    run = prepared(
        *TINY,
        f"debug={record}",
        "debug.steps=[2,3]",
        "trainer.steps=4",
        "trainer.checkpoint_every=0",
    )
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 0
    assert "parallax: " not in err  # torch.profiler has remarks of its own
    for rank in range(2):
        events = json.loads((run / f"{record}-rank{rank}.json").read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        if record == "trace":
            assert steps_traced(run / f"trace-rank{rank}.json") == {1, 2}
            assert {"forward 0", "backward 0", "update"} <= names
        else:
            assert {"step 2", "step 3", "aten::addmm"} <= names
            assert not {"step 1", "step 4"} & names
        if record == "memory":
            assert "[memory]" in names
            assert len((run / f"memory-rank{rank}.csv").read_text().splitlines()) == 5
    assert temporary() == []


ENDLESS = [
    *TINY,
    "trainer.steps=1000000",
    "trainer.checkpoint_every=1",
    "trainer.eval_every=0",
]


@pytest.mark.thorough  # test_step_failures.py has a rank that crashes, and one that is killed under torchrun
def test_a_rank_that_is_killed_ends_the_run(here: Path) -> None:
    process = started(prepared(*ENDLESS))
    assert len(ranks(process)) == 2
    ranks(process)[1].kill()
    code, _, err = finish(process)
    assert code == 1
    assert "was killed by SIGKILL" in one_line(err)
    assert running(here) == []
    assert temporary() == []


@pytest.mark.thorough  # test_requests_to_end.py sends it to all, as a terminal does, and SIGTERM to the launcher
def test_an_interrupted_run_resumes(here: Path) -> None:
    run = prepared(*ENDLESS)
    process = started(run)
    process.kill()
    finish(process)
    wait_for(lambda: not running(here), "the ranks of a launcher that was killed")
    process = started(run)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130
    assert "`parallax train name=run` continues" in one_line(err)
    assert "continuing after step" in out
    assert running(here) == []
    assert temporary() == []


@pytest.mark.thorough  # test_left_over.py kills a launcher too, and waits for the end of its ranks
def test_the_ranks_of_a_launcher_that_was_killed_end(here: Path) -> None:
    process = started(prepared(*ENDLESS))
    process.kill()
    finish(process)
    wait_for(lambda: not running(here), "the ranks of a launcher that was killed")


DIFFERENT = "rank 1 read a different run from rank 0: trainer.steps: 4 != 5; microbatch: 2 -> 1"


def different_runs() -> list[Path]:
    first = prepared(*TINY, name="first")
    second = prepared(
        *TINY, "trainer.steps=5", name="second", plan=lambda plan: replace(plan, microbatch=1)
    )
    second.joinpath("config.yaml").write_text(
        second.joinpath("config.yaml").read_text().replace("name: second", "name: first")
    )
    return [first.absolute(), second.absolute()]


def compared(runs: list[Path]) -> str:
    """Return the error of a rank that has read one of the ``runs``."""
    with pytest.raises(PlanError) as reported:
        together.compare(PreparedRun.read(runs[dist.get_rank()]))
    return str(reported.value)


def test_ranks_that_read_different_runs_get_the_keys(here: Path, pool: Pool) -> None:
    reported = pool.run(compared, 2, different_runs())
    assert reported[0] == reported[1]
    assert DIFFERENT in reported[0]


@pytest.mark.thorough  # that ranks end in one line is asserted of an environment that is none
def test_ranks_that_read_different_runs(here: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_ERROR_FILE": str(here / "a/b/c"),
    }
    (here / "a").mkdir()
    processes = [
        start(
            [*MODULE, "train", "--run-dir", str(run)], RANK=str(rank), LOCAL_RANK=str(rank), **world
        )
        for rank, run in enumerate(different_runs())
    ]
    ended = [finish(process) for process in processes]
    assert [code for code, _, _ in ended] == [2, 2]
    line = one_line("".join(err for _, _, err in ended))
    assert DIFFERENT in line

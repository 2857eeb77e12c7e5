"""A rank that dies, hangs or fails: all ranks start again from the last checkpoint, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from parallax.common.events import read_events
from parallax.train.repeats import last_step
from tests.distributed.pool import ROOT
from tests.faults.commands import (
    MODULE,
    check_same_weights,
    finish,
    fork_server,
    one_line,
    prepared,
    ranks,
    running,
    start,
    started,
    temporary,
    wait_for,
)
from tests.faults.failing import fail_at
from tests.faults.killing import kill_at
from tests.faults.test_requests_to_end import stepping
from tests.results import read_metrics

Called = Callable[..., tuple[int, str, str]]
STEPS = 9
KILLS = (
    (1, 0, "init"),
    (0, 3, "forward"),
    (1, 0, "load"),
    (1, 5, "backward"),
    (0, 5, "save"),
    (1, 8, "update"),
)
"""Of steps from 0; a checkpoint follows every second."""
AGAIN = [
    ("init", "the beginning: there is no checkpoint yet"),
    ("forward", "step-00000002"),
    ("load", "step-00000002"),
    ("backward", "step-00000004"),
    ("save", "step-00000004"),
    ("update", "step-00000008"),
]


def plain(called: Called, *settings: str) -> Path:
    """The same run, undisturbed."""
    run = prepared(*settings, f"trainer.steps={STEPS}", name="plain")
    code, _, err = called("train", "--run-dir", str(run))
    assert (code, err) == (0, "")
    return run


def check_as_if_nothing_had_been(run: Path, plain: Path) -> None:
    """Equal weights, and each step is reported once."""
    check_same_weights(run, plain)
    mine, others = (
        [(record["step"], record["loss"]) for record in records if "loss" in record]
        for records in (read_metrics(each / "metrics.jsonl") for each in (run, plain))
    )
    assert mine == others
    for rank in range(2):
        steps = [span.step for span in read_events(run / f"events-rank{rank}.jsonl")]
        assert sorted(set(steps)) == list(range(STEPS))
        assert {steps.count(step) for step in range(STEPS)} == {steps.count(0)}


@pytest.mark.faults
def test_a_rank_is_killed_wherever_it_is(here: Path, called: Called) -> None:
    """The run resumes after a kill in any action; one line each time names the rank, its action and the checkpoint."""
    settings = kill_at(*KILLS)
    reference = plain(called, *kill_at())
    run = prepared(
        *settings, f"trainer.steps={STEPS}", f"trainer.max_restarts={len(KILLS)}", name="killed"
    )
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    lines = err.splitlines()
    for left, (line, kill, (action, where)) in enumerate(
        zip(lines[::-1], KILLS[::-1], AGAIN[::-1], strict=True)
    ):
        assert line.startswith(f"parallax: rank {kill[0]}")
        assert "was killed by SIGKILL" in line
        assert line.endswith(f"; starting again from {where} ({left} of 6 restarts left)"), action
    check_as_if_nothing_had_been(run, reference)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ended"] == "steps"
    assert summary["restarts"] == len(KILLS)
    assert summary["lost_steps"] == sum((0, 1, 0, 1, 2, 0))
    assert running(here) == []
    assert temporary() == []


@pytest.mark.faults
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (2, 1)])
def test_local_steps_are_repeated_after_kills(
    here: Path, called: Called, fragments: int, delay: int
) -> None:
    """Within a round replicas have different weights, of which a checkpoint has none: it waits for the round's end."""
    settings = [
        "replicas=diloco",
        "replicas.sync_every=4",
        f"replicas.fragments={fragments}",
        f"replicas.fragment_delay={delay}",
        "trainer.checkpoint_every=3",
        f"trainer.steps={STEPS}",
        "trainer.max_restarts=3",
    ]
    kills = (1, 2, "forward"), (0, 5, "backward"), (1, 7, "update")
    runs = []
    for name, these in (("plain", ()), ("killed", kills)):
        run = prepared(
            *kill_at(*these),
            *settings,
            name=name,
            replicas=(2,),
            plan=lambda plan: replace(
                plan, local_steps=4, fragments=fragments, fragment_delay=delay
            ),
        )
        code, _, err = called("train", "--run-dir", str(run))
        assert code == 0, err
        assert [line.split("starting again from ")[1][:13] for line in err.splitlines()] == [
            "the beginning",
            "step-00000004",
            "step-00000004",
        ][: len(these)]
        runs.append(run)
    check_as_if_nothing_had_been(*runs[::-1])
    assert sorted(path.name for path in (runs[1] / "checkpoints").glob("step-*")) == [
        "step-00000008",
        "step-00000009",
    ]


LONG = ["trainer.steps=1000000", "trainer.max_restarts=2"]
ALL_GONE_SECONDS = 20.0  # usually one; a busy machine is slower, and torch would wait for minutes


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named_and_the_run_resumes(
    here: Path, called: Called, rank: int
) -> None:
    """Stopped by somebody, it heeds nothing; the watch names it, its stage and its action."""
    settings = ["trainer.max_restarts=1", "trainer.watchdog_seconds=3"]
    reference = plain(called, *kill_at())
    run = prepared(
        *kill_at((rank, 3, "forward"), how="is_stopped"),
        *settings,
        f"trainer.steps={STEPS}",
        name="stopped",
    )
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 0, err
    assert re.match(
        rf"parallax: rank {rank} \(stage {rank}, replica 0\) has not answered for \d s \(stopped, or its host is gone\)"
        r", last seen in forward of micro-batch 0, step 3 .*; the limit is 3 s .*; starting again from "
        r"step-00000002 \(0 of 1 restarts left\)$",
        one_line(err),
    ), err
    check_as_if_nothing_had_been(run, reference)
    assert running(here) == []


@pytest.mark.faults
@pytest.mark.parametrize(
    ("how", "times", "last"),
    [
        ("raises", 1, r"failed in forward of micro-batch 0, step 2: ValueError: boom.*"),
        (
            "has_no_disk",
            2,
            r"failed in .*: OSError: .*; the same failure came 2 times at the same step, .*",
        ),
        (
            "crashes",
            2,
            r"was killed by SIGSEGV, .*; the same failure came 2 times at the same step, .*",
        ),
        (
            "is_killed",
            3,
            r"was killed by SIGKILL .*; the same failure came 3 times at the same step, .*",
        ),
    ],
)
def test_what_comes_again_is_not_tried_for_ever(
    here: Path, called: Called, how: str, times: int, last: str
) -> None:
    """A mistake in a program is not even tried once more."""
    run = prepared(
        *fail_at(1, 2, "forward", how),
        "trainer.steps=1000",
        "trainer.max_restarts=9",
        "trainer.eval_every=0",
        "data.max_bytes=64KiB",
    )
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 1
    lines = [line for line in err.splitlines() if line.startswith("parallax: ")]
    assert len(lines) == times
    for left, line in zip((8, 7), lines[:-1]):
        assert line.endswith(
            f"; starting again from the beginning: there is no checkpoint yet ({left} of 9 restarts left)"
        )
    assert re.fullmatch(rf"parallax: rank 1 \(stage 1, replica 0\) {last}", lines[-1]), lines[-1]
    assert running(here) == []
    assert temporary() == []


@pytest.mark.faults
def test_no_restart_is_left(here: Path, called: Called) -> None:
    run = prepared(
        *kill_at((0, 3, "forward"), (1, 5, "forward")),
        "trainer.steps=1000",
        "trainer.max_restarts=1",
    )
    code, _, err = called("train", "--run-dir", str(run))
    assert code == 1
    first, second = err.splitlines()
    assert first.endswith("; starting again from step-00000002 (0 of 1 restarts left)")
    assert second.endswith(
        "; no restart is left (trainer.max_restarts=1); run again to continue from the last checkpoint"
    )


@pytest.mark.faults
def test_wrong_input_is_not_tried_again(here: Path, called: Called) -> None:
    run = prepared(*kill_at(), "trainer.steps=2", "trainer.max_restarts=3")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("killing:build", "killing:missing"))
    code, _, err = called(
        "train", "--run-dir", str(run), f"model.target={kill_at.__module__}:missing"
    )
    assert code == 2
    assert "missing" in one_line(err)
    assert "starting again" not in err


@pytest.mark.faults
def test_the_fork_server_is_killed(here: Path) -> None:
    """The ranks end with the server, another server starts, and the run resumes."""
    run = prepared(*kill_at(), *LONG)
    process = started(run)
    server, before = fork_server(process), ranks(process)
    server.kill()
    wait_for(lambda: not any(map(is_alive, before)), "the end of the ranks")
    seen = steps_taken(run)
    wait_for(lambda: steps_taken(run) > seen, "new steps")
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 0
    first, _ = err.splitlines()
    assert re.fullmatch(
        r"parallax: the process that starts the ranks was killed by SIGKILL \(no memory left\?\); starting again from "
        r"step-\d+ \(1 of 2 restarts left\)",
        first,
    ), first
    assert running(here) == []
    assert temporary() == []


@pytest.mark.faults
def test_the_launcher_is_killed(here: Path) -> None:
    """Nothing that it started is left: neither ranks nor what they are forked from. A stopped rank goes, too."""
    run = prepared(*kill_at(), *LONG)
    process = stepping(run)
    everything = psutil.Process(process.pid).children(recursive=True)
    assert len(everything) == 3
    ranks(process)[0].suspend()
    begun = time.monotonic()
    process.kill()
    process.communicate()
    wait_for(
        lambda: not running(here) and not any(map(is_alive, everything)), "the end of all processes"
    )
    print(f"all processes gone after {time.monotonic() - begun:.2f} s")
    assert time.monotonic() - begun < ALL_GONE_SECONDS


@pytest.mark.faults
def test_a_request_to_end_is_served_after_a_restart(here: Path) -> None:
    run = prepared(*kill_at((1, 3, "forward")), *LONG)
    process = start([*MODULE, "train", "--run-dir", str(run)])
    wait_for(lambda: steps_taken(run) > 6 or process.poll() is not None, "steps")
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 0
    first, last = err.splitlines()
    assert "starting again from step-00000002" in first
    assert "which is saved; `parallax train name=run` continues" in last
    assert running(here) == []
    assert temporary() == []


def torchrun(ranks: int, port: int, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"),
        *("--max-restarts=2", "--monitor-interval=0.1"),
        *(each.format(port=port) for each in more),
        *("-m", "parallax", "train"),
    ]


LINES = {
    "standalone": ["--standalone"],
    "static": ["--master-port={port}"],
    "local.sh": [],
}


@pytest.mark.faults
@pytest.mark.parametrize("line", LINES)
def test_under_torchrun_restarts_are_its_own(
    here: Path, called: Called, line: str, port: int
) -> None:
    """Whatever the settings say; they are counted all the same, and nothing is lost. torchrun's store outlives its
    ranks, unless a variable asks for another, which it does not heed where it has a fixed port."""
    reference = plain(called, *kill_at())
    run = prepared(*kill_at((1, 3, "forward"), (0, 5, "update")), f"trainer.steps={STEPS}")
    script = [str(ROOT / "launch" / "local.sh")]
    command = script if line == "local.sh" else torchrun(2, port, *LINES[line])
    variables = {"PYTHON": sys.executable, "PROCESSES": "2", "RESTARTS": "2"}
    code, _, err = finish(start([*command, "--run-dir", str(run)], **variables))
    assert code == 0, err
    output = [text for text in err.splitlines() if text.startswith("parallax: ")]
    assert [
        re.match(r"parallax: rank (\d) .* ended without a report", text)[1] for text in output
    ] == [
        "1",
        "0",
    ]
    check_as_if_nothing_had_been(run, reference)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["restarts"], summary["lost_steps"]) == (2, 2)
    assert running(here) == []
    assert not [path for path in temporary() if not path.name.startswith("torchelastic_")]


@pytest.mark.faults
def test_two_torchruns_count_restarts_each_for_itself(
    here: Path, called: Called, port: int
) -> None:
    """As on two hosts: the one whose rank was killed counts a restart, the other may not."""
    reference = plain(called, *kill_at())
    run = prepared(*kill_at((1, 3, "forward")), f"trainer.steps={STEPS}")
    meeting = [
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}"),
        *("--rdzv-id=counts", "--local-addr=127.0.0.1"),
    ]
    both = [
        start([*torchrun(1, port, *meeting, f"--rdzv-conf=is_host={head}"), "--run-dir", str(run)])
        for head in (1, 0)
    ]
    for code, _, err in map(finish, both):
        assert code == 0, err
    check_as_if_nothing_had_been(run, reference)
    assert running(here) == []


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def steps_taken(run: Path) -> int:
    return last_step(run / "metrics.jsonl")

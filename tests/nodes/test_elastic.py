"""Elastic runs over two hosts: one is lost, returns, or is partitioned; the others continue, and no step is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import ROOT, Host, TwoHosts
from tests.nodes.test_two_hosts import end_messages, output, ranks, wait_for

pytestmark = pytest.mark.nodes

SETTINGS = (
    "name=both",
    "data=custom",
    "data.target=tests.nodes.slow_rows:build",
    "model.layers=2",
    "model.hidden=64",
    "model.heads=2",
    "model.sequence=32",
    "cluster.device_memory=auto",
    "trainer.steps=100000",
    "trainer.eval_every=0",
    "trainer.checkpoint_every=5",
    "schedule.final=1",
    "logger=none",
)
STEP = "+data.kwargs.seconds=0.1"
SOON = 60.0


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHON", sys.executable)


@pytest.fixture
def line(hosts: TwoHosts, tmp_path: Path) -> tuple[str, ...]:
    """What is typed on each: checkpoints go where both see them. Two stages are an option's, not typed."""
    option = tmp_path / "options" / "experiment" / "stages.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("# @package _global_\nplan: {stages: 2}\n")
    message = ("--config-dir", str(tmp_path / "options"), "experiment=stages")
    return (*message, *SETTINGS, STEP, f"checkpoint.directory={tmp_path / 'shared'}")


def begin(hosts: TwoHosts, line: tuple[str, ...]) -> None:
    hosts.start(1, line, nodes="1:2")
    reaches(hosts, 7)


def reaches(hosts: TwoHosts, step: int) -> None:
    wait_for(lambda: step in losses(hosts.a), hosts, SOON)


def losses(host: Host) -> dict[int, float]:
    """By step, in the order in which they were written."""
    path = host.folder / "runs/both/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {each["step"]: each["loss"] for each in found if "loss" in each}


def restarts(host: Host) -> int:
    return output(host).count("continuing after step")


def stages(host: Host) -> list[int]:
    """How many ranks each stage has."""
    placed = json.loads((host.folder / "runs/both/placement.json").read_text())
    return [len(stage["ranks"]) for stage in placed["stages"]]


def ends_well(hosts: TwoHosts, folder: Path) -> None:
    """All hosts end on request. The trained weights equal those of one process, and no step is missing."""
    os.kill(ranks(hosts.a)[0], signal.SIGUSR1)
    wait_for(lambda: not ranks(hosts.a) and not ranks(hosts.b), hosts, SOON)
    found = losses(hosts.a)
    assert sorted(found) == list(range(1, max(found) + 1))
    folder.mkdir()
    settings = (*SETTINGS, f"trainer.steps={max(found)}", "trainer.checkpoint_every=0")
    command = [sys.executable, "-m", "parallax", "train", *settings]
    subprocess.run(
        [*command, "cluster.devices=1", "plan=single"],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=SOON,
    )
    text = (folder / "runs/both/metrics.jsonl").read_text().splitlines()
    expected = {e["step"]: e["loss"] for e in map(json.loads, text) if "loss" in e}
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-4)


def test_a_lost_host_is_done_without_and_comes_back(
    hosts: TwoHosts, line: tuple[str, ...], tmp_path: Path
) -> None:
    begin(hosts, line)
    assert stages(hosts.a) == [1, 1]
    hosts.b.kill()
    wait_for(lambda: restarts(hosts.a) == 1, hosts, SOON)
    assert stages(hosts.a) == [1]
    hosts.start(1, line, nodes="1:2", on=[hosts.b])
    wait_for(lambda: restarts(hosts.a) == 2, hosts, SOON)
    reaches(hosts, max(losses(hosts.a)) + 3)
    assert sum(stages(hosts.a)) == 2
    ends_well(hosts, tmp_path / "alone")


def test_the_run_continues_without_a_host_that_ends_on_request(
    hosts: TwoHosts, line: tuple[str, ...], tmp_path: Path
) -> None:
    """As when a batch system reclaims a host: all save, its ranks end, and the other host resumes from there."""
    begin(hosts, line)
    requested = hosts.started[-1]
    requested.send_signal(signal.SIGTERM)
    wait_for(lambda: restarts(hosts.a) == 1, hosts, SOON)
    assert stages(hosts.a) == [1]
    assert not ranks(hosts.b)
    (saved,) = re.findall(r"stopped by SIGTERM after step (\d+) of", output(hosts.a))
    assert f"continuing after step {saved} from" in output(hosts.a)
    reaches(hosts, max(losses(hosts.a)) + 3)
    ends_well(hosts, tmp_path / "alone")


def test_a_killed_rank_restarts_all(hosts: TwoHosts, line: tuple[str, ...], tmp_path: Path) -> None:
    begin(hosts, line)
    os.kill(ranks(hosts.b)[0], signal.SIGKILL)
    wait_for(lambda: restarts(hosts.a) == 1, hosts, SOON)
    assert stages(hosts.a) == [1, 1]
    reaches(hosts, max(losses(hosts.a)) + 3)
    ends_well(hosts, tmp_path / "alone")


def test_after_a_partition_one_side_continues(
    hosts: TwoHosts, line: tuple[str, ...], tmp_path: Path
) -> None:
    begin(hosts, line)
    stopped = ranks(hosts.b)[0]
    os.kill(stopped, signal.SIGSTOP)  # the half that does not notice: it wakes up much later
    hosts.a.set_link(up=False)
    wait_for(lambda: restarts(hosts.a) == 1, hosts, SOON)
    os.kill(stopped, signal.SIGCONT)
    wait_for(lambda: not ranks(hosts.b), hosts, 20.0)
    assert "continuing after" not in output(hosts.b)
    assert any("cannot be reached" in message for message in end_messages(hosts.b)), output(hosts.b)
    hosts.a.set_link(up=True)
    wait_for(lambda: restarts(hosts.a) == 2, hosts, SOON)
    reaches(hosts, max(losses(hosts.a)) + 3)
    ends_well(hosts, tmp_path / "alone")


def test_too_few_devices_end_the_run_with_what_is_missing(
    hosts: TwoHosts, line: tuple[str, ...]
) -> None:
    hosts.start(1, (*line, "plan.stages=2"), nodes="1:2")
    reaches(hosts, 7)
    hosts.b.kill()
    process = hosts.started[0]
    assert process.wait(SOON) == 2
    assert "plan.stages=2 with 1 device(s)" in end_messages(hosts.a)[-1]


def test_an_unfit_host_is_refused_and_the_others_continue(
    hosts: TwoHosts, line: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins with an older package; refused, it does not come again of itself."""
    hosts.start(1, line, nodes="1:2", on=[hosts.a])
    reaches(hosts, 7)
    shutil.copytree(ROOT / "parallax", tmp_path / "old/parallax")
    package = tmp_path / "old/parallax/__init__.py"
    package.write_text(re.sub('__version__ = ".*"', '__version__ = "0.0.9"', package.read_text()))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'old'}{os.pathsep}{ROOT}")
    (refused,) = hosts.start(1, line, nodes="1:2", on=[hosts.b])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert refused.wait(SOON) == 2, output(hosts.b)
    (message,) = end_messages(hosts.b)
    assert "on node-b has parallax 0.0.9, and rank " in message
    assert (
        "install the same versions on all hosts; the other hosts continue without this one"
        in message
    )
    reached = max(losses(hosts.a))
    reaches(hosts, reached + 3)
    assert stages(hosts.a) == [1]
    ends_well(hosts, tmp_path / "alone")
    summary = json.loads((hosts.a.folder / "runs/both/summary.json").read_text())
    assert ["parallax 0.0.9" in each for each in summary["refused_hosts"]] == [True]
    assert restarts(hosts.a) == 1  # for the host that came and was refused

"""Runs over two hosts, which share no folder and talk over a link of 1 Gbit/s."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.hosts import ROOT, Host, TwoHosts

pytestmark = pytest.mark.nodes

SMALL = (
    "model.layers=2",
    "model.hidden=64",
    "model.heads=2",
    "model.sequence=32",
    "cluster.device_memory=auto",
    "trainer.eval_batches=1",
)
ENDS_SECONDS = 240.0


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [found["loss"] for found in map(json.loads, lines) if "loss" in found]


def alone(folder: Path, *settings: str) -> list[float]:
    """What one process makes of the same."""
    folder.mkdir()
    command = [sys.executable, "-m", "parallax", "train", "name=alone", "cluster.devices=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "plan=single", *settings],
        cwd=folder,
        check=True,
        env=environment,
        capture_output=True,
        timeout=ENDS_SECONDS,
    )
    return losses(folder, "alone")


def output(host: Host) -> str:
    path = host.folder / "out.txt"
    return path.read_text(errors="replace") if path.is_file() else ""


def end_messages(host: Host) -> list[str]:
    """Return the lines in which Parallax reports its end."""
    return [line for line in output(host).splitlines() if line.startswith("parallax:")]


def train(hosts: TwoHosts, processes: int, *settings: str) -> None:
    """Train to the end on both hosts."""
    started = hosts.start(processes, settings)
    codes = [process.wait(ENDS_SECONDS) for process in started]
    assert codes == [0, 0], "\n".join(map(output, hosts.hosts))


def wait_for(found: Callable[[], bool], hosts: TwoHosts, seconds: float = ENDS_SECONDS) -> float:
    """Seconds until it was so."""
    begun = time.monotonic()
    while not found():
        if time.monotonic() - begun > seconds:
            raise AssertionError("\n".join(map(output, hosts.hosts)))
        time.sleep(0.05)
    return time.monotonic() - begun


def ranks(host: Host) -> list[int]:
    """Its processes that are ranks, not torchrun's or a shell's."""
    found = []
    for process in host.processes():
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            b"parallax" in command
            and b"torch.distributed.run" not in command
            and b"train" in command
        ):
            found.append(process)
    return found


@pytest.mark.parametrize(("processes", "replicas"), [(1, 1), (2, 2)])
def test_two_hosts_train_to_the_losses_of_one_process(
    hosts: TwoHosts, tmp_path: Path, processes: int, replicas: int
) -> None:
    settings = (*SMALL, "trainer.steps=6", "trainer.checkpoint_every=3")
    plan = ("plan.stages=2", f"plan.replicas={replicas}")
    train(hosts, processes, "name=both", *plan, *settings)
    expected = alone(tmp_path / "alone", *settings)
    assert losses(hosts.a.folder, "both") == pytest.approx(expected, rel=1e-5)
    first, second = (host.folder / "runs" / "both" for host in hosts.hosts)
    placed = json.loads((first / "placement.json").read_text())
    if processes == 1:
        nodes = [rank["device"] for stage in placed["stages"] for rank in stage["ranks"]]
        assert nodes == ["node-a:0", "node-b:0"]
        assert set(placed["messages"].values()) == {"gloo"}
    # Each keeps what its ranks wrote, and what the summary and the timeline need has come to the first.
    kept = [{path.name for path in each.rglob("*.safetensors")} for each in (first, second)]
    assert kept[0] | kept[1] >= {"stage-00.safetensors", "stage-01.safetensors"}
    assert not kept[0] & kept[1]
    assert (first / "summary.json").is_file()
    assert not (second / "summary.json").exists()
    assert len(list(first.glob("events-rank*.jsonl"))) == 2 * processes


def test_a_run_resumes_with_ranks_in_another_order(hosts: TwoHosts, tmp_path: Path) -> None:
    settings = (*SMALL, "plan.stages=2", "trainer.checkpoint_every=3")
    train(hosts, 1, "name=both", *settings, "trainer.steps=3")
    # What each has, the other one needs.
    one, two = (host.folder / "runs" for host in hosts.hosts)
    one.rename(tmp_path / "other")
    two.rename(one)
    (tmp_path / "other").rename(two)
    (one / "both" / "metrics.jsonl").write_bytes((two / "both" / "metrics.jsonl").read_bytes())
    train(hosts, 1, "name=both", "trainer.steps=6")
    expected = alone(tmp_path / "alone", *SMALL, "trainer.steps=6")
    assert losses(hosts.a.folder, "both") == pytest.approx(expected, rel=1e-5)


def test_a_node_without_its_checkpoints_is_named(hosts: TwoHosts) -> None:
    settings = (*SMALL, "plan.stages=2", "trainer.steps=2")
    train(hosts, 1, "name=both", *settings)
    for path in (hosts.b.folder / "runs" / "both" / "checkpoints").rglob("*"):
        if path.is_file():
            path.unlink()
    codes = [process.wait(ENDS_SECONDS) for process in hosts.start(1, ("name=both",))]
    assert 0 not in codes
    lines = [*end_messages(hosts.a), *end_messages(hosts.b)]
    assert any(
        "step-00000002 is not whole" in line and "that node-b saved" in line for line in lines
    ), lines


ENDLESS = (*SMALL, "plan.stages=2", "trainer.steps=100000", "trainer.checkpoint_every=20")


def running(hosts: TwoHosts) -> list[subprocess.Popen[bytes]]:
    """A run that has saved something."""
    started = hosts.start(1, ("name=both", *ENDLESS))
    wait_for(lambda: "step 20: checkpoint" in output(hosts.a), hosts)
    return started


def goes_on(hosts: TwoHosts) -> None:
    """The same line continues, a little further than the last checkpoint."""
    last = sorted((hosts.a.folder / "runs/both/checkpoints").glob("step-*"))[-1].name
    steps = int(last.removeprefix("step-")) + 2
    train(hosts, 1, "name=both", f"trainer.steps={steps}")
    assert "continuing after step" in output(hosts.a)


def test_a_partition_ends_all_ranks_and_is_reported_on_both_hosts(hosts: TwoHosts) -> None:
    running(hosts)
    hosts.a.set_link(up=False)
    seconds = wait_for(lambda: not ranks(hosts.a) and not ranks(hosts.b), hosts, 30.0)
    assert seconds < 15.0
    for host, other, rank in ((hosts.a, "node-b", 1), (hosts.b, "node-a", 0)):
        wait_for(lambda host=host: bool(end_messages(host)), hosts, 5.0)
        (line,) = end_messages(host)
        assert f"rank {rank} (stage {rank}, replica 0) on {other} cannot be reached" in line
        assert "last seen" in line
    hosts.stop()
    goes_on(hosts)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_lost_host_ends_all_ranks(hosts: TwoHosts, lost: str) -> None:
    running(hosts)
    gone, left = (hosts.a, hosts.b) if lost == "a" else (hosts.b, hosts.a)
    gone.kill()
    assert wait_for(lambda: not ranks(left), hosts, 30.0) < 2.0
    wait_for(lambda: bool(end_messages(left)), hosts, 5.0)
    (line,) = end_messages(left)
    rank = 0 if lost == "a" else 1
    assert f"rank {rank} (stage {rank}, replica 0) on {gone.name} ended without a report" in line
    hosts.stop()
    goes_on(hosts)

"""Commands as processes of their own, and what they leave behind: what the tests of this folder share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from parallax import config
from parallax.common import trust
from parallax.plan.plan import Plan
from parallax.run.job import build_chain
from parallax.runtime.checkpoint import list_checkpoints
from tests.distributed.pool import ROOT
from tests.plans import make_plan

TINY = ["experiment=tiny", "plan=two_stages", "data.max_bytes=64KiB", "trainer.global_batch=4"]
LONG = [*TINY, "trainer.checkpoint_every=0", "trainer.eval_every=0", "logger=none"]
ENDLESS = [*LONG, "trainer.steps=1000000", "schedule.final=1"]
SETTLED = [
    "trainer.microbatch=2",
    "plan.stages=2",
    "plan.schedule=1f1b",
    "plan.activations=keep",
    "schedule.final=1",
]
MODULE = [sys.executable, "-m", "parallax"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
DONE_SECONDS = 120
ON_ONE_RANK_AND_ON_TWO = pytest.mark.parametrize(
    "replicas", [(1,), pytest.param((1, 1), marks=pytest.mark.thorough)], ids=str
)
"""Of tests of what a launcher does, whatever the number of its ranks."""
NOISE = ("Warning", "W1", "E1", "[W", "[E", "Traceback")


def temporary() -> list[Path]:
    """What processes started here have left in their temporary folder."""
    return [
        path
        for path in (Path.cwd().parent / "tmp").iterdir()
        if not path.name.startswith("torchinductor")
    ]


def running(folder: Path) -> list[psutil.Process]:
    """Living processes that work in ``folder``, but this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                Path(process.cwd()) == folder
                and process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def start(command: Sequence[str], **added: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path.cwd()}",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(Path.cwd().parent / "tmp"),
    }
    environment |= added
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=DONE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err


def call(*arguments: str, launcher: Sequence[str] = MODULE) -> tuple[int, str, str]:
    return finish(start([*launcher, *arguments]))


def one_line(err: str) -> str:
    """Return the only line on stderr."""
    (line,) = err.splitlines()
    assert line.startswith("parallax: ")
    assert line.isprintable()
    return line


def wait_for(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DONE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.02)


def prepared(
    *overrides: str,
    name: str = "run",
    replicas: tuple[int, ...] = (1, 1),
    plan: Callable[[Plan], Plan] = lambda plan: plan,
) -> Path:
    """A run directory as ``prepare`` writes it, and remembers what it names, without measuring anything. Where nothing
    else is set, a failure ends the run."""
    settings = config.compose(["trainer.max_restarts=0", *overrides, f"name={name}"])
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config.dump(settings))
    made = make_plan(
        build_chain(settings), replicas=replicas, global_batch=settings.trainer.global_batch
    )
    plan(made).save(folder / "plan.yaml")
    trust.remember(folder, trust.class_paths(config.dump(settings)))
    return folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    last = list_checkpoints(run / "checkpoints")[-1]
    return {
        name: tensor
        for part in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(part).items()
    }


def declare(path: Path, name: str, kind: str) -> None:
    """Change what the header of a file says of a tensor of two bytes a number: another number format, with as many
    numbers as go into its bytes."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    bits = {"F4": 4, "F6": 6, "F8": 8}[kind[:2]]
    header[name] |= {"dtype": kind, "shape": [header[name]["shape"][0] * 16 // bits]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def check_same_weights(run: Path, other: Path) -> None:
    """Bit for bit."""
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), f"{name} of {run} is not that of {other}"


DGX = ["cluster=dgx_a100", "cluster.devices=4", "trainer.global_batch=16", "experiment=tiny"]
GPT2 = ["model=transformer", "model.layers=4", "model.hidden=128", "model.heads=2"]


def ranks(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children(recursive=True)
    return [process for process in children if rank_of(process) is not None]


def rank_of(process: psutil.Process) -> int | None:
    """Return the rank of a process; None if it is no rank, or has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        forked = re.match(r"parallax rank (\d+) of", " ".join(process.cmdline()))
        rank = forked[1] if forked else process.environ().get("RANK", "")
        return int(rank) if rank.isdecimal() else None
    return None


def fork_server(launcher: subprocess.Popen[str]) -> psutil.Process:
    """The process from which its ranks are forked."""
    (found,) = psutil.Process(launcher.pid).children()
    return found


def stepping(run: Path, *command: str, **added: str) -> subprocess.Popen[str]:
    """A run that has taken two more steps."""
    metrics = run / "metrics.jsonl"

    def lines() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    before = lines()
    process = start([*(command or MODULE), "train", "--run-dir", str(run)], **added)
    wait_for(lambda: lines() > before + 1 or process.poll() is not None, "steps")
    assert process.poll() is None, process.communicate()
    return process


def started(run: Path) -> subprocess.Popen[str]:
    """A run that has saved a checkpoint beyond those that are there."""

    def newest() -> int:
        found = list_checkpoints(run / "checkpoints")
        return int(found[-1].name[5:]) if found else 0

    before = newest()
    process = start([*MODULE, "train", "--run-dir", str(run)])
    wait_for(lambda: newest() > before or process.poll() is not None, "a checkpoint")
    assert process.poll() is None, process.communicate()
    return process

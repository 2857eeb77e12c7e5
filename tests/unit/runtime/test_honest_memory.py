"""The claim of the whole project, on a limit that the kernel enforces: what does not fit trains with swap."""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from parallax.machine.host import return_freed_memory
from parallax.model.describe import describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from tests.plans import make_plan

MIB = 2**20
STEPS = 2
Steps = tuple[list[float], int]  # losses, and the most offloaded activations
Train = Callable[[str, Path], Steps]


def steps(gpt: GPTConfig, rows: int, scratch: Path, **plan: Any) -> Steps:
    """A few steps under a plan made by hand; all micro-batches are in flight at once."""
    chain = describe(gpt.build)
    plan = {"schedule": "gpipe", "global_batch": rows, "microbatch": rows // 4, **plan}
    engine = Engine.build(chain, make_plan(chain, **plan), loss=GPT.loss, scratch=scratch)
    tokens = torch.randint(
        0, 256, (rows, gpt.sequence + 1), generator=torch.Generator().manual_seed(1)
    )
    batch = TensorRows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    try:
        results = [engine.step(batch) for _ in range(STEPS)]
        return [result.loss for result in results], max(
            result.swap.tier_high_water for result in results
        )
    finally:
        engine.close()


def activations(where: str, scratch: Path) -> Steps:
    """Many rows of a small model, with its activations on the device or offloaded."""
    directive = {"device": "keep", "offloaded": "offload"}[where]
    gpt = GPTConfig(layers=6, hidden=64, heads=4, sequence=128, vocabulary=256)
    return steps(gpt, 64, scratch, directive=directive, swap_limit=40 * MIB)


def everything(where: str, scratch: Path, layers: int) -> Steps:
    """A large model, with weights, gradients, optimizer states and activations on the device or offloaded."""
    offloaded: dict[str, Any] = {
        "directive": "offload",
        "optimizer_offload": 1.0,
        "parameter_offload": 1.0,
    }
    gpt = GPTConfig(layers=layers, hidden=512, heads=8, sequence=128, vocabulary=256, tied=False)
    return steps(
        gpt, 4, scratch, **(offloaded if where == "offloaded" else {}), swap_limit=24 * MIB
    )


@dataclass(frozen=True)
class Job:
    """What is trained in a process that may have ``allowed`` bytes beyond what torch itself takes; ``states`` are its
    weights, gradients and two moments in fp32, and it needs ``fold`` times all that the process may have, torch
    included."""

    train: Train
    states: int
    fold: float
    allowed: int


def of_layers(layers: int, fold: float) -> Job:
    train = functools.partial(everything, layers=layers)
    return Job(
        train, 4 * 4 * layers * 12 * 512**2, fold, 108 * MIB
    )  # 95 MiB were seen when offloaded


JOBS = {
    "activations": Job(activations, 0, 0.3, 160 * MIB),  # 92 MiB were seen when offloaded
    "everything of 8 layers": of_layers(8, 1.4),
    "everything of 12 layers": of_layers(12, 2),
    "everything of 24 layers": of_layers(24, 4),
}


def limited(name: str, scratch: str) -> None:
    """In a process of its own: on the device until the kernel says no; live on, and offload under the same limit."""
    return_freed_memory()
    # 8 MiB each otherwise, which count, although next to nothing of them is used.
    threading.stack_size(MIB)
    job = JOBS[name]
    # Loads libraries.
    steps(GPTConfig(layers=1, hidden=64, heads=4, sequence=128, vocabulary=256), 64, Path(scratch))
    status = Path("/proc/self/status").read_text().split()
    limit = int(status[status.index("VmData:") + 1]) * 1024 + job.allowed
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    failure = ""
    try:
        job.train("device", Path(scratch))
    except RuntimeError as error:
        failure = str(error)
    losses, activations = job.train("offloaded", Path(scratch))
    needed = job.states + activations
    print(json.dumps({"failure": failure, "losses": losses, "limit": limit, "needed": needed}))


@pytest.mark.parametrize(
    "name",
    [
        # Everything offloads activations as well.
        pytest.param("activations", marks=pytest.mark.thorough),
        # As weights that do not fit, and a loop that does not, in tests/unit/swap: all of it at one time.
        pytest.param("everything of 8 layers", marks=pytest.mark.thorough),
        # With more layers it is more than fits, by so many times.
        pytest.param("everything of 12 layers", marks=pytest.mark.thorough),
        pytest.param("everything of 24 layers", marks=pytest.mark.thorough),
    ],
)
def test_what_does_not_fit_trains_offloaded(name: str, scratch: Path) -> None:
    program = f"from tests.unit.runtime.test_honest_memory import limited; limited({name!r}, {str(scratch)!r})"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        unlimited, _ = JOBS[name].train("device", scratch)
        output, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert "DefaultCPUAllocator: can't allocate memory" in found["failure"]
    assert found["losses"] == unlimited
    assert found["needed"] >= JOBS[name].fold * found["limit"]

"""The claim of the whole project, on a limit that the kernel enforces: what does not fit trains with swap."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from parallax.host import return_freed_memory
from parallax.model.describe import describe
from parallax.model.gpt import GPT, GPTConfig
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from tests.plans import make_plan

MIB = 2**20
ROWS, STEPS = 64, 3
ALLOWED = 160 * MIB  # beyond what torch itself takes; keep was seen to need 215 MiB, offload 92 MiB
SWAP_LIMIT = 40 * MIB


def train(directive: str, scratch: Path, layers: int = 6) -> list[float]:
    """The losses of a few steps under a plan made by hand; all four micro-batches are in flight at once."""
    chain = describe(GPTConfig(layers=layers, hidden=64, heads=4, sequence=128, vocabulary=256).build)
    plan = make_plan(
        chain, schedule="gpipe", directive=directive, global_batch=ROWS, microbatch=ROWS // 4, swap_limit=SWAP_LIMIT
    )
    engine = Engine.build(chain, plan, loss=GPT.loss, scratch=scratch)
    tokens = torch.randint(0, 256, (ROWS, 129), generator=torch.Generator().manual_seed(1))
    batch = TensorRows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    try:
        return [engine.step(batch).loss for _ in range(STEPS)]
    finally:
        engine.close()


def limited(scratch: str) -> None:
    """In a process of its own: keep until the kernel says no, live on, and offload under the same limit."""
    return_freed_memory()
    train("keep", Path(scratch), layers=1)  # what torch loads on first use is not the model's
    status = Path("/proc/self/status").read_text().split()
    limit = int(status[status.index("VmData:") + 1]) * 1024 + ALLOWED
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    failure = ""
    try:
        train("keep", Path(scratch))
    except RuntimeError as error:
        failure = str(error)
    print(json.dumps({"failure": failure, "losses": train("offload", Path(scratch))}))


def test_what_does_not_fit_trains_with_swap(scratch: Path) -> None:
    command = [sys.executable, "-c", f"from tests.unit.test_honest_memory import limited; limited({str(scratch)!r})"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        unlimited = train("keep", scratch)
        output, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert "DefaultCPUAllocator: can't allocate memory" in found["failure"]
    assert found["losses"] == unlimited

"""A rank's measured memory is its stage's, without torch's lazy imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEP = """
import sys
import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint
from parallax.model.precision import PrecisionConfig
from parallax.plan.plan import StagePlan
from parallax.runtime.meters.memory import device_memory

for directive in ("keep", "recompute"):
    stage = StagePlan(start=0, stop=1, replicas=1, directives=(directive,))
    device_memory(torch.device("cpu"), PrecisionConfig(), [stage])
    known = set(sys.modules)
    layer, x = torch.nn.Linear(4, 4), torch.zeros(2, 4)
    out = checkpoint(layer, x, use_reentrant=False) if directive == "recompute" else layer(x)
    torch.autograd.backward([get_gradient_edge(out)], [torch.ones_like(out)])
    print(len(set(sys.modules) - known), "torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_the_first_backward_imports_next_to_nothing_nor_does_the_first_recomputation() -> None:
    """How many modules each imports, and whether torch's compiler is there; in one process, whose imports take most of
    the time."""
    found = subprocess.run(
        [sys.executable, "-c", STEP], capture_output=True, text=True, check=True, timeout=60
    )
    (kept, compiler), (recomputed, _) = map(str.split, found.stdout.splitlines())
    assert int(kept) < 20
    assert compiler == "False", "a rank that recomputes nothing does without it"
    assert int(recomputed) < 20


REDUCER = """
import sys, tempfile
import torch
import torch.distributed as dist
from torch import nn
from parallax.model.precision import PrecisionConfig
from parallax.runtime.meters.memory import device_memory
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.runtime.replicas.reducer import ReplicaSync

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    device_memory(torch.device("cpu"), PrecisionConfig(), [], reduces=True)
    known = set(sys.modules)
    weight = nn.Parameter(torch.zeros(3))
    ReplicaSync({"weight": weight}, dist.group.WORLD, torch.device("cpu"), ReplicasConfig(), 4 * 2**20)
    print(len(set(sys.modules) - known))
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_nor_does_the_first_reducer() -> None:
    """800 modules and 33 MiB, which were counted as what a replica holds: more than its plan."""
    found = subprocess.run(
        [sys.executable, "-c", REDUCER], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(found.stdout) < 20

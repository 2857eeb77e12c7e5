"""What a rank is said to hold is its stage's, and not what torch imports when it is first used."""

from __future__ import annotations

import subprocess
import sys

STEP = """
import sys
import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint
from parallax.model.precision import PrecisionConfig
from parallax.plan.plan import StagePlan
from parallax.runtime.meters.memory import device_memory

recomputes = sys.argv[1] == "recomputes"
stage = StagePlan(start=0, stop=1, replicas=1, directives=("recompute" if recomputes else "keep",))
device_memory(torch.device("cpu"), PrecisionConfig(), [stage])
known = set(sys.modules)
layer, x = torch.nn.Linear(4, 4), torch.zeros(2, 4)
out = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
torch.autograd.backward([get_gradient_edge(out)], [torch.ones_like(out)])
print(len(set(sys.modules) - known))
print("torch._dynamo" in sys.modules)
"""


def imported(what: str) -> tuple[int, bool]:
    """How many modules the first backward of a stage imports, and whether torch's compiler is there."""
    found = subprocess.run(
        [sys.executable, "-c", STEP, what], capture_output=True, text=True, check=True, timeout=60
    )
    count, compiler = found.stdout.split()
    return int(count), compiler == "True"


def test_the_first_backward_imports_next_to_nothing() -> None:
    count, compiler = imported("keeps")
    assert count < 20
    assert not compiler, "a rank that recomputes nothing does without it"


def test_nor_does_the_first_recomputation() -> None:
    count, _ = imported("recomputes")
    assert count < 20

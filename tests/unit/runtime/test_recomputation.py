"""A block that is recomputed has the gradients that it has when it keeps what it saves, whatever its operators write.

PyTorch's own databases of operators and modules run in a process of their own: see tests/unit/swap/test_operators.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallax.model.describe import describe
from parallax.model.precision import PrecisionConfig
from parallax.plan.plan import Directive, StagePlan
from parallax.runtime.stage import MicroBatchContext, Stage
from tests.alone import alone
from tests.unit.swap import test_operators as databases

WIDTH = 64


class Ends(nn.Module):
    """A block that ends with ``last``."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(x))


def of_a_group(x: Tensor) -> Tensor:
    """Its noise is a tensor of the caller's own."""
    noise = torch.empty_like(x)
    return torch._C._nn.rrelu_with_noise(x, noise, 0.1, 0.9, True)


LAST: dict[str, Callable[[], Any]] = {
    "RReLU": nn.RReLU,
    "RReLU in place": lambda: nn.RReLU(inplace=True),
    "function": lambda: lambda x: F.rrelu(x, training=True),
    "caller's noise": lambda: of_a_group,
    "RReLU and a view": lambda: lambda x: F.rrelu(x, training=True).view(-1, WIDTH).t().t(),
    "BatchNorm": lambda: nn.BatchNorm1d(WIDTH),
    "quantisation": lambda: torch.ao.quantization.FusedMovingAvgObsFakeQuantize(),
    "dropout": lambda: nn.AlphaDropout(),
}


def gradients(make: Callable[[], nn.Module], directive: Directive, steps: int = 3) -> list[Tensor]:
    """Of weights and inputs after each of some micro-batches, the second pair of them in flight together."""
    torch.manual_seed(0)
    chain = describe(lambda: nn.Sequential(make(), nn.Linear(WIDTH, WIDTH)))
    count = len(chain.blocks)
    plan = StagePlan(start=0, stop=count, replicas=1, directives=(directive,) * count)
    stage = Stage(chain, {0: plan}, torch.device("cpu"), PrecisionConfig())
    found, pending = [], []
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=generator).requires_grad_()
        where = MicroBatchContext(step, 0, 8, 8)
        (output,) = stage.run(0, (x,), where=where, micro=step, swap=None)
        pending.append((x, output))
        torch.full((64, WIDTH), float("nan"))  # what is freed and not written does not look alike
        if step == 1:
            continue
        for x, output in pending:
            stage.zero_grad()
            output.square().sum().backward()
            found += [x.grad, *(p.grad.clone() for p in stage.parameters())]
        pending = []
    return found


@pytest.mark.parametrize("last", LAST.values(), ids=LAST)
def test_operators_that_write_into_what_they_saved(last: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept, again = (
            gradients(lambda: Ends(last()), each) for each in (Directive.KEEP, Directive.RECOMPUTE)
        )
    for a, b in zip(kept, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# ---- torch's databases


class Calls(nn.Module):
    """A block that is ``call``, whose first results it keeps."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call
        self.results: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        found = databases.tensors(self.call())
        self.results = self.results or found
        return x


def derivatives(call: Callable[[], Any], inputs: list[Tensor], directive: Directive) -> Any:
    """The bits of the gradients of ``inputs``, or the error's class and message."""
    plan = StagePlan(start=0, stop=1, replicas=1, directives=(directive,))
    stage = Stage(
        describe(lambda: nn.Sequential(nn.Identity())),
        {0: plan},
        torch.device("cpu"),
        PrecisionConfig(),
    )
    block = Calls(call)
    stage._by_place = (block,)
    try:
        stage.run(
            0,
            (torch.zeros(1, requires_grad=True),),
            where=MicroBatchContext(0, 0, 1, 1),
            micro=0,
            swap=None,
        )
        sources = [each for each in inputs if each.requires_grad]
        return [databases.bits(g) for g in databases.derived(block.results, sources)]
    except Exception as error:
        return type(error).__name__, str(error)


def differing(kind: str, start: int, step: int, most: int | None) -> tuple[int, list[str]]:
    """How many are equal, and those that are not, though two runs that keep what they save are."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)  # so that such memory is NaN
    equal, others = 0, []
    for name, _, call, inputs in getattr(databases, kind)(start, step, most):
        kept, again = (
            derivatives(call, inputs, each) for each in (Directive.KEEP, Directive.RECOMPUTE)
        )
        if kept == again:
            equal += 1
        elif kept == derivatives(call, inputs, Directive.KEEP):
            others.append(f"{name}: {databases.shown(kept)}, recomputed {databases.shown(again)}")
    return equal, others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "step"), [("operators", 2 * databases.OPERATORS), ("modules", 2 * databases.MODULES)]
)
def test_a_sample_of_torch(kind: str, step: int) -> None:
    pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
    equal, others = alone(differing, kind, 1, step, 2, seconds=570)
    assert others == []
    assert equal > 10


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(databases.PARTS))
@pytest.mark.parametrize("kind", ["operators", "modules"])
def test_all_of_torch(kind: str, part: int) -> None:
    pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
    assert alone(differing, kind, part, databases.PARTS, None, seconds=3000)[1] == []

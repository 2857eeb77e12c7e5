"""The museum: each past bug is one short test, with its story above it.

Here are those that are tests of nothing but the bug. Many others stand beside their subject, where they say more.
"""

from __future__ import annotations

import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import SwapError
from parallax.machine.device import CpuCopies
from parallax.model.describe import describe
from parallax.model.split_backward import WeightGradStore
from parallax.plan.config import PlanConfig
from parallax.plan.search.search import search
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.stores.slots import SlotMap
from parallax.swap.stores.store import DiskStore
from parallax.train.monitor import LoggerConfig, load_loggers
from tests.plans import make_plan
from tests.unit.plan.searched import check, layers, two_kinds
from tests.unit.plan_fakes import block, cluster, profile

MIB = 2**20
PAGE = 4096
WIDTH = 6


# A question of two rows on three devices ended in math.ceil(inf): every micro-batch was too small for the only shape
# that there is, three replicas. One of them now goes without rows.
def test_fewer_rows_than_replicas() -> None:
    plan, _ = search(layers(1), cluster(3), PlanConfig(), global_batch=2)
    assert [stage.replicas for stage in plan.stages] == [3]


# Profiles give bytes as numbers with a fraction. A swap limit of 100.5 bytes was truncated to 100, and the simulator
# refused the plan that the search had chosen: BudgetExceeded.
def test_bytes_that_are_no_whole_number_fit_their_swap_limit() -> None:
    model = profile([block(moved=100.5), block(moved=33.3)])
    plan, _ = search(model, cluster(1), PlanConfig(activations="offload"), global_batch=1)
    assert plan.stages[0].swap_limit_bytes >= 101


# Gaps between tensors are a share of the limit, rounded up. The limit that was taken out of the budget was a byte over,
# and refused, or a byte short, and then no memory was free to prefetch.
def test_a_swap_limit_fills_its_budget_to_the_byte() -> None:
    model = profile([block(moved=1000)])
    for memory in range(2990, 3020):
        machines = cluster(1, memory, gap_share=0.07)
        plan, _ = search(
            model,
            machines,
            PlanConfig(activations="offload", schedule="gpipe"),
            global_batch=3,
            microbatch=1,
        )
        check(plan, machines)
        assert (
            memory - plan.prediction.ranks[0].peak_bytes <= 1
            or plan.stages[0].swap_limit_bytes == 3000
        )


# A plan for two kinds of devices was called exact, although an order such as fast, slow, fast is never tried.
def test_kinds_of_devices_are_not_mixed_and_the_plan_says_so() -> None:
    plan, _ = search(layers(5), two_kinds(1, 2), PlanConfig(), global_batch=8)
    assert not plan.exact
    assert plan.bound_seconds <= plan.prediction.step_seconds


# The first rank alone exceeded its budget in the first step: it loads TensorBoard, whose tables counted as memory of
# its stage. They are loaded before a stage is watched.
def test_curves_are_loaded_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    load_loggers(LoggerConfig())
    assert list(tmp_path.iterdir()) == []
    assert "tensorboard.summary" in sys.modules
    load_loggers(LoggerConfig(to=[]))


# Each size of the swap file once had to wait for a place of its own size, so that ten sequence lengths needed ten times
# the space.
def test_new_sizes_fit_into_a_tier_that_grew_to_its_end() -> None:
    slots = SlotMap(100 * PAGE, "the tier")
    for pages in range(1, 30):
        taken = [slots.allocate(pages * PAGE) for _ in range(100 // pages)]
        for slot in taken[1:]:
            slots.release(slot)
        slots.release(taken[0])


# swap.directory=/tmp, as root, closed /tmp to everyone: the folder was made private, whosever it was.
def test_a_shared_directory_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "somebody's").touch()
    with pytest.raises(
        SwapError,
        match=r"holds other files \(somebody's\): set swap.directory to a folder of its own",
    ):
        DiskStore(tmp_path, MIB, CpuCopies(), threads=2)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777


# What a split linear layer returned was a view, and autograd forbids in-place changes of a view that a custom function
# has made: nn.ReLU(inplace=True) after it stopped the step.
def test_what_a_split_layer_returns_may_be_changed_in_place() -> None:
    layer, weight_grads = nn.Linear(4, 4), WeightGradStore()
    with weight_grads.splitting():
        outputs = torch.relu_(layer(torch.randn(2, 3, 4, requires_grad=True)))
    outputs.sum().backward()
    weight_grads.finish()
    assert layer.weight.grad is not None


# The gradient of a channels_last input comes out channels_last, whatever the weight is. Fused optimizers walk along
# memory, so the wrong numbers were added to the weight.
def test_gradients_lie_in_memory_as_their_weights_do() -> None:
    layer, weight_grads = nn.Conv2d(3, 4, 3), WeightGradStore()
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    with weight_grads.splitting():
        outputs = layer(x)
    outputs.sum().backward()
    weight_grads.finish()
    assert layer.weight.grad is not None
    assert layer.weight.grad.stride() == layer.weight.stride()


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def changing() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))


def changing_within() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)), nn.Linear(WIDTH, WIDTH)
    )


def gradients(factory: Callable[[], nn.Module], **options: Any) -> float:
    chain, (x, targets) = describe(factory), (torch.ones(8, 3, WIDTH), torch.zeros(8, 3, WIDTH))
    engine = Engine.build(chain, make_plan(chain, **options), loss=squares)
    try:
        return engine.gradients(TensorRows(x, targets))
    finally:
        engine.close()


# A block that is recomputed reads its input once more, which its first run had changed in place. It runs on a copy now.
def test_a_block_that_changes_its_input_may_be_recomputed() -> None:
    assert gradients(changing, directive="recompute") == gradients(changing)


# The same change in place, of what a linear layer returns under a split backward.
def test_what_a_linear_layer_returns_may_be_changed_under_a_split_backward() -> None:
    assert gradients(changing_within, schedule="zb-h1") == pytest.approx(gradients(changing_within))

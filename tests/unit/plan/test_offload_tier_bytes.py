"""A plan limits the offload-tier bytes of each stage: they suffice for every stage, and no rank uses more."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallax.errors import PlanError
from parallax.machine.device import CpuCopies
from parallax.model.describe import Chain, describe
from parallax.model.profiling.blocks import BlockSizes, tie_costs
from parallax.model.recurrent import flattens_weights
from parallax.plan.cost.offload_tier import with_offload_bytes
from parallax.plan.cost.states import Sizes
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.runtime.optim.builder import OptimizerBuilder
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.runtime.optim.optimizer import StageOptimizer
from parallax.runtime.replicas.replicate import SharedStates
from parallax.runtime.stage import offloadable
from parallax.swap.parameters.offloaded import ResidentParameters
from parallax.swap.stores.store import Store
from tests.plans import make_plan
from tests.unit.plan_fakes import block, profile

CPU, WIDTH = torch.device("cpu"), 24
DTYPES = {"fp32": (torch.float32, 2.0, 0.0), "bf16": (torch.bfloat16, 4.0, 2.0)}


def uneven() -> nn.Module:
    """Blocks of very different sizes."""
    sizes = [WIDTH, 300, 7, 512, 64, 64, WIDTH]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def partly_frozen(kept: str = "bias") -> nn.Module:
    """Of which only some parameters are trained: all biases, one layer, or nothing in the last half."""
    model = uneven()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            {"bias": "bias" in name, "one": name.startswith("3."), "first": name < "3"}[kept]
        )
    return model


def make_chain(precision: str = "fp32", frozen: str = "") -> Chain:
    return describe(
        partial(partly_frozen, frozen) if frozen else uneven, dtype=DTYPES[precision][0]
    )


def costs(chain: Chain, precision: str = "fp32") -> ModelProfile:
    """What the planner knows of the parameters of ``chain``."""
    blocks = []
    for _ in chain.blocks:
        sizes = BlockSizes.of(chain, len(blocks))
        blocks.append(
            block(
                parameter_bytes=sizes.parameter_bytes,
                frozen_bytes=sizes.frozen_bytes,
                largest_bytes=sizes.largest_bytes,
            )
        )
    _, states, masters = DTYPES[precision]
    found = profile(
        blocks,
        optimizer_bytes=states,
        master_bytes=masters,
        ties=tuple(tie_costs(chain)),
        frozen_ties=tuple(tie_costs(chain, trained=False)),
    )
    return replace(found, fingerprint=chain.fingerprint())


def given(chain: Chain, precision: str = "fp32", **options: Any) -> Plan:
    """A plan with the bytes that the planner gives it."""
    plan = make_plan(chain, global_batch=4, **options)
    stages = with_offload_bytes(costs(chain, precision), plan.stages, plan.pipeline_ranks)
    return replace(plan, stages=stages)


def train(chain: Chain, plan: Plan, scratch: Path) -> list[float]:
    engine = Engine.build(chain, plan, loss=loss, scratch=scratch)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(chain.dtype)
    try:
        return [engine.step(TensorRows(x, x)).loss for _ in range(3)]
    finally:
        engine.close()


SHARES = [(0.0, 0.0), (0.25, 0.0), (0.6, 0.0), (1.0, 0.0), (1.0, 0.3), (1.0, 0.8), (1.0, 1.0)]


@pytest.mark.sampled
@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("states", "parameters"), SHARES)
def test_the_stores_hold_what_the_plan_gives_them(
    scratch: Path, states: float, parameters: float, precision: str, tier: str
) -> None:
    chain = make_chain(precision)
    shares = {"optimizer_offload": states, "parameter_offload": parameters}
    plan = given(chain, precision, tier=tier, **shares)
    assert bool(plan.stages[0].state_bytes) == (states > 0)
    assert bool(plan.stages[0].streamed_bytes) == (parameters > 0)
    kept = train(chain, make_plan(chain, global_batch=4), scratch)
    assert train(chain, plan, scratch) == kept


@pytest.mark.sampled
@pytest.mark.parametrize("frozen", ["bias", "one", "first"])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("states", "parameters"), SHARES)
def test_frozen_parameters_have_only_their_own_bytes_in_the_tier(
    scratch: Path, states: float, parameters: float, precision: str, frozen: str
) -> None:
    chain, whole = make_chain(precision, frozen), make_chain(precision)
    shares = {"optimizer_offload": states, "parameter_offload": parameters}
    plan, full = given(chain, precision, **shares), given(whole, precision, **shares)
    for key in ("state_bytes", "streamed_bytes"):
        mine, theirs = getattr(plan.stages[0], key), getattr(full.stages[0], key)
        assert mine < theirs or mine == theirs == 0
    kept = train(chain, make_plan(chain, global_batch=4), scratch)
    assert train(chain, plan, scratch) == kept


@pytest.mark.parametrize(
    ("key", "share", "message"),
    [
        ("state_bytes", 0.0, "the optimizer's states need"),
        ("streamed_bytes", 1.0, "offloaded parameters need"),
    ],
)
@pytest.mark.parametrize("left", [0.0, 0.7])
def test_a_plan_that_gives_less_is_refused(
    scratch: Path, key: str, share: float, message: str, left: float
) -> None:
    chain = make_chain()
    plan = given(chain, optimizer_offload=1.0, parameter_offload=share)
    least = int(left * getattr(plan.stages[0], key))
    less = replace(plan, stages=(replace(plan.stages[0], **{key: least}),))
    with pytest.raises(PlanError, match=f"blocks 0..5: {message} .* gives them .*: plan again"):
        train(chain, less, scratch)


def test_a_plan_of_another_optimizer_is_refused(scratch: Path) -> None:
    chain = make_chain()
    plan = given(chain, optimizer_offload=1.0)
    # One state, not two.
    half = replace(plan.stages[0], state_bytes=plan.stages[0].state_bytes // 2)
    lighter = replace(plan, stages=(half,))
    sgd = SGDConfig()
    Engine.build(chain, lighter, loss=loss, optimizer=sgd, scratch=scratch).close()
    with pytest.raises(PlanError, match="for this model, optimizer and precision"):
        Engine.build(chain, lighter, loss=loss, scratch=scratch)


def test_files_from_before_load_and_run_where_nothing_is_offloaded(scratch: Path) -> None:
    chain = make_chain()
    for share in (0.0, 0.5):
        data = given(chain, optimizer_offload=share).to_dict()
        for stage in data["stages"]:
            del stage["state_bytes"], stage["streamed_bytes"]
        old = Plan.from_dict(data)
        assert old.stages[0].state_bytes == 0
        if not share:
            train(chain, old, scratch)
            continue
        with pytest.raises(PlanError, match=r"gives them 0 B .*: plan again"):
            train(chain, old, scratch)


@pytest.mark.sampled
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("seed", range(20))
def test_replicas_take_no_more_than_their_part(seed: int, precision: str) -> None:
    draw = random.Random(seed)
    widths = [draw.choice([1, 3, 8, 50, 200]) for _ in range(draw.randint(2, 9))]
    chain = describe(
        lambda: nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)]),
        dtype=DTYPES[precision][0],
    )
    replicas, share = draw.randint(1, 4), draw.choice([0.1, 0.5, 0.9, 1.0])
    (stage,) = given(chain, precision, replicas=(replicas,), optimizer_offload=share).stages
    parameters = [
        nn.Parameter(torch.zeros(p.shape, dtype=chain.dtype))
        for described in chain.blocks
        for p in described.module.parameters()
    ]
    for replica in range(replicas):
        needs: list[int] = []

        def note(needed: int, places: int, needs: list[int] = needs) -> Store | None:
            needs.append(needed)
            return None

        def share_out(partition: Any, replica: int = replica) -> SharedStates:
            return SharedStates(None, replica, replicas, partition)  # type: ignore[arg-type]

        named = {str(index): parameter for index, parameter in enumerate(parameters)}
        StageOptimizer(
            named,
            OptimizerBuilder.over(AdamWConfig(), named),
            CPU,
            offload=share,
            always_offloaded=(),
            copies=CpuCopies(),
            open_store=note,
            share=share_out if replicas > 1 else None,
            streamed=ResidentParameters(),
        ).close()
        assert all(needed <= stage.state_bytes for needed in needs)


class Tied(nn.Module):
    """The first weight is the last, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.last = nn.Linear(WIDTH, 40)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)))
        return out


class Recurrent(nn.Module):
    """Its weights are one buffer on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, 40, batch_first=True)
        self.down = nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.cells(x)[0])
        return out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("frozen", [False, True])
def test_plan_and_stage_offload_the_same_recurrent_weights(device: str, frozen: bool) -> None:
    chain = describe(
        lambda: nn.Sequential(nn.Linear(8, WIDTH), Recurrent().requires_grad_(not frozen)),
        blocks=["0", "1"],
    )
    flat = flattens_weights(torch.device(device))
    assert flat == (device == "cuda")
    kinds = {"ties": True, "frozen_ties": False}
    known = {k: tuple(tie_costs(chain, trained=t, flat=flat)) for k, t in kinds.items()}
    sizes = Sizes.of(replace(costs(chain), **known), 0, 2)
    found = [
        offloadable(chain, index, block.module, torch.device(device))
        for index, block in enumerate(chain.blocks)
    ]
    every = [p for block in found for p in block]
    assert sizes.offloadable == sum(p.nbytes for p in every)
    assert sizes.offloadable_trained == sum(p.nbytes for p in every if p.requires_grad)
    assert sizes.offloadable_block == max(sum(p.nbytes for p in block) for block in found)
    assert len(every) == (4 if flat else 8)


def test_states_stepped_in_the_tier_because_of_another_stage_are_counted() -> None:
    chain = describe(Tied, blocks=["first", "middle", "last"])
    plan = make_plan(chain, replicas=(1, 1), boundaries=[1])
    stages_changed = (replace(plan.stages[0], optimizer_offload=1.0), plan.stages[1])
    first, second = with_offload_bytes(costs(chain), stages_changed, 2)
    tied = WIDTH * 40 * 4 * 2
    assert (first.state_bytes, second.state_bytes) == (tied + 40 * 4 * 2, tied)
    alone = with_offload_bytes(costs(chain), plan.stages, 2)
    assert [stage.state_bytes for stage in alone] == [0, 0]

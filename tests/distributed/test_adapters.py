"""Adapters over a base that is not trained: equal to plain peft, and checkpoints that hold them alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from parallax.model.describe import Chain
from parallax.model.factory.adapters import adapted, save_adapter
from parallax.model.profiling.count import count
from parallax.plan.analytic.efficiency import price
from parallax.plan.analytic.hardware import device_kind
from parallax.plan.cluster import Link
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Plan
from parallax.plan.search.search import search
from parallax.runtime.checkpoint import CheckpointReader, checkpoint_name
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.distributed.test_checkpoint import loading, training
from tests.distributed.test_engine import (
    OPTIMIZER,
    SCHEDULE,
    STEPS,
    Case,
    Outcome,
    compare,
    gpt,
    half_frozen,
    plain_blocks,
)
from tests.plans import described
from tests.unit.plan_fakes import cluster

LINK = Link(bytes_per_second=10**10)
OFFLOADED = {"optimizer_offload": 1.0, "parameter_offload": 1.0}
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["qkv", "up", "linear"]}


@dataclass(frozen=True)
class OverBase(Case):
    """A base that is made again from ``seed``, and what is trained of it."""

    seed: int = 3
    plan: Plan | None = None

    def chain(self) -> Chain:
        return described(self.factory, seed=self.seed, dtype=self.dtype, base=f"seed {self.seed}")

    def engine(self, folder: str | Path) -> Engine:
        if self.plan is None:
            return super().engine(folder)
        return Engine.build(
            self.chain(),
            self.plan,
            loss=self.loss,
            steps=STEPS,
            optimizer=self.optimizer,
            schedule=self.schedule,
            precision=self.precision(),
            swap=SwapConfig(minimum_bytes=1),
            scratch=Path(folder) / "swap",
        )


FROZEN = OverBase(half_frozen, sizes=(8, 3, 7, 2))


def tensors_in(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (((1, 2), {}), ((2, 1), {})),
        (((1,), OFFLOADED), ((1, 1), {})),
        (((1, 1), {}), ((1, 1), {**OFFLOADED, "parameter_offload": 0.5})),
        (((2,), {"shard": True}), ((1,), OFFLOADED)),
    ],
    ids=str,
)
def test_a_checkpoint_holds_trained_parameters_and_resumes_over_the_base(
    pool: Pool, tmp_path: Path, before: Any, after: Any
) -> None:
    first, second = (FROZEN.under(replicas, **more) for replicas, more in (before, after))
    whole = pool.run(training, second.world, second, tmp_path / "whole", 0, 4, None)
    pool.run(training, first.world, first, tmp_path, 0, 2, None)
    chain = FROZEN.chain()
    trained = {name for name, p in chain.model.named_parameters() if p.requires_grad}
    held = tensors_in(tmp_path / checkpoint_name(2))
    assert {name.removeprefix("model/") for name in held if name.startswith("model/")} == trained
    assert not any(name.partition("/")[2] in chain.frozen for name in held)
    index = json.loads((tmp_path / checkpoint_name(2) / "checkpoint.json").read_text())
    assert set(index["marks"]) == chain.frozen
    assert index["base"] == "seed 3"
    resumed = pool.run(training, second.world, second, tmp_path, 2, 4, 2)
    expected = Outcome(
        whole[0].losses[2:], whole[0].norms[2:], {n: w for o in whole for n, w in o.weights.items()}
    )
    compare(resumed, expected, 1e-12)


@pytest.mark.slow
def test_another_base_is_refused_before_anything_is_changed(pool: Pool, tmp_path: Path) -> None:
    case = FROZEN.under((1, 1))
    pool.run(training, 2, case, tmp_path, 0, 1, None)
    other = OverBase(half_frozen, sizes=(8, 3, 7, 2), seed=4).under((1, 1))
    for message, changed, _ in pool.run(loading, 2, other, tmp_path / checkpoint_name(1)):
        assert "was trained on another base (seed 3), which it does not hold; seed 4" in message
        assert "\n" not in message
        assert not changed
    narrow = OverBase(half_frozen, sizes=(8, 3, 7, 2), dtype=torch.float32).under((1, 1))
    for message, changed, _ in pool.run(loading, 2, narrow, tmp_path / checkpoint_name(1)):
        assert "on a base in torch.float64, which it does not hold, and here" in message
        assert not changed
    same_base = pool.run(loading, 2, case, tmp_path / checkpoint_name(1))
    assert [message for message, _, _ in same_base] == ["", ""]


# ---- peft -------------------------------------------------------------------------------------------


def base(**sizes: int) -> nn.Module:
    return gpt(tied=False, **sizes)()


def lora(**sizes: int) -> nn.Module:
    return adapted(base(**sizes), LORA, "")


def train(case: OverBase, folder: Path) -> Outcome:
    engine = case.engine(folder)
    results = [engine.step(batch) for batch in case.batches()]
    weights = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    gradients = set(engine.gradients_by_name)
    engine.close()
    assert all("lora_" in name for name in gradients)
    return Outcome([r.loss for r in results], [r.gradient_norm for r in results], weights)


def plain_peft(case: Case) -> Outcome:
    """What peft's own model becomes in one process."""
    import peft

    _, begun = plain_blocks(case)
    settings = {key: value for key, value in LORA.items() if key != "peft_type"}
    sizes = getattr(case.factory, "keywords", {})
    model = peft.get_peft_model(base(**sizes).double(), peft.LoraConfig(**settings))
    named = {
        name.removeprefix("base_model.model."): parameter
        for name, parameter in model.named_parameters()
    }
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(begun[name])
    trained = [parameter for parameter in named.values() if parameter.requires_grad]
    assert 0 < len(trained) < len(named)
    optimizer = torch.optim.AdamW(
        trained, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay
    )
    outcome = Outcome([], [], {name: p.data for name, p in named.items()})
    for step, batch in enumerate(case.batches()):
        optimizer.zero_grad()
        loss: Tensor = case.loss(model(*batch.inputs(0, len(batch))), batch.targets(0, len(batch)))
        loss.backward()
        outcome.norms.append(float(nn.utils.clip_grad_norm_(trained, OPTIMIZER.clip_norm)))
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * SCHEDULE.factor(step, STEPS)
        optimizer.step()
        outcome.losses.append(loss.item())
    return outcome


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("replicas", "more"),
    [
        pytest.param((2, 1), {}, marks=pytest.mark.slow),
        ((1, 2), {"schedule": "zb-h1"}),
        ((2,), {"directive": "recompute", "shard": True}),
        ((1, 2), {**OFFLOADED, "directive": "offload"}),
        ((1, 1), {"optimizer_offload": 0.5}),
        # Each of these is a part of one above.
        pytest.param((1, 1), {}, marks=pytest.mark.thorough),
        pytest.param((1, 1), {"schedule": "zb-h1"}, marks=pytest.mark.thorough),
        pytest.param((1, 1), {"directive": "offload"}, marks=pytest.mark.thorough),
        pytest.param((1, 1), OFFLOADED, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_training_equals_plain_peft(
    pool: Pool, tmp_path: Path, replicas: tuple[int, ...], more: dict[str, Any]
) -> None:
    pytest.importorskip("peft", reason="peft is not installed (it comes with the peft extra)")
    case = OverBase(lora).under(replicas, **more)
    compare(pool.run(train, case.world, case, tmp_path), plain_peft(case), 1e-9)


def test_peft_loads_the_adapters_of_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    peft = pytest.importorskip(
        "peft", reason="peft is not installed (it comes with the peft extra)"
    )
    case = OverBase(lora).under((1, 1))
    found = pool.run(training, 2, case, tmp_path, 0, 2, None)
    trained = {name: value for outcome in found for name, value in outcome.weights.items()}
    chain, reader = case.chain(), CheckpointReader(tmp_path / checkpoint_name(2))
    names = set(trained) - chain.left_out
    tensors = {name: reader.read(f"model/{name}") for name in names}
    assert save_adapter(chain.model, tensors, tmp_path / "adapter") == []
    model = peft.PeftModel.from_pretrained(base().double(), str(tmp_path / "adapter"))
    loaded = model.base_model.model.state_dict()
    assert len(names) == 2 * len(LORA["target_modules"]) * 2 - 2
    for name in names:
        torch.testing.assert_close(loaded[name].double(), trained[name], msg=name)


def planned(case: Case, memory: int) -> Plan:
    """Return the plan for one device of this memory, and a host whose memory holds everything."""
    chain = case.chain()
    batch = case.batches()[0]
    work = count(
        chain,
        case.loss,
        lambda rows: (batch.inputs(0, rows), batch.targets(0, rows)),
        precision=case.precision(),
        minimum_bytes=1,
    )
    machine = cluster(
        1, memory, tier_name="host", tier=10**9, write=LINK, read=LINK, host_update_seconds=1e-9
    )
    profile = price(work, device_kind("cpu-core"))
    plan, _ = search(profile, machine, PlanConfig(), global_batch=8, microbatch=1)
    return plan


@pytest.mark.slow
def test_a_plan_that_offloads_the_base_trains_the_same(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed (it comes with the peft extra)")
    case = OverBase(partial(lora, layers=6, hidden=64))
    model = case.chain().model
    base = sum(p.numel() * case.dtype.itemsize for p in model.parameters() if not p.requires_grad)
    plan = planned(case, base * 3 // 4)
    assert plan.stages[0].parameter_offload > 0
    (rank,) = plan.prediction.ranks
    assert rank.peak_bytes <= base * 3 // 4
    # Nothing but the base itself, and little of it more than once: no gradients and no states of it.
    assert plan.stages[0].streamed_bytes < 1.5 * base
    assert plan.stages[0].state_bytes < 0.5 * base
    compare(pool.run(train, 1, replace(case, plan=plan), tmp_path), plain_peft(case), 1e-9)

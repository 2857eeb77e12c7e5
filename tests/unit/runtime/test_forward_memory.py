"""What a forward alone holds on the device is within what the plan proves."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from parallax.machine.local import CPU_RESERVE, GAPS, KEPT, THREAD_RESERVE
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling import measure as module
from parallax.model.profiling.allocations import measure_allocations
from parallax.model.profiling.measure import measure
from parallax.plan.config import PlanConfig
from parallax.plan.cost.forward import forward_plan
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.plan.search.search import search
from parallax.plan.task import PlanTask
from parallax.runtime.batch import TensorRows
from parallax.runtime.evaluation import EvaluationEngine
from parallax.runtime.forward import ForwardEngine
from parallax.runtime.metrics import MetricsConfig
from tests.alone import alone
from tests.distributed.pool import Pool
from tests.plans import described, make_plan
from tests.unit.plan_fakes import cluster

CPU, ROWS = torch.device("cpu"), 16
MODEL = GPTConfig(layers=4, hidden=64, heads=4, sequence=64, vocabulary=256, tied=False)
TIED = GPTConfig(layers=4, hidden=64, heads=4, sequence=64, vocabulary=256)
TRANSIENT = "activations", "boundary", "workspace", "staging"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "SECONDS_PER_BLOCK", 0.0)


def batch() -> TensorRows:
    tokens = torch.randint(
        0, 256, (ROWS, MODEL.sequence + 1), generator=torch.Generator().manual_seed(0)
    )
    return TensorRows(tokens[:, :-1], tokens[:, 1:])


@functools.cache
def measured(config: GPTConfig) -> ModelProfile:
    rows = batch()
    return measure(
        described(config.build),
        GPT.loss,
        lambda count: (rows.inputs(0, count), rows.targets(0, count)),
        (1, 2, 4),
        device=CPU,
        precision=PrecisionConfig(),
        minimum_bytes=1,
    )


class Peak(NamedTuple):
    """Bytes of parameters and buffers on the device, and the most that a forward allocated beside them."""

    held: int
    passing: int


def peak_of(config: GPTConfig, plan: Plan, folder: Path) -> Peak:
    """What a second forward holds on this rank."""
    engine, rows = ForwardEngine.build(described(config.build), plan, scratch=folder), batch()
    engine.predict(rows)  # loads libraries
    found = measure_allocations(CPU, lambda: engine.predict(rows)).most
    held = sum(tensor.nbytes for tensor in engine._built.stage.held())
    engine.close()
    return Peak(held, found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (TIED, {"replicas": (1,)}),
        (TIED, {"replicas": (1, 1), "schedule": "gpipe"}),
        (MODEL, {"replicas": (1, 2)}),
        (MODEL, {"replicas": (2, 1), "parameter_offload": 1.0}),
        (MODEL, {"replicas": (1, 1, 1), "parameter_offload": 0.5}),
    ],
    ids=str,
)
def test_no_forward_peaks_above_what_is_proved(
    pool: Pool, tmp_path: Path, config: GPTConfig, options: dict[str, Any]
) -> None:
    chain = described(config.build)
    plan = make_plan(chain, global_batch=ROWS, microbatch=4, **options)
    profile, machines = measured(config), cluster(plan.world_size)
    proved = forward_plan(profile, machines, plan)
    ranks = pool.run(peak_of, plan.world_size, config, proved, tmp_path / "swap")
    for rank, found in enumerate(ranks):
        memory = proved.prediction.stages[proved.coordinate(rank).pipeline_rank].memory
        assert found.held <= memory["parameters"] + memory["buffers"]
        proven = sum(memory[term] for term in TRANSIENT)
        assert 0.4 * proven < found.passing <= proven


METRICS = ["accuracy", "f1", "perplexity", "top5"]


def evaluation_peak(config: GPTConfig, plan: Plan, folder: Path) -> Peak:
    """What a second evaluation holds on this rank."""
    engine = EvaluationEngine.build(
        described(config.build),
        plan,
        loss=GPT.loss,
        metrics=MetricsConfig(metrics=MetricsConfig.read(METRICS)),
        scratch=folder,
    )
    rows = batch()
    engine.evaluate_weighted(rows)
    found = measure_allocations(CPU, lambda: engine.evaluate_weighted(rows)).most
    held = sum(tensor.nbytes for tensor in engine._forward._built.stage.held())
    engine.close()
    return Peak(held, found)


@pytest.mark.parametrize(
    "config",
    [
        PlanConfig(stages=1, replicas=1),
        PlanConfig(stages=2, replicas=[1, 2]),
        PlanConfig(stages=2, replicas=1, parameters="host"),
    ],
    ids=str,
)
def test_no_evaluation_peaks_above_what_its_plan_proves(
    pool: Pool, tmp_path: Path, config: PlanConfig
) -> None:
    """With the loss and the metrics, which work on copies of the outputs."""
    profile, world = measured(MODEL), config.ranks or 1
    plan, _ = search(
        profile,
        cluster(world),
        config,
        global_batch=ROWS,
        microbatch=4,
        task=PlanTask.EVALUATION,
    )
    ranks = pool.run(evaluation_peak, world, MODEL, plan, tmp_path / "swap")
    for rank, found in enumerate(ranks):
        memory = plan.prediction.stages[plan.coordinate(rank).pipeline_rank].memory
        assert found.held <= memory["parameters"] + memory["buffers"]
        proven = sum(memory[term] for term in TRANSIENT)
        assert 0.3 * proven < found.passing <= proven


# ---- the whole process

LARGE = GPTConfig(layers=6, hidden=384, heads=6, sequence=64, vocabulary=256, tied=False)


def process_peak(plan: Plan, folder: Path) -> int:
    """The most memory of a process beyond that before its engine was built."""
    engine = ForwardEngine.build(described(LARGE.build), plan, scratch=folder)
    for _ in range(3):
        engine.predict(batch())
    peak = engine.peak_bytes()
    engine.close()
    return peak


def proved(plan: Plan, memory: int) -> Plan:
    """On a CPU as it is planned for, with a budget of so many bytes."""
    machine = {"reserve": CPU_RESERVE + THREAD_RESERVE, "gap_share": GAPS, "kept_share": KEPT}
    return forward_plan(measured(LARGE), cluster(1, memory=memory, **machine), plan)


@pytest.mark.parametrize(
    ("share", "tight"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1.0, True), (1.0, False), (0.0, True))
        ),
        pytest.param(0.0, False, marks=pytest.mark.thorough),
    ],
)
def test_no_process_peaks_above_what_is_proved(tmp_path: Path, share: float, tight: bool) -> None:
    """Malloc kept the blocks that were freed while the stage was built, and served forwards from them."""
    plan = make_plan(
        described(LARGE.build), global_batch=ROWS, microbatch=4, parameter_offload=share
    )
    found = proved(plan, 2**40)
    if tight:  # no memory for what malloc keeps
        terms = found.prediction.stages[0].memory
        passing = sum(terms[term] for term in ("activations", "boundary", "workspace"))
        kept = terms["allocator"] - math.ceil(GAPS * passing)
        found = proved(plan, found.prediction.ranks[0].peak_bytes - kept)
    (rank,) = found.prediction.ranks
    assert rank.returns_freed is tight
    assert alone(process_peak, found, tmp_path) <= rank.peak_bytes

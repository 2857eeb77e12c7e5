"""Forwards alone on simulated accelerators hold no more of their devices than is proved."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling import measure as module
from parallax.model.profiling.measure import measure
from parallax.plan.cost.forward import forward_plan
from parallax.plan.plan import Plan
from parallax.plan.profile import ModelProfile
from parallax.runtime.batch import TensorRows
from tests.distributed.pool import Pool
from tests.plans import described, make_plan
from tests.sim import jobs
from tests.unit.plan_fakes import cluster

ROWS = 8
TIED = GPTConfig(layers=4, hidden=64, heads=4, sequence=32)
UNTIED = replace(TIED, tied=False)


@functools.cache
def measured(config: GPTConfig) -> ModelProfile:
    tokens = torch.zeros(ROWS, config.sequence, dtype=torch.int64)
    rows = TensorRows(tokens, tokens)
    return measure(
        described(config.build),
        GPT.loss,
        lambda count: (rows.inputs(0, count), rows.targets(0, count)),
        (1, 2),
        device=torch.device("cpu"),
        precision=PrecisionConfig(),
        minimum_bytes=1,
    )


def proved(config: GPTConfig, options: dict[str, Any]) -> Plan:
    plan = make_plan(
        described(config.build), global_batch=ROWS, microbatch=2, tier="host", **options
    )
    # torch's allocator on the simulated device rounds each of some hundred tensors up to 512 bytes.
    return forward_plan(measured(config), cluster(plan.world_size, reserve=2**16), plan)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (TIED, {"replicas": (1, 1)}),
        (UNTIED, {"replicas": (1, 2), "inputs_ahead": True}),
        (UNTIED, {"replicas": (2, 1), "parameter_offload": 1.0}),
    ],
    ids=str,
)
def test_outputs_are_a_cpus_within_the_proved_bytes(
    sim_pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: GPTConfig,
    options: dict[str, Any],
    direct: bool,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "SECONDS_PER_BLOCK", 0.0)
    plan = proved(config, options)
    job = functools.partial(jobs.forwards, "sim", config, plan, direct=direct)
    alone = make_plan(described(config.build), global_batch=ROWS, microbatch=2)
    (on_cpu,) = sim_pool.run(
        functools.partial(jobs.forwards, "cpu", config, alone, direct=False), 1
    )
    rows = 0
    for rank, ran in enumerate(sim_pool.run(job, plan.world_size)):
        error, races, _ = ran["verdict"]
        assert not error
        assert not races, races[0]
        assert 0 < ran["peak_bytes"] <= plan.prediction.ranks[rank].peak_bytes
        for first, outputs in ran["outputs"].items():
            whole = on_cpu["outputs"][first - first % 2][first % 2 :][: len(outputs)]
            torch.testing.assert_close(outputs, whole, rtol=1e-5, atol=1e-6)
            rows += len(outputs)
    assert rows == ROWS

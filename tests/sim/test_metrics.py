"""Metrics and class weights on a simulated accelerator: the host waits for the device as often as without them."""

from __future__ import annotations

from functools import partial

from tests.distributed.pool import Pool
from tests.sim import jobs

NAMES = ["accuracy", "f1", "top2", "mcc"]


def test_metrics_of_training_rows_add_no_waits(sim_pool: Pool) -> None:
    """And class weights, which are copied once, add none with more micro-batches."""
    waits = {}
    for micro in (16, 2):
        ((without, _),) = sim_pool.run(partial(jobs.steps_with_metrics, [], micro), 1)
        ((found, metrics),) = sim_pool.run(partial(jobs.steps_with_metrics, NAMES, micro), 1)
        assert found == without
        assert 0 < metrics["accuracy"] <= metrics["top2"] <= 1
        waits[micro] = without
    assert waits[2] == waits[16]

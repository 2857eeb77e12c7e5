"""How fast are forwards of a model whose weights are larger than the device?  ``python -m benchmarks.larger_forward
[--json] [--times 4] [--rows 2,4,8] [--turns N]``

The weights of a GPT are so many times the budget of its plan. Two processes compute batches by turns: one
has all weights in memory, the other fetches each block's from disk. Beside the seconds of a batch stands the physical
limit: the longer of the batch with all weights in memory, and of the fetched bytes at the bandwidth that the planner
measured in the same run. Few rows are bound by the bandwidth, many by computing. Seconds are lower quartiles, because
other programs can only lengthen a batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.larger import lower_quartile
from benchmarks.workers import Worker, rotated
from parallax.common.units import format_bytes
from parallax.machine.local import ClusterConfig
from parallax.model.describe import describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.plan.config import PlanConfig
from parallax.plan.task import PlanTask
from parallax.run.planning import Planned, plan_model
from parallax.runtime.batch import TensorRows
from parallax.runtime.forward import ForwardEngine
from parallax.swap.config import SwapConfig

BUDGET = 96 * 2**20
HIDDEN, SEQUENCE = 768, 64


def model_of(times: float) -> GPTConfig:
    """Return the GPT whose weights are ``times`` the budget."""
    layers = max(1, round(times * BUDGET / (12 * HIDDEN * HIDDEN * 4)))
    return GPTConfig(layers=layers, hidden=HIDDEN, heads=12, sequence=SEQUENCE)


def batch_of(model: GPTConfig, rows: int) -> TensorRows:
    """Return a batch of random tokens."""
    tokens = torch.randint(0, model.vocabulary, (rows, model.sequence + 1))
    return TensorRows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def planned(model: GPTConfig, rows: int, *, limited: bool) -> Planned:
    """Plan forwards of a batch as one micro-batch."""
    return plan_model(
        describe(model.build),
        GPT.loss,
        batch_of(model, rows),
        cluster=ClusterConfig(
            kind="cpu", devices=1, threads=1, device_memory=BUDGET if limited else "8GiB"
        ),
        plan=PlanConfig(stages=1, replicas=1, parameters="host" if limited else "device"),
        swap=SwapConfig(tier="auto" if limited else "none"),
        microbatch=rows,
        task=PlanTask.INFERENCE,
    )


@contextlib.contextmanager
def computing(
    model: GPTConfig, rows: int, limited: bool
) -> Iterator[tuple[Any, Callable[[str], Any]]]:
    """A process that plans and computes batches; it is ready with its prediction."""
    torch.set_num_threads(1)
    found = planned(model, rows, limited=limited)
    (device,) = found.cluster.devices
    with tempfile.TemporaryDirectory() as folder:
        engine = ForwardEngine.build(describe(model.build), found.plan, scratch=Path(folder))
        batch = batch_of(model, rows)

        def step(_: str) -> dict[str, Any]:
            begun = time.perf_counter()
            engine.predict(batch)
            seconds, fetched = time.perf_counter() - begun, engine.fetched_bytes()
            moving = device.read.seconds(fetched) if fetched else 0.0
            return {"seconds": seconds, "bytes": fetched, "moving": moving}

        for _ in range(2):
            step("to warm up")
        try:
            prediction = found.plan.prediction
            yield (
                {"seconds": prediction.step_seconds, "peak": prediction.ranks[0].peak_bytes},
                step,
            )
        finally:
            engine.close()


def run(times: float, rows: int, turns: int) -> dict[str, Any]:
    """Return the figures for one model and one size of batches."""
    model = model_of(times)
    workers: dict[bool, Worker] = {}
    predicted, taken = dict[bool, Any](), {limited: list[Any]() for limited in (False, True)}
    try:
        for limited in taken:  # one after another: each measures the machine
            workers[limited] = Worker(
                "offloaded" if limited else "resident", computing, model, rows, limited
            )
            predicted[limited] = workers[limited].ready()
        for turn in range(turns):
            for limited in rotated([*taken], turn):
                taken[limited].append(workers[limited].ask("step"))
    finally:
        for worker in workers.values():
            worker.close()
    resident, offloaded = (
        lower_quartile([each["seconds"] for each in taken[limited]]) for limited in taken
    )
    moving = lower_quartile([each["moving"] for each in taken[True]])
    return {
        "times": times,
        "rows": rows,
        "resident_seconds": resident,
        "offloaded_seconds": offloaded,
        "transfer_seconds": moving,
        "over_physical_limit": offloaded / max(resident, moving),
        "over_predicted": offloaded / predicted[True]["seconds"],
        "bytes": max(each["bytes"] for each in taken[True]),
        "predicted_peak_bytes": predicted[True]["peak"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.larger_forward", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--times", default="4", help="weights over the budget")
    parser.add_argument("--rows", default="2,4,8", help="rows of a batch")
    parser.add_argument("--turns", type=int, default=8, help="batches of each (default 8)")
    given = parser.parse_args(arguments)
    shown = Table(box=box.SIMPLE)
    for heading in ("× budget", "rows", "resident", "transfer", "batch", "/ physical limit"):
        shown.add_column(heading, justify="right")
    for heading in ("/ predicted", "fetched", "predicted peak"):
        shown.add_column(heading, justify="right")
    found = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # bandwidths of this run, not of an earlier one
        for times in map(float, given.times.split(",")):
            for rows in map(int, given.rows.split(",")):
                row = run(times, rows, given.turns)
                found.append(row)
                shown.add_row(
                    f"{times:g}",
                    str(rows),
                    *(f"{row[f'{key}_seconds']:.3f} s" for key in ("resident", "transfer")),
                    f"{row['offloaded_seconds']:.3f} s",
                    f"{row['over_physical_limit']:.2f}",
                    f"{row['over_predicted']:.2f}",
                    format_bytes(row["bytes"]),
                    format_bytes(row["predicted_peak_bytes"]),
                )
    Console(stderr=given.json, width=100).print(shown)
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

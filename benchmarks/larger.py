"""How fast does a model train whose weights and states are larger than the device?  ``python -m benchmarks.larger
[--json] [--times 2,4,8] [--turns N]``

A GPT trains on the CPU in micro-batches of one short row, so that moving its weights dominates. Its parameters and
optimizer states are so many times a budget of 96 MiB, which the process must keep. Three processes take steps by turns:

- no limit: all on the device;
- breadth-first: parameters, gradients and states on the disk tier, each block for all micro-batches before the next;
- 1f1b: the same, each micro-batch through all blocks before the next.

Beside each step stand what the planner predicted and the physical limit: the longer of the step without a limit and of
the bytes that the step moved over the tier, those of the optimizer's states included, at the bandwidth that the planner
measured in the same run. A second limit adds the recomputation that the plan chose. Steps are lower quartiles, as in
``benchmarks.prediction``: other programs can only lengthen a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.ratios import ratios, show
from benchmarks.workers import Worker, rotated
from parallax.common.units import format_bytes
from parallax.machine.local import ClusterConfig
from parallax.model.describe import describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.plan.config import PlanConfig
from parallax.run.planning import Planned, plan_model
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig

BUDGET = 96 * 2**20
ROWS = 8
STATES = 3  # AdamW in fp32 has two states beside each parameter
NO_LIMIT, LAYER_ORDER, ROW_ORDER = "no limit", "breadth-first", "1f1b"


def model_of(times: float) -> GPTConfig:
    """Return the GPT whose parameters and states are ``times`` the budget."""
    hidden = 384
    layer = 12 * hidden * hidden * 4 * STATES
    return GPTConfig(
        layers=max(1, round(times * BUDGET / layer)), hidden=hidden, heads=6, sequence=16
    )


def batch_of(model: GPTConfig) -> TensorRows:
    """Return a global batch of random tokens."""
    tokens = torch.randint(0, model.vocabulary, (ROWS, model.sequence + 1))
    return TensorRows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def planned(model: GPTConfig, name: str) -> Planned:
    """Plan one of the three ways to train."""
    limited = name != NO_LIMIT
    return plan_model(
        describe(model.build),
        GPT.loss,
        batch_of(model),
        cluster=ClusterConfig(
            kind="cpu", devices=1, threads=1, device_memory=BUDGET if limited else "8GiB"
        ),
        plan=PlanConfig(
            stages=1,
            replicas=1,
            schedule=name if limited else "1f1b",
            activations="auto" if limited else "keep",
            parameters="host" if limited else "device",
        ),
        swap=SwapConfig(tier="auto" if limited else "none"),
        microbatch=1,
    )


@contextlib.contextmanager
def training(model: GPTConfig, name: str) -> Iterator[tuple[Any, Callable[[str], Any]]]:
    """A process that plans and takes steps; it is ready with its prediction."""
    torch.set_num_threads(1)
    found = planned(model, name)
    (device,) = found.cluster.devices
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.build(
            describe(model.build), found.plan, loss=GPT.loss, scratch=Path(folder)
        )
        batch = batch_of(model)
        limited = name != NO_LIMIT

        def step(_: str) -> dict[str, Any]:
            result = engine.step(batch)
            states = engine.tier_bytes()["the optimizer's states"] if limited else 0
            read, written = result.swap.bytes_in + states, result.swap.bytes_out + states
            moving = device.read.seconds(read) + device.write.seconds(written)
            return {
                "seconds": result.seconds,
                "peak": result.peak_bytes,
                "bytes": read + written,
                "moving": moving if read + written else 0.0,
            }

        for _ in range(2):
            step("to warm up")
        try:
            yield (
                {
                    "plan": str(found.plan.schedule),
                    "seconds": found.plan.prediction.step_seconds,
                    "recompute": found.plan.prediction.stages[0].seconds["recompute"],
                    "peak": found.plan.prediction.ranks[0].peak_bytes,
                },
                step,
            )
        finally:
            engine.close()


def run(times: float, turns: int) -> list[dict[str, Any]]:
    """Return a row for each way to train the model of ``times``."""
    model = model_of(times)
    names = (NO_LIMIT, LAYER_ORDER, ROW_ORDER)
    workers: dict[str, Worker] = {}
    predicted, taken = dict[str, Any](), {name: list[dict[str, Any]]() for name in names}
    try:
        for name in names:  # one after another: each measures the machine
            workers[name] = Worker(name, training, model, name)
            predicted[name] = workers[name].ready()
        for turn in range(turns):
            for name in rotated(list(names), turn):
                taken[name].append(workers[name].ask("step"))
    finally:
        for worker in workers.values():
            worker.close()
    seconds = {name: [step["seconds"] for step in taken[name]] for name in names}
    compute = lower_quartile(seconds[NO_LIMIT])
    found = []
    for name in names:
        moving = statistics.median(step["moving"] for step in taken[name])
        measured = lower_quartile(seconds[name])
        found.append(
            {
                "times": times,
                "order": NO_LIMIT if name == NO_LIMIT else predicted[name]["plan"],
                "tokens_per_second": ROWS * model.sequence / measured,
                "step_seconds": measured,
                "predicted_seconds": predicted[name]["seconds"],
                "physical_limit_seconds": max(compute, moving),
                "recomputing_limit_seconds": max(compute + predicted[name]["recompute"], moving),
                "bytes": max(step["bytes"] for step in taken[name]),
                "peak_bytes": max(step["peak"] for step in taken[name]),
                "predicted_peak_bytes": predicted[name]["peak"],
                "over_breadth_first": ratios(seconds[name], seconds[LAYER_ORDER]),
            }
        )
    return found


def lower_quartile(values: Sequence[float]) -> float:
    """Return the value that a quarter of ``values`` do not exceed."""
    return sorted(values)[(len(values) - 1) // 4]


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Return the rows for people."""
    shown = Table(box=box.SIMPLE)
    for heading in (
        "× budget",
        "order",
        "tokens/s",
        "step",
        "/ breadth-first",
        "/ predicted",
        "/ physical limit",
        "/ limit with recomputation",
        "moved",
        "peak (predicted)",
    ):
        shown.add_column(heading, justify="left" if heading == "order" else "right")
    for row in found:
        step = row["step_seconds"]
        shown.add_row(
            f"{row['times']:g}",
            row["order"],
            f"{row['tokens_per_second']:.0f}",
            f"{step:.3f} s",
            show(row["over_breadth_first"]),
            f"{step / row['predicted_seconds']:.2f}",
            f"{step / row['physical_limit_seconds']:.2f}",
            f"{step / row['recomputing_limit_seconds']:.2f}",
            format_bytes(row["bytes"]),
            f"{format_bytes(row['peak_bytes'])} ({format_bytes(row['predicted_peak_bytes'])})",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.larger", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--times", default="2,4,8", help="parameters and states over the budget")
    parser.add_argument("--turns", type=int, default=6, help="steps of each (default 6)")
    given = parser.parse_args(arguments)
    console = Console(stderr=given.json, width=None)
    found = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = (
            cache  # for the workers: bandwidths of this run, not of an earlier one
        )
        for times in map(float, given.times.split(",")):
            found += run(times, given.turns)
            console.print(table(found[-3:]))
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

"""What does a memory budget cost on a CPU?  ``python -m benchmarks.budget [--json] [--rows 1,4,16] [--turns N]``

One process trains the GPT of the main job with micro-batches of some rows and all activations kept, once without a
budget, and under budgets of so many times the bytes that the plan needs. Each of them has a process of its own; they
take steps by turns, so that what disturbs the machine disturbs all. A step's time is given over that without a budget,
and the highest measured memory beside what the plan promised.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from parallax.plan.plan import Plan
from parallax.plan.simulation.predict import predict
from parallax.run.planning import plan_model
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig

NO_BUDGET = "no budget"
SHARES = (1.0, 1.25, 4.0)  # of what the plan needs
BATCH = 16  # rows
MODEL = GPTConfig()


def rows_of(model: GPTConfig) -> TensorRows:
    """A global batch of random tokens."""
    tokens = torch.randint(0, model.vocabulary, (BATCH, model.sequence + 1))
    return TensorRows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def plans(model: GPTConfig, rows: int) -> dict[str, Plan]:
    """The same plan, predicted without a budget and under each."""
    found = plan_model(
        describe(model.build),
        GPT.loss,
        rows_of(model),
        cluster=ClusterConfig(kind="cpu", devices=1, threads=1),
        plan=PlanConfig(stages=1, replicas=1, activations="keep"),
        swap=SwapConfig(tier="none"),
        microbatch=rows,
    )
    (device,) = found.cluster.devices
    pipeline = found.plan

    def promised(**changes: Any) -> Plan:
        cluster = found.cluster.with_devices([replace(device, **changes)])
        ranks = predict(found.profile, cluster, pipeline).ranks
        return replace(found.plan, prediction=replace(found.plan.prediction, ranks=ranks))

    needed = promised(kept_share=0.0).prediction.ranks[0].peak_bytes
    unbounded = replace(found.plan.prediction.ranks[0], peak_bytes=0)  # nothing is promised
    prediction = replace(found.plan.prediction, ranks=(unbounded,))
    return {
        NO_BUDGET: replace(found.plan, prediction=prediction),
        **{f"{share:g} ×": promised(memory_bytes=int(share * needed)) for share in SHARES},
    }


@contextlib.contextmanager
def training(model: GPTConfig, plan: Plan) -> Iterator[tuple[str, Callable[[str], Any]]]:
    """A process that takes steps."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.build(describe(model.build), plan, loss=GPT.loss, scratch=Path(folder))
        batch = rows_of(model)

        def step(_: str) -> tuple[float, int]:
            result = engine.step(batch)
            return result.seconds, result.peak_bytes

        step("")  # to warm up
        step("")
        try:
            yield "ready", step
        finally:
            engine.close()


def run(model: GPTConfig, rows: int, turns: int) -> list[dict[str, Any]]:
    """A row for each budget."""
    planned = plans(model, rows)
    workers = {name: Worker(name, training, model, plan) for name, plan in planned.items()}
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    peaks = dict.fromkeys(workers, 0)
    try:
        for worker in workers.values():
            worker.ready()
        for turn in range(turns):
            for name in rotated(list(workers), turn):
                taken, peaks[name] = workers[name].ask("step")
                seconds[name].append(taken)
    finally:
        for worker in workers.values():
            worker.close()
    return [
        {
            "rows": rows,
            "budget": name,
            "budget_bytes": plan.prediction.ranks[0].budget_bytes,
            "predicted_peak_bytes": plan.prediction.ranks[0].peak_bytes,
            "measured_peak_bytes": peaks[name],
            "step": ratios(seconds[name], seconds[NO_BUDGET]),
        }
        for name, plan in planned.items()
    ]


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    shown = Table(box=box.SIMPLE)
    for heading in ("rows", "budget", "step / no budget", "fastest", "predicted peak", "measured"):
        shown.add_column(heading, justify="left" if heading == "budget" else "right")
    for row in found:
        promised = row["predicted_peak_bytes"]
        shown.add_row(
            str(row["rows"]),
            row["budget"],
            show(row["step"]),
            f"{row['step']['fastest']:.3f}",
            format_bytes(promised) if promised else "",
            format_bytes(row["measured_peak_bytes"]),
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as last line")
    parser.add_argument("--rows", default="1,4,16", help="micro-batches, in rows")
    parser.add_argument("--turns", type=int, default=6, help="steps of each (default 6)")
    given = parser.parse_args(arguments)
    console = Console(stderr=given.json)
    found = []
    for rows in map(int, given.rows.split(",")):
        found += run(MODEL, rows, given.turns)
        console.print(table(found[-1 - len(SHARES) :]))
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Part ``pipeline``: two stages in two processes that share one device and talk through the host.

One GPU has no second one to give a speed-up: this shows what a pipeline costs beside the same model, micro-batches and
optimizer in one process of the same device, and that its plans hold. All are planned from one profile:

``one process``    one stage
``1f1b, zb-h1``    two stages
``swap``           1F1B where every block offloads, planned for a device of less memory: at most so much of the
                   activations that 1F1B keeps as the planner can prove, which the allocator enforces in both processes
"""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.gpu.parts.part import Findings, Given
from benchmarks.gpu.parts.planned import (
    allocator_cap,
    measured,
    model_of,
    narrowed,
    planner,
    rows_of,
)
from benchmarks.teams import Answer
from benchmarks.workers import WayFailed

ONE, SWAP = "one process", "swap"


def pipeline(given: Given) -> Findings:
    """Steps of micro-batches of one row in each way."""
    task, rows = given.setup.plans, given.setup.plans_rows
    model = model_of(task)
    answers: dict[str, Answer] = {}
    with planner(given, model) as ask:
        answers[ONE] = ask(1, activations="keep", optimizer="device")
        for schedule in ("1f1b", "zb-h1"):
            answers[schedule] = ask(2, schedule=schedule, activations="keep", optimizer="device")
        if (failed := answers[ONE]).plan is None or (failed := answers["1f1b"]).plan is None:
            raise WayFailed(f"nothing to compare with: {failed.reason}")
        answers[SWAP], cap = narrowed(
            ask, answers["1f1b"], 2, schedule="1f1b", activations="offload", optimizer="device"
        )
    for runs in measured(given, model, answers, {SWAP}):
        found = rows_of(answers, runs, ONE, task, rows)
        for row in found:
            if row["way"] == SWAP and row["reason"] is None and (plan := answers[SWAP].plan):
                most = allocator_cap(plan)
                row |= {"budget_bytes": most, "within_cap": row["peak_bytes"] <= most}
        yield {"task": asdict(task), "cap_bytes": cap, "rows": found}

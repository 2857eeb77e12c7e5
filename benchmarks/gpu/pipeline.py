"""Part ``pipeline`` of the GPU benchmark: two stages in two processes that share one device and talk through the host.

One GPU has no second one to give a speed-up: this shows what a pipeline costs beside the same model, micro-batches and
optimizer in one process of the same device, and that its plans hold. All are planned from one profile, measured first:

``one process``    one stage
``1f1b, zb-h1``    two stages
``swap``           1F1B where every block offloads, planned for a device of less memory: at most so much of the
                   activations that 1F1B keeps as the planner can prove. On a CUDA device its allocator enforces that
                   cap, and a twentieth for its gaps, in both processes.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.models import GPTTask
from benchmarks.pipeline_plans import Transformer
from benchmarks.ratios import ratios
from benchmarks.teams import Answer, Ask, Place, Run, Team, by_turns, loss_difference, plans
from benchmarks.workers import Deadline, WayFailed, Worker
from parallax.model.gpt import GPTConfig
from parallax.model.precision import PrecisionConfig
from parallax.plan.config import PlanConfig

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of 1F1B's activations that swap may be planned for
ALLOCATOR_GAPS = 1.05  # what it may reserve for what tensors hold
ONE, SWAP = "one process", "swap"


def pipelined(
    task: GPTTask,
    rows: int,
    turns: int,
    place: Place,
    deadline: Deadline,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Steps of ``rows`` micro-batches of one row in each way; the numbers as plain data."""
    model = Transformer(
        config=GPTConfig(
            layers=task.layers,
            hidden=task.hidden,
            heads=task.heads,
            sequence=task.sequence,
            vocabulary=task.vocabulary,
            tied=False,
        ),
        precision=PrecisionConfig(parameters="bf16", compute="bf16"),
    )
    answers, cap = _answers(model, rows, place, deadline)
    if answers[ONE].plan is None:
        raise WayFailed(f"{ONE}: {answers[ONE].reason}")
    for name, answer in answers.items():
        say(f"{name}: {answer.reason or answer.words}")
    caps = {SWAP: cap if place.kind == "cuda" else None}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(answers)) as together:
        starts = {
            name: together.submit(
                _started, stack, model, rows, name, answer, place, caps.get(name), deadline
            )
            for name, answer in answers.items()
            if answer.plan is not None
        }
        steps, runs = {}, {}
        for name, start in starts.items():
            try:
                steps[name] = partial(start.result().step, name, timeout=max(1.0, deadline.left()))
            except WayFailed as failed:
                runs[name] = Run(reason=str(failed))
        runs |= by_turns(steps, turns, lambda longest: deadline.left() < 1.5 * longest)
    found = []
    for name, answer in answers.items():
        row: dict[str, Any] = {
            "way": name,
            "rows": rows,
            "plan": answer.words,
            "reason": answer.reason,
        }
        found.append(
            row
            if answer.reason
            else row | _row(answer, runs[name], answers[ONE], runs[ONE], task, rows)
        )
    for row in found:
        if row["way"] == SWAP and row["reason"] is None:
            row |= {"budget_bytes": cap, "within_cap": row["peak_bytes"] <= cap}
    return {"task": asdict(task), "swap_cap_bytes": cap, "rows": found}


def _answers(
    model: Transformer, rows: int, place: Place, deadline: Deadline
) -> tuple[dict[str, Answer], int]:
    """The plans, and the memory that swap's is for."""
    with tempfile.TemporaryDirectory(prefix="parallax-benchmark-") as cache:
        planner = Worker("planner", plans, model, rows, place, cache)
        try:
            planner.ready(deadline.left())

            def ask(stages: int, memory: int | None = None, **config: Any) -> Answer:
                told = PlanConfig(stages=stages, replicas=1, optimizer="device", **config)
                answer: Answer = planner.ask(
                    Ask(devices=stages, config=told, microbatch=1, memory=memory), deadline.left()
                )
                return answer

            found = {ONE: ask(1, activations="keep")}
            for schedule in ("1f1b", "zb-h1"):
                found[schedule] = ask(2, schedule=schedule, activations="keep")
            kept = found["1f1b"].plan
            if kept is None:
                return found, 0
            for share in SHARES:
                terms = [stage.memory for stage in kept.prediction.stages]
                cap = max(
                    sum(term.values()) - int((1 - share) * term["activations"]) for term in terms
                )
                found[SWAP] = ask(2, cap, schedule="1f1b", activations="offload")
                if found[SWAP].plan is not None:
                    break
            return found, cap
        finally:
            planner.close()


def _started(
    stack: contextlib.ExitStack,
    model: Transformer,
    rows: int,
    name: str,
    answer: Answer,
    place: Place,
    cap: int | None,
    deadline: Deadline,
) -> Team:
    """Processes of their own for each plan: peaks are of a process."""
    assert answer.plan is not None
    allowed = None if cap is None else int(ALLOCATOR_GAPS * cap)
    team = stack.enter_context(
        Team(
            model, rows, answer.plan.world_size, place, cap_bytes=allowed, patience=deadline.left()
        )
    )
    team.build(name, answer.plan, deadline.left())
    return team


def _row(
    answer: Answer, run: Run, one: Answer, reference: Run, task: GPTTask, rows: int
) -> dict[str, Any]:
    assert answer.plan is not None
    pairs = min(len(run.seconds), len(reference.seconds))
    if run.reason is not None or not pairs:
        return {"reason": run.reason or "no time was left for a turn", "trace": []}
    over = ratios(run.seconds[:pairs], reference.seconds[:pairs])
    return {
        "seconds": run.seconds,
        "predicted_seconds": answer.seconds,
        "tokens_per_second": task.units(rows) / statistics.median(run.seconds),
        "over_reference": over,
        "throughput": 1 / over["median"],
        "predicted_throughput": one.seconds / answer.seconds,
        "peak_bytes": run.peak_bytes,
        "predicted_peak_bytes": max(rank.peak_bytes for rank in answer.plan.prediction.ranks),
        "losses_compared": len(run.losses),
        "losses_equal": run.losses == reference.losses,
        "loss_difference": loss_difference(run, reference),
    }

"""Part ``plans``: what Parallax predicts of its own plans for one device, and what they then take.

``keep``, ``recompute``  the directive of every block
``offload``              every block offloads, planned for the device of least memory that the planner can prove it for
``auto``                 the planner's own choice for that device
``host optimizer``       everything is kept, and the states are on the host
"""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.gpu.parts.part import Findings, Given
from benchmarks.gpu.parts.planned import measured, model_of, narrowed, planner, rows_of
from benchmarks.teams import Answer
from benchmarks.workers import WayFailed

KEEP, OFFLOAD, AUTO = "keep", "offload", "auto"


def plans(given: Given) -> Findings:
    """Predicted and measured steps and peaks."""
    task, rows = given.setup.plans, given.setup.plans_rows
    model = model_of(task)
    answers: dict[str, Answer] = {}
    with planner(given, model) as ask:
        answers[KEEP] = ask(1, activations="keep", optimizer="device")
        if answers[KEEP].plan is None:
            raise WayFailed(f"{KEEP}: {answers[KEEP].reason}")
        answers[OFFLOAD], cap = narrowed(
            ask, answers[KEEP], 1, activations="offload", optimizer="device"
        )
        answers[AUTO] = ask(1, cap, optimizer="device")
        answers["recompute"] = ask(1, activations="recompute", optimizer="device")
        answers["host optimizer"] = ask(1, activations="keep", optimizer="host")
    for runs in measured(given, model, answers, {OFFLOAD, AUTO}):
        found = rows_of(answers, runs, KEEP, task, rows)
        yield {"task": asdict(task), "cap_bytes": cap, "rows": found}

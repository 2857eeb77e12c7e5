"""What parts of planned runs have in common: plans of one model, made in a clean process from one profile, each run in
processes of its own, and a row of what was predicted beside what was measured."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.gpu.parts.part import Given
from benchmarks.gpu.setup import Setup
from benchmarks.models import GPTTask
from benchmarks.pipeline_plans import Transformer
from benchmarks.ratios import ratios
from benchmarks.teams import Answer, Ask, Place, Run, Step, Team, by_turns, loss_difference, plans
from benchmarks.workers import Deadline, WayFailed, Worker
from parallax.model.factory.gpt import GPTConfig
from parallax.model.precision import PrecisionConfig
from parallax.plan.config import PlanConfig
from parallax.plan.plan import Plan

ALLOCATOR_GAPS = 1.05  # what it may reserve for what tensors hold
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the activations that are kept otherwise
Asking = Callable[..., Answer]


def model_of(task: GPTTask) -> Transformer:
    """Return the task as the planner's model, in bf16."""
    config = GPTConfig(
        layers=task.layers,
        hidden=task.hidden,
        heads=task.heads,
        sequence=task.sequence,
        vocabulary=task.vocabulary,
        tied=False,
    )
    return Transformer(config=config, precision=PrecisionConfig(parameters="bf16", compute="bf16"))


def place_of(setup: Setup) -> Place:
    """Return where the ranks compute. A CPU gets a budget, so that freed memory is returned and the peak is that of the
    tensors."""
    memory = "auto" if setup.device == "cuda" else "4GiB"
    return Place(kind=setup.device, memory=memory, minimum_bytes=setup.minimum_bytes)


@contextlib.contextmanager
def planner(given: Given, model: Transformer) -> Iterator[Asking]:
    """``ask(stages, memory, **config)``; the model is measured once in a run."""
    setup = given.setup
    details = model, setup.plans_rows, place_of(setup), str(given.cache)
    worker = Worker("planner", plans, *details, start=setup.start)

    def ask(stages: int, memory: int | None = None, **config: Any) -> Answer:
        wanted = PlanConfig(stages=stages, replicas=1, **config)
        question = Ask(devices=stages, config=wanted, microbatch=1, memory=memory)
        found: Answer = worker.ask(question, given.deadline.left())
        return found

    try:
        worker.ready(given.deadline.left())
        yield ask
    finally:
        worker.close(patience=5.0)


def narrowed(ask: Asking, kept: Answer, stages: int, **config: Any) -> tuple[Answer, int]:
    """The plan for a device of least memory that is found, and its bytes: all that ``kept`` takes but for a share of
    its activations."""
    assert kept.plan is not None
    terms = [stage.memory for stage in kept.plan.prediction.stages]
    for share in SHARES:
        cap = max(sum(term.values()) - int((1 - share) * term["activations"]) for term in terms)
        found = ask(stages, cap, **config)
        if found.plan is not None:
            break
    return found, cap


def measured(
    given: Given, model: Transformer, answers: Mapping[str, Answer], capped: Collection[str]
) -> Iterator[dict[str, Run]]:
    """Steps of every plan by turns, ever more of them. ``capped`` are planned for a device of less memory, of which
    its allocator enforces what a plan leaves it, and a twentieth for its gaps. Who cannot start, or fails, ends only
    its own."""
    cuda = given.setup.device == "cuda"
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(max(1, len(answers))) as together:
        starting = Deadline(given.deadline.left() * 0.7)
        starts = {
            name: together.submit(
                _started,
                stack,
                given,
                model,
                name,
                answer,
                allocator_cap(answer.plan) if cuda and name in capped else None,
                starting,
            )
            for name, answer in answers.items()
            if answer.plan is not None
        }
        steps: dict[str, Callable[[], Step]] = {}
        runs = {name: Run(reason=answer.reason) for name, answer in answers.items()}
        for name, start in starts.items():
            try:
                team = start.result()
            except WayFailed as failed:
                runs[name] = Run(reason=str(failed))
            else:
                steps[name] = partial(_step, team, name, given.deadline)
                given.say(f"{name}: {answers[name].summary}")
        setup = given.setup
        turns = setup.turns * setup.steps
        yield runs | by_turns(steps, turns, lambda longest: given.deadline.left() < 2 * longest)


def allocator_cap(plan: Plan) -> int:
    """What every rank may allocate: its budget but for the driver's context and NCCL's buffers, of which torch's
    allocator, that measures peaks, knows nothing."""
    return min(plan.allocator_bytes(rank) for rank in range(plan.world_size))


def _step(team: Team, name: str, deadline: Deadline) -> Step:
    """Take a step of the plan ``name``. If it hangs, it uses half of the remaining time."""
    return team.step(name, timeout=max(1.0, deadline.left() / 2))


def _started(
    stack: contextlib.ExitStack,
    given: Given,
    model: Transformer,
    name: str,
    answer: Answer,
    cap: int | None,
    deadline: Deadline,
) -> Team:
    """Start separate processes for each plan, because peaks are those of a process."""
    assert answer.plan is not None
    team = stack.enter_context(
        Team(
            model,
            given.setup.plans_rows,
            answer.plan.world_size,
            place_of(given.setup),
            cap_bytes=None if cap is None else int(ALLOCATOR_GAPS * cap),
            patience=deadline.left(),
            start=given.setup.start,
        )
    )
    team.build(name, answer.plan, deadline.left())
    return team


def rows_of(
    answers: Mapping[str, Answer], runs: Mapping[str, Run], first: str, task: GPTTask, rows: int
) -> list[dict[str, Any]]:
    """Each plan's row, beside ``first``."""
    return [
        {"way": name, "rows": rows, "plan": answer.summary, "reason": answer.reason}
        | _row(answer, runs[name], answers[first], runs[first], task, rows)
        for name, answer in answers.items()
    ]


def _row(
    answer: Answer, run: Run, one: Answer, reference: Run, task: GPTTask, rows: int
) -> dict[str, Any]:
    if answer.plan is None or run.reason is not None or not run.seconds:
        why = answer.reason or run.reason or "no time was left for a turn"
        return {"reason": why, "traceback": []}
    plan = (
        answer.plan
    )  # torch's allocator measures no context: what is predicted of it has none either
    peak = max(plan.allocator_peak_bytes(rank) for rank in range(plan.world_size))
    seconds = statistics.median(run.seconds)
    found: dict[str, Any] = {
        "seconds": run.seconds,
        "predicted_seconds": answer.seconds,
        "seconds_error": answer.seconds / seconds - 1,
        "tokens_per_second": task.units(rows) / seconds,
        "peak_bytes": run.peak_bytes,
        "predicted_peak_bytes": peak,
        "peak_of_predicted": run.peak_bytes / peak,
        "over_reference": None,
        "throughput": None,
        "losses_compared": len(run.losses),
        "losses_equal": run.losses == reference.losses,
        "loss_difference": loss_difference(run, reference) if reference.losses else None,
    }
    pairs = min(len(run.seconds), len(reference.seconds))
    if pairs and one.plan is not None:
        over = ratios(run.seconds[:pairs], reference.seconds[:pairs])
        found |= {"over_reference": over, "throughput": 1 / over["median"]}
        found["predicted_throughput"] = one.seconds / answer.seconds
    return found

"""``parallax plan --what-if``: make one plan for each combination of some settings, and show them side by side."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from parallax.commands.options import HOUR, price_per_hour, print_json
from parallax.common.units import format_rate, format_seconds
from parallax.config import RunConfig, compose
from parallax.errors import ConfigError, InfeasiblePlan
from parallax.plan.cluster import Cluster
from parallax.plan.plan import Plan
from parallax.run.job import plan_run, read_profile, tokens_per_row
from parallax.run.working import working

SHORT = {"devices": "cluster.devices", "nodes": "cluster.nodes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome for one combination of settings: its plan and costs, or why there is no plan. Costs are in the
    currency of ``cluster.price_per_hour``; they are 0 if prices are unknown. ``tokens_per_second`` is 0 if rows are not
    tokens. ``replicas``: the number of replicas of each stage."""

    settings: dict[str, str]
    fits: bool
    reason: str = ""
    devices: int = 0
    replicas: tuple[int, ...] = ()
    schedule: str = ""
    microbatch: int = 0
    step_seconds: float = 0.0
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    cost_per_step: float = 0.0
    cost_per_hour: float = 0.0


def what_if(parsed: argparse.Namespace, console: Console) -> int:
    """Plan every combination, and return the exit code. All settings are checked before the first plan."""
    alternatives = [alternative(text, "--what-if") for text in parsed.what_if]
    combinations = [dict(chosen) for chosen in itertools.product(*alternatives)]
    outcomes: list[Outcome] = []
    mistakes: list[ConfigError] = []
    with working(console, "planning") as work:
        configs = [compose([*parsed.overrides, *_overrides(settings)]) for settings in combinations]
        for number, (settings, config) in enumerate(zip(combinations, configs), start=1):
            progress = f"plan {number} of {len(configs)} ({' '.join(_overrides(settings))})"
            work(progress)
            work.limit(config.trainer)
            try:
                outcomes.append(_plan(settings, config, parsed.profile))
            except ConfigError as error:  # of this combination, or of all
                mistakes.append(error)
                outcomes.append(Outcome(settings=settings, fits=False, reason=str(error)))
    if len(mistakes) == len(outcomes):
        raise mistakes[0]
    if parsed.json:
        print_json([asdict(outcome) for outcome in outcomes])
        return 0
    console.print(what_if_table(outcomes))
    for outcome in outcomes:
        if not outcome.fits:
            console.print(
                f"{' '.join(_overrides(outcome.settings))}: {outcome.reason}",
                highlight=False,
                markup=False,
            )
    return 0


def alternative(text: str, option: str) -> list[tuple[str, str]]:
    """Return a (key, value) pair for each value in ``text``, which is ``key=a,b``. Error messages name ``option``."""
    key, equals, values = text.partition("=")
    found = list(_split(values))
    if not equals or not key or not all(found):
        raise ConfigError(
            f"{option} {text}: accepted is key=VALUE,VALUE such as devices=2,4 or model.layers=12,24"
        )
    return [(SHORT.get(key, key), value) for value in found]


def _split(values: str) -> Iterator[str]:
    """Yield the parts of ``values`` between commas that are outside of brackets."""
    depth, start = 0, 0
    for index, sign in enumerate(values):
        depth += (sign in "[{(") - (sign in ")}]")
        if sign == "," and depth == 0:
            yield values[start:index]
            start = index + 1
    yield values[start:]


def _overrides(settings: dict[str, str]) -> Sequence[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def _plan(settings: dict[str, str], config: RunConfig, profile: Path | None) -> Outcome:
    known = read_profile(config, profile) if profile is not None else None
    try:
        planned = plan_run(config, Path.cwd(), lambda text: None, profile=known)
    except InfeasiblePlan as error:
        return Outcome(settings=settings, fits=False, reason=str(error))
    return _outcome(settings, config, planned.plan, planned.cluster)


def _outcome(settings: dict[str, str], config: RunConfig, plan: Plan, cluster: Cluster) -> Outcome:
    seconds = plan.prediction.step_seconds
    price = price_per_hour(cluster)
    rows, tokens = plan.global_batch / seconds if seconds > 0 else 0.0, tokens_per_row(config)
    return Outcome(
        settings=settings,
        fits=True,
        devices=plan.world_size,
        replicas=tuple(stage.replicas for stage in plan.stages[: plan.pipeline_ranks]),
        schedule=str(plan.schedule),
        microbatch=plan.microbatch,
        step_seconds=seconds,
        rows_per_second=rows,
        tokens_per_second=rows * tokens if tokens > 1 else 0.0,
        cost_per_step=price * seconds / HOUR,
        cost_per_hour=price,
    )


def what_if_table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with a row for each of ``outcomes``. The table has columns for prices if any price is known.
    Settings with one value have no column. Speeds are in tokens per second if the rows of every plan are tokens."""
    priced = any(outcome.cost_per_hour > 0 for outcome in outcomes)
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    keys = list(outcomes[0].settings)
    keys = [key for key in keys if len({o.settings[key] for o in outcomes}) > 1] or keys
    for key in keys:
        table.add_column(key.rpartition(".")[2], justify="right")
    planned = [outcome for outcome in outcomes if outcome.fits]
    tokens = bool(planned) and all(outcome.tokens_per_second for outcome in planned)
    speed = "tokens/s" if tokens else "rows/s"
    for heading in ("fits", "stages × replicas", "schedule", "micro-batch", "step", speed):
        table.add_column(heading, justify="left" if heading in ("fits", "schedule") else "right")
    for heading in ("cost/step", "cost/hour") if priced else ():
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        cells = _cells(outcome, tokens=tokens, priced=priced) if outcome.fits else ["no"]
        table.add_row(*(outcome.settings[key] for key in keys), *cells)
    return table


def _cells(outcome: Outcome, *, tokens: bool, priced: bool) -> list[str]:
    counts = outcome.replicas
    shape = f"{len(counts)} × {counts[0] if len(set(counts)) == 1 else list(counts)}"
    cells = [
        "yes",
        shape,
        outcome.schedule,
        str(outcome.microbatch),
        format_seconds(outcome.step_seconds),
    ]
    cells.append(format_rate(outcome.tokens_per_second if tokens else outcome.rows_per_second))
    return cells + (
        [f"{outcome.cost_per_step:.4g}", f"{outcome.cost_per_hour:.4g}"] if priced else []
    )

"""Plans for several combinations of settings, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from parallax.common.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One combination: its plan and costs, or the reason why there is none. Costs are in the currency of
    ``cluster.price_per_hour``, zero without prices; tokens are zero where rows are not tokens."""

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


def what_if_table(outcomes: Sequence[Outcome]) -> Table:
    """Return a row per combination; prices where any is known."""
    priced = any(outcome.cost_per_hour > 0 for outcome in outcomes)
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for key in outcomes[0].settings:
        table.add_column(key.rpartition(".")[2], justify="right")
    rows = any(o.rows_per_second and not o.tokens_per_second for o in outcomes)
    speed = "rows/s" if rows else "tokens/s"
    for heading in ("fits", "stages × replicas", "schedule", "micro-batch", "step", speed):
        table.add_column(heading, justify="left" if heading in ("fits", "schedule") else "right")
    for heading in ("cost/step", "cost/hour") if priced else ():
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        cells = _cells(outcome, priced) if outcome.fits else ["no"]
        table.add_row(*outcome.settings.values(), *cells)
    return table


def _cells(outcome: Outcome, priced: bool) -> list[str]:
    counts = outcome.replicas
    shape = f"{len(counts)} × {counts[0] if len(set(counts)) == 1 else list(counts)}"
    cells = [
        "yes",
        shape,
        outcome.schedule,
        str(outcome.microbatch),
        format_seconds(outcome.step_seconds),
    ]
    cells.append(f"{outcome.tokens_per_second or outcome.rows_per_second:,.0f}")
    return cells + (
        [f"{outcome.cost_per_step:.4g}", f"{outcome.cost_per_hour:.4g}"] if priced else []
    )

"""The recipe of a run: its parameter groups as a table, and its learning rate as a curve."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from parallax.errors import printable
from parallax.runtime.optim.config import OptimizerConfig
from parallax.runtime.optim.groups import GroupSummary
from parallax.runtime.optim.schedule import ScheduleConfig, curve
from parallax.swap.optimizer.buckets import CLIP_GROUP

_MOST = 16  # groups in the table, at most


def print_recipe(
    console: Console,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    groups: Sequence[GroupSummary],
    steps: int,
) -> None:
    """Print the parameter groups, if the settings define some, and the learning rate over ``steps`` steps, if their
    number is known."""
    if groups and (table := groups_table(optimizer, groups)) is not None:
        console.print(table)
    if steps:
        console.print(schedule_line(optimizer, schedule, steps), highlight=False, markup=False)


def groups_table(optimizer: OptimizerConfig, groups: Sequence[GroupSummary]) -> Table | None:
    """Return a table of the parameter groups; None if the settings define no groups."""
    if not optimizer.groups and optimizer.layer_decay == 1:
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("group", "parameters", "elements", "settings"):
        table.add_column(heading, justify="right" if heading == "elements" else "left")
    for number, group in enumerate(groups[:_MOST]):
        first, count = printable(group.names[0]), len(group.names)
        settings = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **group.settings}
        shown = ", ".join(
            f"{key} {_number(value)}" for key, value in settings.items() if key != CLIP_GROUP
        )
        names = first if count == 1 else f"{first} and {count - 1} more"
        table.add_row(str(number), names, f"{group.elements:,}", shown)
    if len(groups) > _MOST:
        table.caption = f"and {len(groups) - _MOST} more groups"
    return table


def schedule_line(optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> str:
    """Return the learning rate over a run of ``steps`` steps as one line: the first value, a curve, the last value, and
    the largest value."""
    first, last = (optimizer.lr * schedule.factor(step, steps) for step in (0, steps - 1))
    return (
        f"learning rate ({schedule.name}): {first:.2e} {curve(schedule, steps)} {last:.2e}, "
        f"at most {optimizer.lr * max(schedule.factor(s, steps) for s in _places(steps)):.2e}"
    )


def _places(steps: int) -> range:
    return range(0, steps, max(1, steps // 500))


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)

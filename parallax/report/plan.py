"""A plan as tables: its stages, their bytes and seconds by category, and the device of each rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from parallax.common.units import format_bytes, format_seconds
from parallax.errors import printable
from parallax.plan.cluster import Cluster
from parallax.plan.plan import Directive, Plan, Prediction
from parallax.plan.profile import ModelProfile
from parallax.report.profile import parameters_of

PLACEMENT = "placement.json"  # file in the run directory
MOST_ROWS = 24  # stages whose placement is shown
MOST_COLUMNS = 8  # pipeline ranks whose terms stand side by side


def plan_table(plan: Plan, profile: ModelProfile | None = None) -> Table:
    """Return a table of the stages of ``plan``, in which consecutive equal stages share a row. The caption has the
    predicted speed, bubble and budget. The title has the number of parameters if ``profile`` is given."""
    trains, prediction = plan.task.trains, plan.prediction
    parameters = f"{parameters_of(profile)} in " if profile else ""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{plan.model}: {parameters}{plan.blocks} blocks",
        caption=Text(
            f"{plan.schedule}, {_micro_batches(plan)}\n"
            f"predicted: {_speed(plan)}, bubble {prediction.bubble:.0%}, "
            f"budget {format_bytes(min(rank.budget_bytes for rank in prediction.ranks))} per device"
            + _unused(plan),
            style="table.caption",
        ),
        collapse_padding=True,
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    for heading in (
        "stage",
        "blocks",
        "replicas",
        "activations" if trains else "weights",
        "peak of budget",
        f"to {plan.tier}/step" if trains else f"in {plan.tier}",
    ):
        left = heading in ("activations", "weights")
        table.add_column(heading, justify="left" if left else "right")
    for first, last in _alike(plan):
        ranks = [
            plan.prediction.ranks[rank]
            for index in range(first, last + 1)
            for rank in plan.ranks(index)
        ]
        fullest = max(ranks, key=lambda rank: rank.peak_bytes / rank.budget_bytes)
        stage = plan.stages[first]
        each = f" ({stage.stop - stage.start} each)" if last > first else ""
        table.add_row(
            _span(first, last),
            _span(stage.start, plan.stages[last].stop - 1) + each,
            str(stage.replicas),
            _doing(plan, first),
            f"{format_bytes(fullest.peak_bytes)} ({fullest.peak_bytes / fullest.budget_bytes:.0%})",
            format_bytes(sum(r.offloaded_bytes if trains else r.tier_peak_bytes for r in ranks)),
        )
    return table


def _micro_batches(plan: Plan) -> str:
    count, rows = plan.micro_batches(plan.global_batch), plan.microbatch
    return f"{count} micro-batch{'es' if count > 1 else ''} of {rows} row{'s' if rows > 1 else ''}"


def _speed(plan: Plan) -> str:
    seconds = format_seconds(plan.prediction.step_seconds)
    if plan.task.trains:
        return f"{seconds} per step"
    return (
        f"{plan.task}, latency {seconds} per batch of {plan.global_batch} row{'s' if plan.global_batch > 1 else ''}, "
        f"{plan.rows_per_second:.4g} rows/s"
    )


def _unused(plan: Plan) -> str:
    """Return a text about devices that the plan does not use, and about replicas that never have rows; empty if there
    are neither."""
    used, text = plan.world_size, ""
    if plan.spare_devices:
        text = f"\n{used} of {used + plan.spare_devices} devices are used: with more the step would be no shorter"
    for stage in range(plan.pipeline_ranks):
        if idle := [rank for rank in plan.ranks(stage) if not plan.rows_of(rank)]:
            text += (
                f"\nstage {stage}: rank {', '.join(map(str, idle))} of {len(plan.ranks(stage))} replicas never has a "
                f"row of micro-batches of {plan.microbatch}; use trainer.microbatch={plan.stages[stage].replicas} or "
                "more, or fewer replicas"
            )
    return text


def _alike(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each series of consecutive stages that differ only in which blocks they hold."""

    def key(index: int) -> tuple[object, ...]:
        stage = plan.stages[index]
        return stage.stop - stage.start, stage.replicas, _doing(plan, index)

    for _, indices in groupby(range(len(plan.stages)), key=key):
        run = list(indices)
        yield run[0], run[-1]


def _doing(plan: Plan, index: int) -> str:
    stage = plan.stages[index]
    if not plan.task.trains:
        share = stage.parameter_offload
        return f"{share:.0%} offloaded" if share else "on the device"
    counts = [f"{d} {stage.directives.count(d)}" for d in Directive if d in stage.directives]
    shares = (
        ("optimizer states", stage.optimizer_offload),
        ("parameters", stage.parameter_offload),
    )
    return ", ".join(
        counts
        + [
            f"{'all' if share == 1 else f'{share:.0%} of'} {what} offloaded"
            for what, share in shares
            if share
        ]
    )


def _span(first: int, last: int) -> str:
    return f"{first}–{last}" if last > first else str(first)


def placement_table(plan: Plan, cluster: Cluster) -> Table:
    """Return a table with a row for each stage: its blocks, its ranks, and the devices of these ranks, which are
    numbered within their node. Of many stages, only the first and the last are shown."""
    names = [cluster.nodes[node].name for node in cluster.node_of]
    table = Table(
        box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, caption_justify="left"
    )
    for heading in ("stage", "blocks", "ranks", "node:device"):
        table.add_column(heading, justify="left" if heading == "node:device" else "right")
    stages = range(len(plan.stages))
    shown = [*stages[: MOST_ROWS // 2], *stages[-MOST_ROWS // 2 :]]
    for index in shown if len(stages) > MOST_ROWS else stages:
        stage, ranks = plan.stages[index], plan.ranks(index)
        table.add_row(
            str(index),
            _span(stage.start, stage.stop - 1),
            _spans(ranks),
            ", ".join(_devices(ranks, names)),
        )
    if len(stages) > MOST_ROWS:
        table.caption = f"{len(stages) - MOST_ROWS} more stages between"
    return table


def placement(plan: Plan, names: Sequence[str], transports: Mapping[str, str]) -> dict[str, object]:
    """Return on which node and device each rank runs, as plain data. ``names``: the node of each rank. ``transports``:
    the transport between two ranks, such as gloo, under a key such as "0 -> 1", which means from rank 0 to rank 1."""
    return {
        "stages": [
            {
                "stage": index,
                "blocks": [stage.start, stage.stop - 1],
                "ranks": [
                    {"rank": rank, "device": f"{names[rank]}:{_local(rank, names)}"}
                    for rank in plan.ranks(index)
                ],
            }
            for index, stage in enumerate(plan.stages)
        ],
        "messages": dict(transports),
    }


def save_placement(directory: Path, found: Mapping[str, object]) -> None:
    """Write ``found``, the result of :func:`placement`, beside the plan."""
    (directory / PLACEMENT).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def transports_text(transports: Mapping[str, str]) -> str:
    """Return a text with the pairs of ranks that each transport connects, such as ``gloo 0 -> 1, 1 -> 0; shared memory
    2 -> 3``. Of many pairs, only the first are named."""
    by_way: dict[str, list[str]] = {}
    for edge, transport in transports.items():
        by_way.setdefault(transport, []).append(edge)
    parts = []
    for transport, edges in by_way.items():
        more = f" and {len(edges) - 4} more" if len(edges) > 5 else ""
        parts.append(f"{transport} {', '.join(edges[: 4 if more else 5])}{more}")
    return "; ".join(parts)


def _local(rank: int, names: Sequence[str]) -> int:
    return rank - names.index(names[rank])


def _devices(ranks: Sequence[int], names: Sequence[str]) -> Iterator[str]:
    for name, found in groupby(ranks, key=lambda rank: names[rank]):
        yield f"{printable(name)}:{_spans([_local(rank, names) for rank in found])}"


def _spans(numbers: Sequence[int]) -> str:
    """Return numbers as text with ranges, such as ``0–3, 8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(_span(run[0], run[-1]) for run in runs)


def memory_table(plan: Plan) -> Table:
    """Return a table with a row for each category of memory (parameters, activations, …) and of time. For each pipeline
    rank it shows the peak bytes of the fullest rank, and the seconds of a step."""
    columns = _columns(plan.prediction)
    left_out = len(plan.prediction.stages) - sum(last - first + 1 for first, last in columns)
    table = Table(
        box=box.SIMPLE_HEAD,
        caption=f"{left_out} more stages are in the plan file" if left_out else None,
        collapse_padding=True,
        pad_edge=False,
        caption_justify="left",
    )
    table.add_column("fullest rank of")
    for first, last in columns:
        table.add_column(f"stage {_span(first, last)}", justify="right")
    shown = [plan.prediction.stages[first] for first, _ in columns]
    _add_terms(table, [stage.memory for stage in shown], format_bytes, "peak")
    tiers = [_tier_peak(plan, first) for first, _ in columns]
    if any(tiers):
        table.add_row(f"in {plan.tier}", *map(format_bytes, tiers))
    table.add_section()
    _add_terms(
        table,
        [stage.seconds for stage in shown],
        format_seconds,
        "step" if plan.task.trains else "latency",
    )
    return table


def _tier_peak(plan: Plan, pipeline_rank: int) -> int:
    return max(plan.prediction.ranks[rank].tier_peak_bytes for rank in plan.ranks(pipeline_rank))


def _columns(prediction: Prediction) -> list[tuple[int, int]]:
    """Return (first, last) of each series of consecutive pipeline ranks that can share a column: their bytes are equal,
    and their seconds are equal to a hundredth of the step. If there are too many series, return only the first series,
    the last one, and those with the largest peaks."""
    stages = prediction.stages

    def key(index: int) -> tuple[object, ...]:
        seconds = (
            round(value / (prediction.step_seconds or 1), 2)
            for value in stages[index].seconds.values()
        )
        return stages[index].memory, tuple(seconds)

    runs = []
    for _, indices in groupby(range(len(stages)), key=key):
        run = list(indices)
        runs.append((run[0], run[-1]))
    if len(runs) <= MOST_COLUMNS:
        return runs
    fullest = sorted(runs[1:-1], key=lambda run: -sum(stages[run[0]].memory.values()))
    return sorted([runs[0], runs[-1], *fullest[: MOST_COLUMNS - 2]])


def _add_terms(
    table: Table,
    columns: Sequence[dict[str, int] | dict[str, float]],
    form: Callable[[float], str],
    total: str,
) -> None:
    """Add a row to ``table`` for each category, and a row for the sum, with the heading ``total``. Categories that are
    zero in every column are left out. ``columns`` map categories to values, and ``form`` converts a value to text."""
    for term in dict.fromkeys(term for column in columns for term in column):
        if any(column.get(term) for column in columns):
            table.add_row(term, *(form(column.get(term, 0)) for column in columns))
    table.add_row(total, *(form(sum(column.values())) for column in columns), style="bold")

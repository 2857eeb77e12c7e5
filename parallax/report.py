"""What a run says when it is asked: the plan, its timeline, prediction against measurement.

Predicted and measured spans are one record, so one function draws both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parallax.events import Span, bubble_fraction
from parallax.plan.plan import Directive, Plan
from parallax.plan.profile import ModelProfile
from parallax.units import format_bytes

COLOURS = {
    "forward": "#4c86c6",
    "backward": "#57a773",
    "wait": "#e5e5e5",
    "receive": "#c9b3de",
    "send": "#e3d5f0",
    "reduce": "#d16ba5",
    "update": "#4d4d4d",
    "offload": "#f7d08a",
    "fetch": "#e8a33d",
}
LAYERS = {"forward": 4, "backward": 4, "update": 4, "wait": 5}  # above what overlaps them: transfers, at 3
DIGIT_SHARE = 0.007  # width of a digit as a share of the axis: boxes too narrow for their number have none


def timeline_png(predicted: list[Span], measured: list[Span], path: Path) -> None:
    """Draw both timelines to ``path`` (1600 × 900), predicted above measured, one axis in seconds.

    One row per rank; boxes carry their micro-batch; the grey start of a box is what the rank only waited.
    Each timeline begins at its first span; ranks of several hosts are only as aligned as their clocks.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(16, 9), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 1, sharex=True)
    length = max(_length(predicted), _length(measured)) or 1.0
    kinds: set[str] = set()
    for axes, name, spans in zip(panels, ("predicted", "measured"), (predicted, measured), strict=True):
        kinds |= _draw(axes, spans, length)
        title = f"{name}: {_length(spans):.3g} s, bubble {bubble_fraction(spans):.1%}" if spans else f"{name}: no spans"
        axes.set_title(title, loc="left", fontsize=15)
        axes.set_ylabel("rank", fontsize=13)
        axes.tick_params(labelsize=12, labelbottom=True)
    panels[1].set_xlabel("seconds", fontsize=13)
    panels[1].set_xlim(0, length * 1.005)
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in kinds]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(COLOURS), fontsize=13, frameon=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)


def _length(spans: list[Span]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0


def _draw(axes: Any, spans: list[Span], length: float) -> set[str]:
    """Draw one panel; returns the kinds that it shows."""
    origin = min((span.start for span in spans), default=0.0)
    ranks = sorted({span.rank for span in spans})
    axes.set_yticks(range(len(ranks)), ranks)
    axes.set_ylim(max(len(ranks), 1) - 0.5, -0.5)
    for spine in axes.spines.values():
        spine.set_zorder(30)
    boxes: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for span in spans:
        row, start, kind = ranks.index(span.rank), span.start - origin, span.kind.split("_")[0]
        waited = span.end - span.start if kind == "wait" else min(span.wait, span.end - span.start)
        boxes.setdefault(("wait", row), []).append((start, waited))
        boxes.setdefault((kind, row), []).append((start + waited, span.end - span.start - waited))
        wide = span.end - span.start - waited > DIGIT_SHARE * (len(str(span.micro)) + 1) * length
        if kind in ("forward", "backward") and wide:
            middle = start + (waited + span.end - span.start) / 2
            style = {
                "ha": "center",
                "va": "center",
                "color": "white",
                "fontsize": 12,
                "clip_on": True,
                "zorder": 20,
            }
            axes.text(middle, row, str(span.micro), **style)
    shown = set()
    for (kind, row), pieces in boxes.items():
        if pieces := [piece for piece in pieces if piece[1] > 0]:
            shown.add(kind)
            style = {"facecolors": COLOURS.get(kind, "#999999"), "edgecolors": "white", "linewidth": 0.6}
            axes.broken_barh(pieces, (row - 0.4, 0.8), zorder=LAYERS.get(kind, 3), **style)
    return shown


def summary_table(summary: Mapping[str, Any]) -> RenderableType:
    """The end of a run for people: what was predicted beside what was measured. Print it with rich.

    ``summary`` is the content of ``summary.json``; a value that is missing or null is shown as a dash.
    """
    run = Table(title="predicted and measured", box=box.SIMPLE, title_justify="left", title_style="bold")
    for column in ("", "predicted", "measured", "measured / predicted"):
        run.add_column(column, justify="left" if not column else "right")
    step = (summary.get("predicted_step_seconds"), summary.get("step_seconds_median"))
    run.add_row("step seconds", _cell(step[0], "{:.3f}"), _cell(step[1], "{:.3f}"), _ratio(*step))
    bubble = (summary.get("bubble_predicted"), summary.get("bubble_measured"))
    run.add_row("bubble", _cell(bubble[0], "{:.1%}"), _cell(bubble[1], "{:.1%}"), _ratio(*bubble))
    ranks = Table(title="ranks", box=box.SIMPLE, padding=(0, 1, 0, 0), title_justify="left", title_style="bold")
    for column in ("rank", "stage", "replica", "budget", "predicted\npeak", "measured\npeak"):
        ranks.add_column(column, justify="right")
    for column in ("offloaded\nper step", "stall\nper step"):
        ranks.add_column(column, justify="right")
    for rank in summary.get("ranks") or []:
        ranks.add_row(
            *(_cell(rank.get(key), "{}") for key in ("rank", "stage", "replica")),
            *(_size(rank.get(key)) for key in ("budget_bytes", "predicted_peak_bytes", "measured_peak_bytes")),
            _size(rank.get("offloaded_bytes_per_step")),
            _cell(rank.get("stall_seconds_per_step"), "{:.3f} s"),
        )
    return Group(Text(_outcome(summary)), run, ranks)


def _outcome(summary: Mapping[str, Any]) -> str:
    """One sentence: steps, loss from and to, validation beside the unigram entropy, speed."""
    first, last, validation, entropy = (
        _cell(summary.get(key), "{:.4f}") for key in ("loss_first", "loss_last", "validation_loss", "unigram_entropy")
    )
    speed = _cell(summary.get("tokens_per_second"), "{:,.0f}")
    return (
        f"{_cell(summary.get('steps'), '{}')} steps: loss {first} to {last}, validation {validation} "
        f"(unigram entropy {entropy}), {speed} tokens/s"
    )


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _size(value: Any) -> str:
    return "-" if value is None else format_bytes(value)


def _ratio(predicted: float | None, measured: float | None) -> str:
    return f"{measured / predicted:.2f}" if predicted and measured is not None else "-"


def plan_table(plan: Plan, profile: ModelProfile) -> Table:
    """The plan for people: a row per stage, the prediction in the caption."""
    prediction = plan.prediction
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{plan.model}: {sum(block.parameters for block in profile.blocks):,} parameters in {plan.blocks} blocks",
        caption=(
            f"{plan.schedule}, {plan.micro_batches(plan.global_batch)} micro-batches of {plan.microbatch} row(s); "
            f"predicted: {prediction.step_seconds:.3f} s per step, bubble {prediction.bubble:.0%}, "
            f"budget {format_bytes(min(rank.budget_bytes for rank in prediction.ranks))} per device"
        ),
        collapse_padding=True,
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("stage", "blocks", "replicas", "activations", "peak of budget", f"to {plan.tier}/step"):
        table.add_column(heading, justify="left" if heading == "activations" else "right")
    for index, stage in enumerate(plan.stages):
        ranks = [prediction.ranks[rank] for rank in plan.ranks(index)]
        counts = [f"{d} {stage.directives.count(d)}" for d in Directive if d in stage.directives]
        fullest = max(ranks, key=lambda rank: rank.peak_bytes / rank.budget_bytes)
        table.add_row(
            str(index),
            f"{stage.start}–{stage.stop - 1}" if stage.stop - stage.start > 1 else str(stage.start),
            str(stage.replicas),
            ", ".join(counts),
            f"{format_bytes(fullest.peak_bytes)} ({fullest.peak_bytes / fullest.budget_bytes:.0%})",
            format_bytes(sum(rank.offloaded_bytes for rank in ranks)),
        )
    return table

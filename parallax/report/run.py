"""The predicted and measured figures of a run that has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from parallax.common.units import format_bytes, format_seconds


def summary_table(summary: Mapping[str, Any]) -> RenderableType:
    """Return the predicted and measured figures of a run as a table for rich.

    ``summary`` is the content of ``summary.json``; values that are missing or null are shown as a dash.
    """
    run = Table(
        title="predicted and measured", box=box.SIMPLE, title_justify="left", title_style="bold"
    )
    for column in ("", "predicted", "measured", "measured / predicted"):
        run.add_column(column, justify="left" if not column else "right")
    step = (summary.get("predicted_step_seconds"), summary.get("step_seconds_median"))
    run.add_row("step", *map(_seconds, step), _ratio(*step))
    bubble = (summary.get("bubble_predicted"), summary.get("bubble_measured"))
    run.add_row("bubble", _cell(bubble[0], "{:.1%}"), _cell(bubble[1], "{:.1%}"), "")
    ranks = Table(
        title="ranks",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title_style="bold",
    )
    for column in ("rank", "stage", "replica", "budget", "predicted\npeak", "measured\npeak"):
        ranks.add_column(Text(column), justify="right")
    for column in ("offloaded\nper step", "stall\nper step"):
        ranks.add_column(Text(column), justify="right")
    for rank in summary.get("ranks") or []:
        ranks.add_row(
            *(_cell(rank.get(key), "{}") for key in ("rank", "stage", "replica")),
            *(
                _size(rank.get(key))
                for key in ("budget_bytes", "predicted_peak_bytes", "measured_peak_bytes")
            ),
            _size(rank.get("offloaded_bytes_per_step")),
            _seconds(rank.get("stall_seconds_per_step")),
        )
    return Group(Text(_outcome(summary)), *map(Text, _utilization(summary)), run, ranks)


def _utilization(summary: Mapping[str, Any]) -> list[str]:
    """Return a line on the model FLOP utilization; an empty list if it is unknown. If it is above 100%, the line says
    that the assumed peak is too low."""
    share, peak = summary.get("mfu"), summary.get("peak_flops")
    if not share or not peak:
        return []
    wrong = "; more than all of it: the peak was measured on a busy machine" if share > 1 else ""
    return [
        f"MFU {share:.1%} of {peak / 1e12:.3g} TFLOP/s per rank: {summary.get('peak_source')}{wrong}"
    ]


_ENDS = {
    "rows": "; the rows ended there",
    "patience": "; the validation stopped improving",
    "target": "; the target was reached",
}


def _outcome(summary: Mapping[str, Any]) -> str:
    """Return one sentence with the number of steps, the first and last loss, the validation loss (for text also the
    unigram entropy), and the speed."""
    first, last, validation, entropy = (
        _cell(summary.get(key), "{:.4f}")
        for key in ("loss_first", "loss_last", "validation_loss", "unigram_entropy")
    )
    baseline = (
        f" (token frequencies alone give {entropy})" if summary.get("unigram_entropy") else ""
    )
    steps, now = summary.get("steps"), summary.get("steps_of_start")
    since = f" ({now} since it resumed)" if steps and now and now < steps else ""
    ended = _ENDS.get(str(summary.get("ended")), "")
    if summary.get("ended") == "callback":
        ended = f"; ended by {summary.get('callback')}"
    restarts = summary.get("restarts") or 0
    again = f"; restarts: {restarts}, steps taken again: {summary.get('lost_steps') or 0}"
    return (
        f"{_cell(steps, '{}')} steps{since}{ended}: loss {first} to {last}, "
        f"validation {validation}{baseline}{_metrics(summary)}, "
        f"{_speed(summary)}{_exchanged(summary)}{_staleness(summary)}{again if restarts else ''}"
    )


def _metrics(summary: Mapping[str, Any]) -> str:
    """Return the metrics of the held-out rows as text."""
    found = {
        key.removeprefix("validation_"): n
        for key, n in summary.items()
        if key.startswith("validation_")
    }
    return "".join(f", {key} {_cell(n, '{:.4f}')}" for key, n in found.items() if key != "loss")


def _speed(summary: Mapping[str, Any]) -> str:
    """Return the speed as text: tokens per second if rows are tokens, rows per second otherwise."""
    tokens, rows = summary.get("tokens_per_second"), summary.get("rows_per_second")
    if tokens is not None:
        return f"{tokens:,.0f} tokens/s"
    return f"{_cell(rows, '{:,.1f}' if rows and rows < 100 else '{:,.0f}')} rows/s"


def _exchanged(summary: Mapping[str, Any]) -> str:
    """Return how many bytes a rank has exchanged with its replicas, as text; empty if they sum gradients in every
    step."""
    size, now = summary.get("synced_bytes"), summary.get("steps_of_start")
    if not size or not now:
        return ""
    what = "gradients and weights" if summary.get("staleness") else "weights"
    return f", {format_bytes(round(size / now))} of {what} exchanged per step"


def _staleness(summary: Mapping[str, Any]) -> str:
    """Return how many updates old the weights of gradients were, as text; empty if replicas are not asynchronous."""
    counts = {int(updates): count for updates, count in (summary.get("staleness") or {}).items()}
    total = sum(counts.values())
    found = (f"{updates}: {counts[updates] / total:.1%}" for updates in sorted(counts))
    return f", gradients by staleness {', '.join(found)}" if total else ""


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _size(value: Any) -> str:
    return "-" if value is None else format_bytes(value)


def _seconds(value: Any) -> str:
    return "-" if value is None else format_seconds(value)


def _ratio(predicted: float | None, measured: float | None) -> str:
    return f"{measured / predicted:.2f}" if predicted and measured is not None else "-"

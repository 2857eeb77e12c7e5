"""What a run shows: a line for people, numbers for programs, curves, and prediction against measurement.

Nothing here is asked by the rest of Parallax; everything is fed from above with what already happened. A
timeline is drawn from spans; predicted and measured spans are one record, so one function draws both.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parallax.errors import ConfigError
from parallax.events import Span, bubble_fraction
from parallax.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """What a run writes beside ``metrics.jsonl``: TensorBoard curves, every rank's actions as events."""

    tensorboard: bool = True
    events: bool = True


# --------------------------------------------------------------------------------------------- metrics


class Curves(Protocol):
    """Where scalars go to become curves; TensorBoard's own writer has this shape."""

    def add_scalar(self, tag: str, data: float, step: int) -> None:
        """One point."""

    def close(self) -> None:
        """Write what is left."""


class NoCurves:
    """Curves that nobody asked for."""

    def add_scalar(self, tag: str, data: float, step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _tensorboard(directory: Path) -> Curves:
    try:
        from tensorboard.summary import Writer  # 0.3 s, and torch's own writer 1.7 s: only when asked
    except ImportError as error:
        raise ConfigError(
            f"logger.tensorboard=true: tensorboard cannot be imported ({error}); "
            "pip install tensorboard, or set logger.tensorboard=false"
        ) from error
    return Writer(str(directory))


class MetricsLog:
    """Appends records to ``metrics.jsonl`` in ``directory``, and their numbers to ``tensorboard/``.

    Each line is flushed, so a killed run loses at most the line it was writing; that half line is cut off
    when the file is opened again. A run resumed from an older checkpoint repeats steps: the later line of a
    step counts.
    """

    def __init__(self, directory: Path, logger: LoggerConfig) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        _cut_half_line(self.path)
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        self._curves: Curves = _tensorboard(directory / "tensorboard") if logger.tensorboard else NoCurves()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append ``record``, which has a ``step``; numbers that are not finite become null."""
        plain = {key: value if _is_json(value) else None for key, value in record.items()}
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                self._curves.add_scalar(key, float(value), int(record["step"]))

    def close(self) -> None:
        """Close the file and the curves."""
        self._file.close()
        self._curves.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_json(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _cut_half_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl`` in order; a last line cut short by a crash is skipped."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


# -------------------------------------------------------------------------------------------- progress


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """What people see of one step.

    ``rate``: units per second. ``peak_bytes`` and ``budget_bytes``: of the rank whose device is fullest.
    ``stall_seconds``: spent waiting for swapped data, on the rank that waited most.
    """

    step: int
    loss: float
    rate: float
    unit: str = "tokens"
    peak_bytes: int
    budget_bytes: int
    stall_seconds: float = 0.0


class Progress:
    """A live line on a terminal; otherwise one plain line per step shown, for logs and batch systems.

    Steps count from ``first_step`` (1 for a fresh run) to ``total_steps``. The time left comes from the last
    20 lines, so a slow first step or a checkpoint does not spoil it for long.
    """

    def __init__(self, total_steps: int, first_step: int = 1, *, file: TextIO | None = None) -> None:
        self._total = total_steps
        self._times: deque[tuple[float, int]] = deque([(time.monotonic(), first_step - 1)], maxlen=20)
        console = Console(file=file or sys.stdout)
        self._line: _LiveLine | _PlainLines = (
            _LiveLine(console) if console.is_terminal else _PlainLines(console)
        )

    def show(self, line: StepLine) -> None:
        """Show a step that has ended."""
        self._times.append((time.monotonic(), line.step))
        self._line.show(self._text(line))

    def note(self, text: str) -> None:
        """Print a line that stays: an evaluation, a checkpoint."""
        self._line.note(text)

    def __enter__(self) -> Progress:
        self._line.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._line.stop()

    def _text(self, line: StepLine) -> str:
        width = len(str(self._total))
        share = line.peak_bytes / line.budget_bytes if line.budget_bytes else 0.0
        return "  ".join(
            [
                f"step {line.step:>{width}}/{self._total}",
                f"loss {line.loss:.4f}",
                f"{_short(line.rate)} {line.unit}/s",
                f"memory {format_bytes(line.peak_bytes)} of {format_bytes(line.budget_bytes)} ({share:.0%})",
                f"stall {line.stall_seconds:.2f} s",
                f"{_clock(self._seconds_left(line.step))} left",
            ]
        )

    def _seconds_left(self, step: int) -> float:
        start, first = self._times[0]
        done = step - first
        return (time.monotonic() - start) / done * (self._total - step) if done > 0 else math.nan


class _LiveLine:
    """One line that is rewritten in place; notes scroll above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)  # no thread; a line appears when there is news

    def start(self) -> None:
        self._live.start()

    def show(self, text: str) -> None:
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def note(self, text: str) -> None:
        self._live.console.print(Text(text))

    def stop(self) -> None:
        self._live.stop()


class _PlainLines:
    """One line after the other, flushed, without control characters."""

    def __init__(self, console: Console) -> None:
        self._file = console.file

    def start(self) -> None:
        """Nothing to prepare."""

    def show(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def note(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def stop(self) -> None:
        """Nothing to restore."""


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.1f}"


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# -------------------------------------------------------------------------------------------- timeline

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
        title = (
            f"{name}: {_length(spans):.3g} s, bubble {bubble_fraction(spans):.1%}"
            if spans
            else f"{name}: no spans"
        )
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


# --------------------------------------------------------------------------------------------- summary


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
    ranks = Table(
        title="ranks", box=box.SIMPLE, padding=(0, 1, 0, 0), title_justify="left", title_style="bold"
    )
    for column in ("rank", "stage", "replica", "budget", "predicted\npeak", "measured\npeak"):
        ranks.add_column(column, justify="right")
    for column in ("offloaded\nper step", "stall\nper step"):
        ranks.add_column(column, justify="right")
    for rank in summary.get("ranks") or []:
        ranks.add_row(
            *(_cell(rank.get(key), "{}") for key in ("rank", "stage", "replica")),
            *(
                _size(rank.get(key))
                for key in ("budget_bytes", "predicted_peak_bytes", "measured_peak_bytes")
            ),
            _size(rank.get("offloaded_bytes_per_step")),
            _cell(rank.get("stall_seconds_per_step"), "{:.3f} s"),
        )
    return Group(Text(_outcome(summary)), run, ranks)


def _outcome(summary: Mapping[str, Any]) -> str:
    """One sentence: steps, loss from and to, validation beside the unigram entropy, speed."""
    first, last, validation, entropy = (
        _cell(summary.get(key), "{:.4f}")
        for key in ("loss_first", "loss_last", "validation_loss", "unigram_entropy")
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

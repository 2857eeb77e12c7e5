"""Draw timelines: one row for each rank, for predicted and measured spans (times of actions) alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallax.common.events import Span, bubble_fraction
from parallax.report.figure import new_figure, save_png

COLOURS = {
    "forward": "#4c86c6",
    "backward": "#57a773",
    "backward_weight": "#9fd3b0",
    "wait": "#e5e5e5",
    "receive": "#c9b3de",
    "send": "#e3d5f0",
    "reduce": "#d16ba5",
    "update": "#4d4d4d",
    "fetch": "#e8a33d",
}
# The drawing order: computing is drawn over transfers, whose layer is 3.
LAYERS = {"forward": 4, "backward": 4, "backward_weight": 4, "update": 4, "wait": 5}
# Width of a digit as a share of the axis: boxes too narrow for their number have none.
DIGIT_SHARE = 0.007


def timeline_png(predicted: list[Span], measured: list[Span], path: Path) -> None:
    """Draw both timelines to ``path`` (1600 × 900), the predicted one above the measured one, on one axis in seconds.
    If ``measured`` is empty, the predicted timeline fills the picture.

    Each box is labelled with its micro-batch. Its grey part at the start is the time that the rank waited. Each
    timeline begins at its first span. Ranks on several hosts are aligned only as well as the clocks of the hosts agree.
    """
    from matplotlib.patches import Patch

    figure = new_figure()
    shown = [("predicted", predicted), ("measured", measured)][
        : 2 if measured or not predicted else 1
    ]
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    length = max(_length(predicted), _length(measured)) or 1.0
    kinds: set[str] = set()
    for axes, (name, spans) in zip(panels, shown, strict=True):
        kinds |= _draw(axes, spans, length)
        title = (
            f"{name}: {_length(spans):.3g} s, bubble {bubble_fraction(spans):.1%}"
            if spans
            else f"{name}: no spans"
        )
        axes.set_title(title, loc="left", fontsize=15)
        axes.set_ylabel("rank", fontsize=13)
        axes.tick_params(labelsize=12, labelbottom=True)
    panels[-1].set_xlabel("seconds", fontsize=13)
    panels[-1].set_xlim(0, length * 1.005)
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in kinds]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(COLOURS), fontsize=13, frameon=False
    )
    save_png(figure, path)


def _length(spans: list[Span]) -> float:
    return max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0


def _kind(span: Span) -> str:
    """Return the kind of action that determines the colour of a span. Sends and receives of both directions have one
    colour."""
    return span.kind if span.kind in COLOURS else span.kind.split("_")[0]


def _draw(axes: Any, spans: list[Span], length: float) -> set[str]:
    """Draw one panel of ``length`` seconds; return the kinds of action that it shows."""
    origin = min((span.start for span in spans), default=0.0)
    ranks = sorted({span.rank for span in spans})
    axes.set_yticks(range(len(ranks)), ranks)
    axes.set_ylim(max(len(ranks), 1) - 0.5, -0.5)
    for spine in axes.spines.values():
        spine.set_zorder(30)
    boxes: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for span in spans:
        row, start, kind = ranks.index(span.rank), span.start - origin, _kind(span)
        waited = span.end - span.start if kind == "wait" else min(span.wait, span.end - span.start)
        boxes.setdefault(("wait", row), []).append((start, waited))
        boxes.setdefault((kind, row), []).append((start + waited, span.end - span.start - waited))
        wide = span.end - span.start - waited > DIGIT_SHARE * (len(str(span.micro)) + 1) * length
        if kind in ("forward", "backward", "backward_weight") and wide:
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
            style = {
                "facecolors": COLOURS.get(kind, "#999999"),
                "edgecolors": "white",
                "linewidth": 0.6,
            }
            axes.broken_barh(pieces, (row - 0.4, 0.8), zorder=LAYERS.get(kind, 3), **style)
    return shown

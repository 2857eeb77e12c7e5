"""Draw the memory that a stage's swap uses during one step, on the device and in the offload tier, above a timeline of
the actions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parallax.common.documents import DOCUMENT_BYTES, read_json
from parallax.common.events import Span, span_of
from parallax.common.units import format_bytes
from parallax.errors import ConfigError, printable
from parallax.report.figure import new_figure, save_png
from parallax.report.timeline import COLOURS

DEVICE, TIER, LIMIT = "#2b5c8a", "#c77f1a", "#b03a2e"
DEVICE_COLUMN, TIER_COLUMN = 1, 2  # their indices in a sample
MOST_STAGES = 6  # stages in a figure, at most
_STRIP = 0.05  # height of the actions below the curves, as a share of the panel
_ACTIONS = ("forward", "backward", "backward_weight", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """The memory that one rank's swap uses during one step.

    ``samples``: (time in seconds, bytes on the device, bytes in the offload tier) at every change. ``spans``: the times
    of the actions, on the same clock as the samples. ``limit_bytes``: the swap's limit on the device.
    """

    rank: int
    stage: int
    replica: int
    step: int
    limit_bytes: int
    samples: tuple[tuple[float, int, int], ...]
    spans: tuple[Span, ...]

    def high(self, column: int) -> int:
        """Return the largest value at index ``column`` of the samples: 1 for the bytes on the device, 2 for the bytes
        in the offload tier."""
        return int(max((sample[column] for sample in self.samples), default=0))

    @property
    def bounds(self) -> tuple[float, float]:
        """Return start and end of the step in seconds; earlier samples belong to the previous step."""
        changes = [sample[0] for sample in self.samples]
        start = min([span.start for span in self.spans] or changes, default=0.0)
        return start, max([span.end for span in self.spans] + changes, default=start)

    def save(self, directory: Path) -> None:
        """Write the samples and spans as JSON into the run ``directory``."""
        occupancy_path(directory, self.rank).write_text(
            json.dumps(asdict(self) | {"spans": [span._asdict() for span in self.spans]}),
            encoding="utf-8",
        )

    @classmethod
    def load(cls, directory: Path, rank: int) -> Occupancy:
        """Return what ``rank`` saved in the run ``directory``. Raises :class:`ConfigError` if its file is missing or
        invalid."""
        path = occupancy_path(directory, rank)
        try:
            found = read_json(path, DOCUMENT_BYTES)
            found["samples"] = tuple(
                (float(s), int(device), int(tier)) for s, device, tier in found["samples"]
            )
            found["spans"] = tuple(map(span_of, found["spans"]))
            return cls(**found)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path} is missing: rank {rank} wrote it on its own host; copy it from there"
            ) from error
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            raise ConfigError(
                f"cannot read {printable(str(path))} ({printable(str(error))[:200]}): train again to write it anew"
            ) from error


def occupancy_path(directory: Path, rank: int) -> Path:
    """Return the path of the file in the run ``directory`` to which :meth:`Occupancy.save` writes for ``rank``."""
    return directory / f"swap-rank{rank}.json"


def computed(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans that a picture shows: forwards, backwards, weight-gradient passes and updates."""
    return tuple(span for span in spans if span.kind in _ACTIONS)


def occupancy_png(steps: Sequence[Occupancy], path: Path) -> None:
    """Draw a picture (1600 × 900) to ``path``, with one row for each stage. The left column shows the bytes on the
    device, with a line at their limit, and the right column the bytes in the offload tier. The actions are drawn below
    both curves. Seconds count from the first action. If there are more than ``MOST_STAGES`` stages, those closest to
    their limit are drawn. ``steps`` must not be empty."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = fullest(steps)
    figure = new_figure()
    rows = figure.subplots(len(shown), 2, sharex=True, squeeze=False)
    for (device, tier), step in zip(rows, shown, strict=True):
        name = f"stage {step.stage}, rank {step.rank}, step {step.step}"
        _draw(device, step, DEVICE_COLUMN, DEVICE)
        device.axhline(step.limit_bytes, color=LIMIT, linewidth=2, linestyle="--")
        high = format_bytes(step.high(DEVICE_COLUMN))
        device.set_title(
            f"{name}: device {high} of {format_bytes(step.limit_bytes)}", loc="left", fontsize=14
        )
        _draw(tier, step, TIER_COLUMN, TIER)
        tier.set_title(f"tier {format_bytes(step.high(TIER_COLUMN))}", loc="left", fontsize=14)
    length = max(step.bounds[1] - step.bounds[0] for step in shown) or 1.0
    for axes in rows[-1]:
        axes.set_xlabel("seconds", fontsize=13)
        axes.set_xlim(0, length)
    lines: list[Any] = [
        Line2D([], [], color=DEVICE, linewidth=2, label="offloadable activations on the device")
    ]
    lines += [Line2D([], [], color=LIMIT, linewidth=2, linestyle="--", label="their limit")]
    lines += [Line2D([], [], color=TIER, linewidth=2, label="in the offload tier")]
    kinds = {span.kind for step in shown for span in step.spans}
    lines += [Patch(color=COLOURS[kind], label=kind) for kind in _ACTIONS if kind in kinds]
    figure.legend(
        handles=lines, loc="outside lower center", ncols=len(lines), fontsize=13, frameon=False
    )
    save_png(figure, path)


def fullest(steps: Sequence[Occupancy]) -> list[Occupancy]:
    """Return at most ``MOST_STAGES`` of ``steps``, ordered by stage. If there are more, those whose bytes on the device
    come closest to their limit are returned."""
    order = sorted(steps, key=lambda step: -step.high(DEVICE_COLUMN) / (step.limit_bytes or 1))
    return sorted(order[:MOST_STAGES], key=lambda step: step.stage)


def _draw(axes: Any, step: Occupancy, column: int, colour: str) -> None:
    """Draw the bytes at index ``column`` of the samples of ``step`` as a curve over time, above a strip with the
    actions. Bytes stay constant until the next sample."""
    start, end = step.bounds
    seconds = [sample[0] - start for sample in step.samples]
    sizes = [sample[column] for sample in step.samples]
    if sizes:
        seconds.append(end - start)
        sizes.append(sizes[-1])
    axes.fill_between(seconds, sizes, step="post", color=colour, alpha=0.15, linewidth=0)
    axes.plot(seconds, sizes, drawstyle="steps-post", color=colour, linewidth=2)
    top = max(step.high(column), step.limit_bytes if column == DEVICE_COLUMN else 0, 1)
    axes.set_ylim(-2 * _STRIP * top, 1.1 * top)
    ticks = range(0, round(1.1 * top) + 1, 2 ** max(0, math.ceil(math.log2(top / 5))))
    axes.set_yticks(ticks, [format_bytes(size) for size in ticks])
    axes.tick_params(labelsize=12, labelbottom=True)
    for kind in _ACTIONS:
        pieces = [
            (span.start - start, span.end - span.start) for span in step.spans if span.kind == kind
        ]
        style = {"facecolors": COLOURS[kind], "edgecolors": "white", "linewidth": 0.4}
        axes.broken_barh(pieces, (0, _STRIP), transform=axes.get_xaxis_transform(), **style)

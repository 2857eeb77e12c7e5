"""What a run shows: metrics survive a crash, lines suit their reader, pictures and tables tell it all."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import threading
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parallax.common.events import Span
from parallax.report import COLOURS, summary_table, timeline_png
from parallax.train.monitor import (
    LoggerConfig,
    MetricsLog,
    Progress,
    StepLine,
)
from tests.results import read_metrics

QUIET = LoggerConfig(to=[])


def line(step: int, **values: Any) -> StepLine:
    return StepLine(
        **{
            "step": step,
            "loss": 2.5,
            "rate": 12345.0,
            "peak_bytes": 3 << 20,
            "budget_bytes": 4 << 20,
        }
        | values
    )


def test_metrics_are_flushed_line_by_line(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "run", QUIET) as log:
        log.write({"step": 1, "loss": 2.5, "note": "first", "validation_loss": None})
        assert read_metrics(log.path) == [
            {"step": 1, "loss": 2.5, "note": "first", "validation_loss": None}
        ]
    assert sorted(os.listdir(tmp_path / "run")) == ["metrics.jsonl"]


def test_metrics_append_after_a_crash_in_the_middle_of_a_line(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, QUIET) as log:
        log.write({"step": 1})
    with log.path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert read_metrics(log.path) == [{"step": 1}]
    with MetricsLog(tmp_path, QUIET) as log:
        log.write({"step": 2})
    assert read_metrics(log.path) == [{"step": 1}, {"step": 2}]


def test_metrics_stay_json_when_numbers_are_not_finite(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, QUIET) as log:
        log.write({"step": 1, "loss": float("nan"), "norm": float("inf")})
    assert json.loads(log.path.read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "norm": None,
    }


def test_tensorboard_reads_the_curves_also_after_resume(tmp_path: Path) -> None:
    threads = threading.active_count()
    for steps in ((1, 2), (3,)):
        with MetricsLog(tmp_path, LoggerConfig()) as log:
            for step in steps:
                log.write({"step": step, "loss": 3.0 - step, "note": "text", "done": True})
    assert threading.active_count() == threads
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert curves.Tags()["tensors"] == ["loss"]
    # Files of one second are read in the order of their names.
    assert sorted(event.step for event in curves.Tensors("loss")) == [1, 2, 3]


def test_plain_lines_without_a_terminal() -> None:
    text = io.StringIO()
    with Progress(60, 31, file=text) as progress:
        progress.show(line(31, offloaded_bytes=12 << 20, overlap=0.974, stall_seconds=0.5))
        progress.note("checkpoint [31] saved")
        progress.show(line(60, unit="rows"))
    first, note, last = text.getvalue().splitlines()
    assert first.startswith(
        "step 31/60  loss 2.5000  12.3k tokens/s  0:00 left  memory 3.0 MiB of 4.0 MiB (75%)  swap "
    )
    assert first.endswith("  swap 12.0 MiB (97% overlapped, 0.500 s stalled)")
    assert note == "checkpoint [31] saved"
    assert "rows/s" in last
    assert "swap" not in last, "no stage swaps"
    assert "  0:00 left  " in last
    assert text.getvalue().isascii()


@pytest.mark.parametrize(
    ("steps", "first", "print_every", "lines"),
    [
        (60, 1, "auto", 60),  # few enough
        (2000, 1, "auto", 110),  # ten, and each twentieth
        (2000, 1991, "auto", 10),
        (100_003, 1, "auto", 110),
        (2000, 1, 1, 2000),
        (2000, 1, 500, 4),
        (7, 1, 500, 1),  # the last one
    ],
)
def test_long_runs_print_about_a_hundred_lines(
    steps: int, first: int, print_every: int | str, lines: int
) -> None:
    text = io.StringIO()
    with Progress(steps, first, print_every=print_every, file=text) as progress:
        for step in range(first, steps + 1):
            progress.show(line(step))
    shown = [int(each.split("/")[0].split()[1]) for each in text.getvalue().splitlines()]
    assert len(shown) == lines
    assert shown[-1] == steps
    if print_every == "auto":
        assert shown[:7] == list(range(first, first + 7))


def test_lines_and_metrics_say_the_learning_rate() -> None:
    text = io.StringIO()
    with Progress(60, file=text) as progress:
        progress.show(line(1, learning_rate=3e-4))
    assert "  lr 3.00e-04  " in text.getvalue()


def test_time_left_follows_the_measured_pace() -> None:
    text = io.StringIO()
    with Progress(10_001, 1, file=text) as progress:
        time.sleep(0.05)
        progress.show(line(1))
    minutes, seconds = text.getvalue().partition(" left")[0].split()[-1].split(":")
    assert 500 <= int(minutes) * 60 + int(seconds) < 2000  # 10,000 steps of 0.05 s and a little


def output_of(reader: int) -> str:
    """All that was written to the other end, which is closed: a pty gives it in pieces, and an error at the end."""
    pieces = []
    with contextlib.suppress(OSError):
        while piece := os.read(reader, 65536):
            pieces.append(piece)
    os.close(reader)
    return b"".join(pieces).decode()


def test_a_terminal_gets_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    reader, writer = pty.openpty()
    threads = threading.active_count()
    with os.fdopen(writer, "w") as terminal, Progress(3, file=terminal) as progress:
        progress.show(line(1))
        progress.note("evaluated")
        progress.show(line(2))
    shown = output_of(reader)
    assert threading.active_count() == threads
    assert "step 2/3" in shown
    assert "evaluated" in shown
    assert "\x1b[2K" in shown  # the line before was erased, not followed


def pipeline(stretch: float = 1.0, origin: float = 0.0) -> list[Span]:
    """Two stages, two micro-batches; stage 1 waits for each."""
    spans = []
    for rank, begin in ((0, 0.0), (1, 1.0)):
        for micro in (0, 1):
            start = begin + micro
            spans.append(Span(rank, 1, "receive_activation", rank, micro, start, start + 0.2, 0.2))
            spans.append(Span(rank, 1, "forward", rank, micro, start, start + 1))
            spans.append(Span(rank, 1, "backward", rank, micro, start + 3, start + 4, 0.5))
        spans.append(Span(rank, 1, "update", rank, -1, 6, 6.5))
    return [
        span._replace(
            start=origin + span.start * stretch,
            end=origin + span.end * stretch,
            wait=span.wait * stretch,
        )
        for span in spans
    ]


def pixels(path: Path) -> np.ndarray:
    return (matplotlib.image.imread(path)[:, :, :3] * 255).round().astype(int)


def count(image: np.ndarray, kind: str) -> int:
    colour = [int(COLOURS[kind][at : at + 2], 16) for at in (1, 3, 5)]
    return int((image == colour).all(axis=2).sum())


def test_timeline_shows_both_runs_in_their_colours(tmp_path: Path) -> None:
    timeline_png(pipeline(), pipeline(stretch=1.3, origin=5000.0), tmp_path / "timeline.png")
    assert os.listdir(tmp_path) == ["timeline.png"]
    image = pixels(tmp_path / "timeline.png")
    assert image.shape == (900, 1600, 3)
    top, bottom = image[:430], image[430:780]
    for kind in ("forward", "backward", "wait", "update"):
        assert count(top, kind) > 2000
        # The measured run took 1.3 times as long.
        assert count(bottom, kind) > 1.1 * count(top, kind)


@pytest.mark.parametrize("measured", [[], [Span(0, 1, "dance", 0, 0, 1.0, 1.0)]])
def test_timeline_without_much_to_show(tmp_path: Path, measured: list[Span]) -> None:
    timeline_png([], measured, tmp_path / "timeline.png")
    assert pixels(tmp_path / "timeline.png").shape == (900, 1600, 3)


def test_summary_table_has_prediction_beside_measurement() -> None:
    rank = {
        "rank": 0,
        "stage": 1,
        "replica": 2,
        "budget_bytes": 8 << 30,
        "predicted_peak_bytes": 7 << 30,
    }
    rank |= {
        "measured_peak_bytes": 6 << 30,
        "offloaded_bytes_per_step": 5 << 20,
        "stall_seconds_per_step": 0.25,
    }
    summary = {
        "steps": 60,
        "loss_first": 5.5,
        "loss_last": 2.25,
        "validation_loss": None,
        "ranks": [rank],
    }
    summary |= {
        "predicted_step_seconds": 0.5,
        "step_seconds_median": 0.6,
        "tokens_per_second": 12345.6,
    }
    summary |= {"bubble_predicted": 0.25, "bubble_measured": 0.3, "unigram_entropy": 3.24}
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(summary_table(summary))
    text = " ".join(console.export_text().split())
    assert (
        "60 steps: loss 5.5000 to 2.2500, validation - (token frequencies alone give 3.2400), 12,346 tokens/s"
        in text
    )
    resumed = summary | {"steps_of_start": 20}
    console.print(summary_table(resumed))
    assert "60 steps (20 since it resumed): loss" in console.export_text()
    assert "step 500 ms 600 ms 1.20" in text
    assert "bubble 25.0% 30.0%" in text
    assert "0 1 2 8.0 GiB 7.0 GiB 6.0 GiB 5.0 MiB 250 ms" in text


def test_summary_table_of_a_run_without_measurements() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(summary_table({}))
    assert "- steps" in console.export_text()

"""Does a run take the time and memory that its plan predicted?  ``python -m benchmarks.prediction [--json] [--quick]
[--only TEXT] [--rounds N] [--output FILE.md]``

Every configuration is planned and trained for a few steps as a user would: ``parallax train`` with the choice of
stages, replicas, activations and micro-batches forced, in processes of its own. The plan's step is compared with the
lower quartile of the steps after the warm-up, because what else the machine does only ever makes a step longer; the
predicted peak with the measured one, on the rank that came closest to its prediction or went furthest beyond it. An
evaluation and a checkpoint stand between the steps, as in any training. All configurations have a budget. A predicted
peak counts the freed memory that malloc keeps while the budget has free bytes.

Each run measures model and machine again, as a user's first run does. Times are those of a
machine that does nothing else; peaks do not depend on it. Where a machine's speed changes from minute to minute,
``--rounds`` go through all configurations several times, and compare the
median prediction with the lower quartile of the steps of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from parallax.common.units import format_bytes
from parallax.train.record import WARM_UP

STEPS = 8
ROOMY = "4GiB"
COMMON = [
    f"trainer.steps={STEPS}",
    f"trainer.eval_every={STEPS // 2}",
    "trainer.eval_batches=1",
    f"trainer.checkpoint_every={STEPS // 2}",
    "logger=none",
    "data.max_bytes=1MiB",
    "plan=auto",
]
MODELS = {
    "small": ["model.layers=4", "model.hidden=128", "model.heads=4", "model.sequence=128"],
    "medium": ["model.layers=6", "model.hidden=256", "model.heads=4", "model.sequence=256"],
    "wide": ["model.layers=3", "model.hidden=512", "model.heads=8", "model.sequence=128"],
    "mlp": ["model=mlp", "model.layers=8", "model.hidden=1024"],
}
MODEL_NAMES = {
    "small": "GPT 4 × 128",
    "medium": "GPT 6 × 256",
    "wide": "GPT 3 × 512",
    "mlp": "MLP 8 × 1024",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration: a model and the planner's settings. ``replicas`` has one number per stage."""

    model: str
    replicas: tuple[int, ...]
    activations: str = "keep"
    schedule: str = "1f1b"
    batch: int = 16
    microbatch: int
    budget: str = ROOMY
    threads: int = 1
    quick: bool = False

    def __str__(self) -> str:
        pipeline = "-".join(map(str, self.replicas))
        budget = "" if self.budget == ROOMY else f" in {self.budget}"
        rows = f"{self.batch} rows by {self.microbatch}"
        threads = "" if self.threads == 1 else f", {self.threads} threads"
        return f"{MODEL_NAMES[self.model]}, {pipeline}, {self.schedule}, {rows}, {self.activations}{budget}{threads}"

    def overrides(self) -> list[str]:
        """The command line of ``parallax train``."""
        return [
            *MODELS[self.model],
            f"plan.stages={len(self.replicas)}",
            f"plan.replicas=[{','.join(map(str, self.replicas))}]",
            f"plan.activations={self.activations}",
            f"plan.schedule={self.schedule}",
            f"cluster.devices={sum(self.replicas)}",
            "cluster.kind=cpu",
            f"cluster.threads={self.threads}",
            f"cluster.device_memory={self.budget}",
            f"trainer.global_batch={self.batch}",
            f"trainer.microbatch={self.microbatch}",
            *COMMON,
        ]


CASES = (
    Case(model="small", replicas=(1,), microbatch=4, quick=True),
    Case(model="medium", replicas=(1,), microbatch=4),
    Case(model="medium", replicas=(1,), microbatch=4, threads=2),
    Case(model="medium", replicas=(1,), microbatch=8, activations="recompute"),
    Case(model="medium", replicas=(1,), microbatch=2, activations="offload"),
    Case(model="wide", replicas=(1,), microbatch=4),
    Case(model="mlp", replicas=(1,), batch=512, microbatch=128),
    Case(model="small", replicas=(2,), batch=32, microbatch=8),
    Case(model="medium", replicas=(2,), microbatch=4, activations="recompute"),
    Case(model="wide", replicas=(3,), batch=24, microbatch=6),
    Case(model="small", replicas=(1, 1), batch=32, microbatch=4),
    Case(model="medium", replicas=(1, 1), microbatch=2, schedule="gpipe"),
    Case(model="medium", replicas=(1, 1), microbatch=4, quick=True),
    Case(model="medium", replicas=(1, 1), microbatch=4, activations="recompute", schedule="gpipe"),
    Case(model="medium", replicas=(1, 1), microbatch=2, activations="offload", budget="96MiB"),
    Case(model="wide", replicas=(1, 1), microbatch=2, activations="auto", budget="150MiB"),
    Case(model="mlp", replicas=(1, 1), batch=512, microbatch=64),
    Case(model="small", replicas=(1, 1, 1), batch=32, microbatch=4, schedule="gpipe"),
    Case(model="medium", replicas=(1, 1, 1), microbatch=2),
    Case(model="wide", replicas=(1, 1, 1), microbatch=4, activations="recompute"),
    Case(model="medium", replicas=(1, 2), microbatch=4, quick=True),
    Case(model="medium", replicas=(2, 1), microbatch=2),
    Case(model="medium", replicas=(1, 2), microbatch=4, activations="auto", budget="80MiB"),
    Case(model="wide", replicas=(2, 1), microbatch=4, schedule="gpipe", activations="offload"),
    Case(model="mlp", replicas=(1, 2), batch=512, microbatch=128, schedule="gpipe"),
    Case(model="medium", replicas=(1,), microbatch=1),
    Case(model="medium", replicas=(1,), microbatch=1, activations="auto", budget="110MiB"),
    Case(model="medium", replicas=(1,), microbatch=16),
    Case(model="medium", replicas=(1,), microbatch=16, activations="auto", budget="240MiB"),
    Case(model="medium", replicas=(1, 1), microbatch=1),
    Case(model="medium", replicas=(1, 1), microbatch=1, activations="auto", budget="64MiB"),
    Case(model="medium", replicas=(1, 1), microbatch=8),
    Case(model="medium", replicas=(1, 1), microbatch=8, activations="auto", budget="120MiB"),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Predicted and measured: seconds of a step; bytes of the rank whose measured peak is nearest to, or furthest
    beyond, its prediction."""

    case: str
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: int
    measured_bytes: int

    @property
    def seconds_error(self) -> float:
        """How far the prediction is off, as a share of what was measured; above zero it was too long."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def bytes_error(self) -> float:
        """The same for the peak; a negative value means more than was promised."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The measurements of one run: seconds of each step after the warm-up, and predicted and measured peaks of all
    ranks."""

    predicted_seconds: float
    steps: tuple[float, ...]
    peaks: tuple[tuple[int, int], ...]


def run(cases: Sequence[Case], rounds: int, progress: Callable[[str], None]) -> list[Outcome]:
    """Plan and train each, one after another, ``rounds`` times."""
    readings: list[list[Reading]] = [[] for _ in cases]
    with tempfile.TemporaryDirectory(prefix="parallax-prediction-") as folder:
        for turn in range(rounds):
            for number, (case, found) in enumerate(zip(cases, readings), 1):
                begun = time.monotonic()
                found.append(_train(case, Path(folder) / f"{turn + 1}-{number}"))
                outcome = _outcome(case, found[-1:])
                progress(
                    f"{number}/{len(cases)}  {case}: step {outcome.predicted_seconds:.3f} s predicted, "
                    f"{outcome.measured_seconds:.3f} s measured ({outcome.seconds_error:+.1%}); peak "
                    f"{format_bytes(outcome.predicted_bytes)} and {format_bytes(outcome.measured_bytes)} "
                    f"({outcome.bytes_error:+.1%}); {time.monotonic() - begun:.0f} s"
                )
    return [_outcome(case, found) for case, found in zip(cases, readings)]


def _train(case: Case, folder: Path) -> Reading:
    """Train one run in a new folder, which also holds the cache of its measurements of model and machine."""
    folder.mkdir()
    command = [sys.executable, "-m", "parallax", "train", "name=run", *case.overrides()]
    path = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        raise SystemExit(
            f"{case}: {' '.join(command)} ended with {ended.returncode}\n{ended.stdout}{ended.stderr}"
        )
    directory = folder / "runs" / "run"
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line["step_seconds"] for line in map(json.loads, lines) if "step_seconds" in line]
    return Reading(
        predicted_seconds=summary["predicted_step_seconds"],
        steps=tuple(steps[WARM_UP:]),
        peaks=tuple(
            (rank["predicted_peak_bytes"], rank["measured_peak_bytes"]) for rank in summary["ranks"]
        ),
    )


def _outcome(case: Case, readings: Sequence[Reading]) -> Outcome:
    peaks = [peak for reading in readings for peak in reading.peaks]
    predicted, measured = max(peaks, key=lambda peak: peak[1] / peak[0])
    steps = [seconds for reading in readings for seconds in reading.steps]
    return Outcome(
        case=str(case),
        predicted_seconds=statistics.median(reading.predicted_seconds for reading in readings),
        measured_seconds=statistics.quantiles(steps, n=4, method="inclusive")[0],
        predicted_bytes=predicted,
        measured_bytes=measured,
    )


def totals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the table's medians and extremes."""
    return {
        "configurations": len(outcomes),
        "median_seconds_error": statistics.median(
            abs(outcome.seconds_error) for outcome in outcomes
        ),
        "worst_seconds_error": max(abs(outcome.seconds_error) for outcome in outcomes),
        "median_bytes_error": statistics.median(abs(outcome.bytes_error) for outcome in outcomes),
        "bytes_underestimated": sum(outcome.bytes_error < 0 for outcome in outcomes),
    }


HEADINGS = (
    "configuration",
    "step predicted",
    "measured",
    "error",
    "peak predicted",
    "measured",
    "error",
)


def _cells(outcome: Outcome) -> list[str]:
    return [
        outcome.case,
        f"{outcome.predicted_seconds:.3f} s",
        f"{outcome.measured_seconds:.3f} s",
        f"{outcome.seconds_error:+.1%}",
        format_bytes(outcome.predicted_bytes),
        format_bytes(outcome.measured_bytes),
        f"{outcome.bytes_error:+.1%}",
    ]


def _verdict(found: dict[str, Any]) -> str:
    return (
        f"{found['configurations']} configurations: median error of the step's time "
        f"{found['median_seconds_error']:.1%}, worst {found['worst_seconds_error']:.1%}; of the peak "
        f"{found['median_bytes_error']:.1%}; "
        f"{found['bytes_underestimated']} peaks under-estimated."
    )


def markdown(outcomes: Sequence[Outcome], before: str = "") -> str:
    """The table as a page, with the further sections of the page ``before``."""
    _, mark, sections = before.partition("\n## ")
    rows = [
        HEADINGS,
        ("---", *["---:"] * (len(HEADINGS) - 1)),
        *(_cells(outcome) for outcome in outcomes),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        "# Predicted and measured\n\n"
        "Each line is a separate training run: the step and the peak that the planner predicted, and those measured: "
        "the lower quartile of its steps, after two warm-up steps. "
        "The pipeline is written as the replicas of its stages; "
        "the peak is that of the rank nearest to its prediction or "
        "furthest beyond it. Under an ample budget a predicted peak counts the freed memory that malloc keeps "
        "([ADR 030](adr/030-a-budget-is-held-near-its-end.md)). Written by "
        f"`python -m benchmarks.prediction --output`.\n\n{_verdict(totals(outcomes))}"
        f"\n\n{table}\n{mark}{sections}"
    )


def _print(console: Console, outcomes: Sequence[Outcome]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in HEADINGS:
        table.add_column(column, justify="left" if column == HEADINGS[0] else "right")
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    console.print(table)
    console.print(_verdict(totals(outcomes)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the configurations, print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction", description="predicted against measured"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--quick", action="store_true", help="a few configurations only")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="configurations whose line contains TEXT"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="go through the configurations N times"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE.md", help="write the table to this file"
    )
    options = parser.parse_args(arguments)
    cases = [
        case for case in CASES if (case.quick or not options.quick) and options.only in str(case)
    ]
    if not cases:
        parser.error(f"--only {options.only!r}: no configuration's line contains it")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: must be 1 or more")
    console = Console(soft_wrap=True)
    outcomes = run(cases, options.rounds, lambda text: console.print(text, highlight=False))
    _print(console, outcomes)
    if options.output is not None:
        page = options.output
        before = page.read_text(encoding="utf-8") if page.exists() else ""
        page.write_text(markdown(outcomes, before), encoding="utf-8")
    if options.json:
        print(
            json.dumps({**totals(outcomes), "outcomes": [asdict(outcome) for outcome in outcomes]})
        )


if __name__ == "__main__":
    main()

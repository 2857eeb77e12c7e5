"""``parallax evaluate``: loss and metrics of a run's held-out rows, or of other data."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from rich import box
from rich.table import Table

from parallax.commands.options import (
    RUNS,
    add_checkpoint,
    add_json,
    add_overrides,
    check_writable,
    console_of,
    print_json,
)
from parallax.common.signals import handling_requests, interrupt, under_torchrun
from parallax.common.units import format_bytes, format_seconds, plural
from parallax.errors import ConfigError, printable
from parallax.machine.variables import check_interfaces
from parallax.plan.task import PlanTask
from parallax.run.evaluating import EvaluatedRun, evaluate, figures_path
from parallax.run.export import CheckpointChoice
from parallax.run.inference import EMA, TRAINED, ForwardJob, ForwardRequest, stored_run
from parallax.run.processes.forwards import job_of_rank, launch, run_forwards
from parallax.run.processes.process import as_rank
from parallax.run.resume import StoredRun
from parallax.run.working import working
from parallax.runtime.evaluation import EvaluationEngine
from parallax.runtime.failure.watch import Watch
from parallax.train.data.source import Source

EXAMPLES = """examples:
  parallax evaluate deeper                              the last checkpoint of runs/deeper, on its held-out rows
  parallax evaluate deeper --best                       the checkpoint with the best checkpoint.metric
  parallax evaluate deeper --step 400 --weights ema     a step, with averaged weights
  parallax evaluate deeper 'metrics=[accuracy,f1]'      other metrics
  parallax evaluate deeper data.path=other              all rows of other data
  parallax evaluate deeper cluster.devices=2            as two processes; by default one
  parallax evaluate deeper --json | jq .validation_loss
  torchrun --nproc-per-node=4 -m parallax evaluate deeper
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="the directory of a run, or its name"
    )
    add_checkpoint(parser, (TRAINED, EMA))
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write the figures as JSON; by default RUN/evaluate/CHECKPOINT.json",
    )
    parser.add_argument("--prepared", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    add_json(parser)
    add_overrides(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    if parsed.out is not None:
        parsed.out = parsed.out.expanduser()
        check_writable("--out", parsed.out)
    if parsed.prepared is None:
        _check_run(parsed)
    if under_torchrun():
        as_rank(lambda watch, held: _as_rank(parsed, watch))
    check_interfaces()
    if parsed.prepared is not None:
        file = parsed.prepared
        try:
            return _launch(parsed, ForwardJob.read(file), file)
        finally:
            file.unlink(missing_ok=True)
    console = console_of(parsed)
    with handling_requests(interrupt), working(console, "planning") as work:
        found = _stored(parsed)
        work.limit(found.config.trainer)
        job = ForwardJob.of(found, _request(parsed), work)
    for remark in job.remarks:
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    file = (
        Path(tempfile.gettempdir()) / f"parallax-evaluate-{os.getpid()}-{os.urandom(8).hex()}.json"
    )
    try:
        job.write(file)
        return _launch(parsed, job, file)
    finally:
        file.unlink(missing_ok=True)


def _check_run(parsed: argparse.Namespace) -> None:
    if parsed.run is None or "=" in str(parsed.run):
        raise ConfigError(
            "evaluate: name the directory of a run, or its name, before the settings: parallax evaluate RUN key=value"
        )


def _stored(parsed: argparse.Namespace) -> StoredRun:
    return stored_run(parsed.run, RUNS, parsed.overrides)


def _request(parsed: argparse.Namespace, devices: int = 1) -> ForwardRequest:
    return ForwardRequest(
        task=PlanTask.EVALUATION,
        overrides=tuple(parsed.overrides),
        choice=CheckpointChoice(step=parsed.step, best=parsed.best),
        weights=parsed.weights,
        devices=devices,
    )


def _launch(parsed: argparse.Namespace, job: ForwardJob, file: Path) -> int:
    command = ["evaluate", "--prepared", str(file), *(["--json"] if parsed.json else [])]
    command += ["--out", str(parsed.out)] if parsed.out is not None else []
    return launch(job, command, own_process=parsed.own_process)


def _as_rank(parsed: argparse.Namespace, watch: Watch) -> int:
    with watch.phase("planning"):
        job = job_of_rank(
            parsed.prepared, lambda: _stored(parsed), lambda ranks: _request(parsed, ranks)
        )

    def work(job: ForwardJob, engine: EvaluationEngine, source: Source, watch: Watch) -> None:
        found = evaluate(job, engine, source, watch)
        if engine.mesh.rank == 0:
            _report(parsed, found)

    run_forwards(job, watch, work)
    return 0


def _report(parsed: argparse.Namespace, found: EvaluatedRun) -> None:
    """Write the figures of an evaluation to a JSON file, and print them as a table or, with ``--json``, as JSON."""
    path = parsed.out or figures_path(found.job)
    found.write(path)
    if parsed.json:
        print_json(found.to_dict())
        return
    console = console_of(parsed)

    def plain(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    for remark in found.job.remarks if parsed.prepared is None else ():
        plain(remark)
    job, plan = found.job, found.job.plan
    of_step = f"step {found.step}, {'averaged' if job.averaged else 'trained'} weights"
    plain(f"{printable(str(job.directory))}: {of_step}")
    console.print(figures_table(found))
    plain(
        f"{plural(plan.world_size, 'rank')}, {format_seconds(found.seconds)}, "
        f"{_rate(found.rows_per_second)} rows/s (predicted without reading rows: {_rate(plan.rows_per_second)}), "
        f"at most {format_bytes(max(found.peak_bytes))} on a device"
    )
    for name, each in found.sets.items():
        of = f" of {name}" if name else ""
        if each.bad is not None:
            index, loss = each.bad
            plain(f"the loss{of} is not finite: batch {index} gives {loss}")
        if each.truncated:
            plain(
                f"the figures{of} are of the first {each.batches} batches, and there are more: set "
                "trainer.eval_batches"
            )
    plain(f"figures: {printable(str(path))}")


def _rate(rows_per_second: float) -> str:
    return f"{rows_per_second:,.0f}" if rows_per_second >= 100 else f"{rows_per_second:.3g}"


def figures_table(found: EvaluatedRun) -> Table:
    """Return a table with a row for each held-out set."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    first = next(iter(found.sets.values()))
    table.add_column("rows of")
    for heading in ("rows", "loss", *first.metrics):
        table.add_column(heading, justify="right")
    for name, each in found.sets.items():
        numbers = (each.loss, *each.metrics.values())
        table.add_row(name or "validation", str(each.rows), *(f"{value:.4f}" for value in numbers))
    return table

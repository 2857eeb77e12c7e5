"""``parallax predict``: the outputs of a run's model for new rows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from parallax.commands.options import RUNS, add_checkpoint, add_overrides, check_writable
from parallax.common.signals import handling_requests, interrupt, under_torchrun
from parallax.common.terminal import safe_console
from parallax.common.units import format_seconds, plural
from parallax.errors import ConfigError, printable
from parallax.machine.variables import check_interfaces
from parallax.plan.task import PlanTask
from parallax.run.export import CheckpointChoice
from parallax.run.inference import EMA, TRAINED, ForwardJob, ForwardRequest, NewRows, stored_run
from parallax.run.predicting import PredictedRun, predict
from parallax.run.predictions import Outputs
from parallax.run.processes.forwards import job_of_rank, launch, run_forwards
from parallax.run.processes.process import as_rank
from parallax.run.resume import StoredRun
from parallax.run.working import working
from parallax.runtime.failure.watch import Watch
from parallax.runtime.forward import ForwardEngine
from parallax.train.data.indexed import IndexedSource
from parallax.train.data.source import Source
from parallax.train.unlabelled import SKIP, STOP

EXAMPLES = """examples:
  parallax predict deeper --inputs photos --out classes.parquet --top 5     classes and scores of a folder of images
  parallax predict deeper --inputs lines.txt --out outputs.npy              each line of a file is a row
  parallax predict deeper --inputs x.npy --out y.npy --best                 of the checkpoint with the best metric
  parallax predict deeper --inputs photos --out y.jsonl --bad skip          leave out images that cannot be decoded
  parallax predict deeper --inputs photos --out features.npy --layer avgpool    features: the output of a module
  parallax predict deeper --out y.npy data=dataset data.target=mymodule:rows
  torchrun --nproc-per-node=4 -m parallax predict deeper --inputs x.npy --out y.npy
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="the directory of a run, or its name"
    )
    parser.add_argument(
        "--inputs",
        metavar="FOLDER|FILE",
        help="images, lines of text, .npy, .npz, .safetensors, Parquet or Arrow files, or other data that data= reads",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="where to write the outputs in the order of the rows: .npy, .parquet or .jsonl",
    )
    parser.add_argument(
        "--top",
        type=int,
        default=0,
        metavar="K",
        help="write the K best classes of each row and their softmax scores instead of the outputs",
    )
    parser.add_argument(
        "--layer",
        default="",
        metavar="NAME",
        help="write the output of this module of the model, as model.named_modules() calls it, instead of the model's",
    )
    parser.add_argument(
        "--bad",
        choices=(STOP, SKIP),
        default=STOP,
        help="at a row that cannot be read: stop, or leave it out and list it in FILE.skipped.jsonl",
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file of --out")
    add_checkpoint(parser, (TRAINED, EMA))
    parser.add_argument("--prepared", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    add_overrides(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    parsed.out = parsed.out.expanduser()
    check_writable("--out", parsed.out)
    if parsed.top < 0:
        raise ConfigError(f"--top {parsed.top}: accepted are whole numbers from 1")
    if parsed.run is None or "=" in str(parsed.run):
        raise ConfigError(
            "predict: name the directory of a run, or its name, before the settings: parallax predict RUN --inputs "
            "FILE --out FILE"
        )
    outputs = _outputs(parsed)
    if under_torchrun():
        as_rank(lambda watch, held: _as_rank(parsed, outputs, watch))
    check_interfaces()
    if parsed.prepared is not None:
        return _launch(parsed, ForwardJob.read(parsed.prepared), outputs)
    console = safe_console()
    with handling_requests(interrupt), working(console, "planning") as work:
        found = _stored(parsed)
        work.limit(found.config.trainer)
        job = outputs.prepared(lambda: ForwardJob.of(found, _request(parsed), work))
    for remark in job.remarks:
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    return _launch(parsed, job, outputs)


def _outputs(parsed: argparse.Namespace) -> Outputs:
    keys = "inputs", "top", "layer", "best", "step", "weights"
    request: dict[str, Any] = {"run": str(parsed.run), "settings": list(parsed.overrides)}
    request |= {f"--{key}": getattr(parsed, key) for key in keys}
    return Outputs(parsed.out, parsed.top, parsed.bad, parsed.force, request)


def _stored(parsed: argparse.Namespace) -> StoredRun:
    return stored_run(parsed.run, RUNS, parsed.overrides)


def _request(parsed: argparse.Namespace, devices: int = 1) -> ForwardRequest:
    return ForwardRequest(
        task=PlanTask.INFERENCE,
        overrides=tuple(parsed.overrides),
        choice=CheckpointChoice(step=parsed.step, best=parsed.best),
        weights=parsed.weights,
        devices=devices,
        rows=NewRows(path=parsed.inputs or "", bad=parsed.bad),
        layer=parsed.layer,
    )


def _launch(parsed: argparse.Namespace, job: ForwardJob, outputs: Outputs) -> int:
    command = ["predict", str(parsed.run), "--prepared", str(outputs.folder / "job.json")]
    command += ["--out", str(parsed.out), "--top", str(parsed.top), "--bad", parsed.bad]
    command += ["--layer", parsed.layer] if parsed.layer else []
    command += ["--inputs", parsed.inputs] if parsed.inputs is not None else []
    command += ["--step", str(parsed.step)] if parsed.step is not None else []
    command += ["--weights", parsed.weights] if parsed.weights is not None else []
    command += [f"--{key}" for key in ("force", "best") if getattr(parsed, key)]
    return launch(job, [*command, *parsed.overrides], own_process=parsed.own_process)


def _as_rank(parsed: argparse.Namespace, outputs: Outputs, watch: Watch) -> int:
    with watch.phase("planning"):
        job = job_of_rank(
            parsed.prepared,
            lambda: _stored(parsed),
            lambda ranks: _request(parsed, ranks),
            outputs.prepared,
        )

    def work(job: ForwardJob, engine: ForwardEngine, source: Source, watch: Watch) -> None:
        assert isinstance(source, IndexedSource)
        size = job.config.trainer.global_batch
        found = predict(engine, source, size, watch, outputs)
        if engine.mesh.rank == 0:
            _report(parsed, job, found)

    run_forwards(job, watch, work)
    return 0


def _report(parsed: argparse.Namespace, job: ForwardJob, found: PredictedRun) -> None:
    console, path = safe_console(), printable(str(parsed.out))

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    rate = found.computed / found.seconds if found.seconds else 0.0
    which = f"{job.checkpoint.name}, {'averaged' if job.averaged else 'trained'} weights"
    say(
        f"{path}: {plural(found.rows, 'row')} of {which}; {found.computed:,} computed in "
        f"{format_seconds(found.seconds)}, {rate:,.4g} rows/s"
    )
    if found.skipped:
        verb = "is" if found.skipped == 1 else "are"
        say(
            f"{plural(found.skipped, 'row')} could not be read and {verb} left out: {path}.skipped.jsonl"
        )

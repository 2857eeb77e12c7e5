"""``parallax serve``: answer requests with a run's model over HTTP."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from parallax import __version__
from parallax.commands.options import RUNS, add_checkpoint, add_overrides, console_of
from parallax.common.signals import handling_requests, interrupt, under_torchrun
from parallax.errors import ConfigError
from parallax.plan.task import PlanTask
from parallax.run.export import CheckpointChoice
from parallax.run.inference import EMA, TRAINED, ForwardJob, ForwardRequest, stored_run
from parallax.run.serving import RunModel, open_model
from parallax.run.working import working
from parallax.serve.config import ServeConfig

EXAMPLES = """examples:
  parallax serve deeper                                 the last checkpoint of runs/deeper, on http://127.0.0.1:8000
  parallax serve deeper serve.port=9000 --best          the checkpoint with the best checkpoint.metric
  parallax serve deeper serve.max_batch_rows=64 serve.max_wait=0.005
  parallax serve deeper serve.batch_invariant=true      answers do not depend on other requests, to the bit
  parallax serve deeper serve.host=0.0.0.0 serve.token_file=~/token
  curl -d '{"inputs": [{"name": "input", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}' \\
       -H 'Content-Type: application/json' http://127.0.0.1:8000/v2/models/deeper/infer
"""
_LIBRARIES = "starlette", "uvicorn", "prometheus_client"
_LOCAL = "127.", "::1", "localhost"
# Plans are for the largest batch.
_PLANNED_ROWS = "trainer.global_batch=${serve.max_batch_rows}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run, or its name")
    add_checkpoint(parser, (TRAINED, EMA))
    add_overrides(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    if under_torchrun():
        raise ConfigError("serve: it runs in one process; start it without torchrun")
    if missing := [name for name in _LIBRARIES if find_spec(name) is None]:
        raise ConfigError(
            f"serve needs {', '.join(missing)}; install it with pip install 'parallax-train[serve]'"
        )
    parsed.json = False
    console = console_of(parsed)
    with handling_requests(interrupt), working(console, "planning") as work:
        found = stored_run(parsed.run, RUNS, parsed.overrides)
        work.limit(found.config.trainer)
        job = ForwardJob.of(found, _request(parsed), work)
        job.config.serve.token()
        work("loading the weights")
        model = open_model(job)
    try:
        for remark in job.remarks:
            console.print(remark, highlight=False, markup=False, soft_wrap=True)
        _serve(model, job.config.serve, console)
    finally:
        model.close()
    return 0


def _request(parsed: argparse.Namespace) -> ForwardRequest:
    return ForwardRequest(
        task=PlanTask.INFERENCE,
        overrides=(_PLANNED_ROWS, *parsed.overrides),
        choice=CheckpointChoice(step=parsed.step, best=parsed.best),
        weights=parsed.weights,
        groups=("serve",),
    )


def _serve(model: RunModel, config: ServeConfig, console: Console) -> None:
    from parallax.serve.invariance import batch_difference, difference_text
    from parallax.serve.server import serve

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    with handling_requests(interrupt):
        difference = batch_difference(model, config)
    if difference is not None:
        say(difference_text(difference, config))
    for what, specs in (("takes", model.inputs), ("returns", model.outputs)):
        listed = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs)
        say(f"{model.name} {what} {listed}")
    if not config.token_file and not config.host.startswith(_LOCAL):
        say(
            f"serve.host={config.host}: everyone who reaches this address can use the model; serve.token_file=FILE "
            "asks for a token"
        )
    serve(
        model,
        config,
        lambda address: say(f"serving {address}/v2/models/{model.name}, version {model.version}"),
        __version__,
    )

"""``parallax serve``: answer requests with a run's model over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from parallax import __version__
from parallax.commands.options import RUNS, add_checkpoint, add_overrides, console_of
from parallax.commands.plan.rates import PLANNED_ROWS
from parallax.common.signals import handling_requests, interrupt, under_torchrun
from parallax.errors import ConfigError
from parallax.machine.local import choose_devices
from parallax.machine.variables import check_interfaces
from parallax.plan.task import PlanTask
from parallax.run.export import CheckpointChoice
from parallax.run.inference import EMA, TRAINED, ForwardJob, ForwardRequest, stored_run
from parallax.run.job import local_cluster
from parallax.run.processes.answering import answer_batches, connected
from parallax.run.processes.forwards import job_of_rank
from parallax.run.processes.launch import start_afresh, uses_accelerator
from parallax.run.processes.process import as_rank
from parallax.run.rates import measured_rates
from parallax.run.replicas import LINK, Replicas, Say
from parallax.run.resume import StoredRun
from parallax.run.serving import RunModel, follow, open_model
from parallax.run.serving_together import serve_together
from parallax.run.working import working
from parallax.runtime.failure.watch import Watch
from parallax.serve.config import SERVER_LIBRARIES
from parallax.serve.rates import unrated_lines

EXAMPLES = """examples:
  parallax serve deeper                                 the last checkpoint of runs/deeper, on http://127.0.0.1:8000
  parallax serve deeper serve.port=9000 --best          the checkpoint with the best checkpoint.metric
  parallax serve deeper serve.max_batch_rows=64 serve.max_wait=0.005
  parallax serve deeper serve.max_wait=auto serve.requests_per_second=200   the wait with the smallest predicted p99
  parallax serve deeper serve.batch_invariant=true      answers do not depend on other requests, to the bit
  parallax serve deeper cluster.devices=4 serve.replicas=2    two copies of the model on two devices each
  parallax serve deeper serve.follow=true               take over new checkpoints of a run that still trains
  torchrun --nproc-per-node=2 -m parallax serve deeper  by ranks that torchrun starts
  parallax serve deeper serve.host=0.0.0.0 serve.token_file=~/token
  curl -d '{"inputs": [{"name": "input", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}' \\
       -H 'Content-Type: application/json' http://127.0.0.1:8000/v2/models/deeper/infer
"""
_LOCAL = "127.", "::1", "localhost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="the directory of a run, or its name"
    )
    parser.add_argument("--prepared", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    add_checkpoint(parser, (TRAINED, EMA))
    add_overrides(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    if missing := [name for name in SERVER_LIBRARIES if find_spec(name) is None]:
        raise ConfigError(
            f"serve needs {', '.join(missing)}; install it with pip install 'parallax-train[serve]'"
        )
    if parsed.prepared is None and (parsed.run is None or "=" in str(parsed.run)):
        raise ConfigError(
            "serve: name the directory of a run, or its name, before the settings: parallax serve RUN key=value"
        )
    parsed.json = False
    if under_torchrun():
        as_rank(lambda watch, held: _as_rank(parsed, watch))
    if parsed.prepared is not None:
        try:
            return _serve_job(parsed, ForwardJob.read(parsed.prepared))
        finally:
            parsed.prepared.unlink(missing_ok=True)
    console = console_of(parsed)
    with handling_requests(interrupt), working(console, "planning") as work:
        found = _stored(parsed)
        work.limit(found.config.trainer)
        job = ForwardJob.of(found, _request(parsed), work)
    if _ranks(job) > 1 and parsed.own_process:
        _start_afresh(job)
    return _serve_job(parsed, job)


def _ranks(job: ForwardJob) -> int:
    return job.plan.world_size * job.config.serve.replicas


def _serve_job(parsed: argparse.Namespace, job: ForwardJob) -> int:
    """Serve ``job`` in this process, or by ranks that this process starts."""
    console = console_of(parsed)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    _check(parsed, job)
    with contextlib.ExitStack() as closing:
        with handling_requests(interrupt), working(console, "loading the weights"):
            model: RunModel
            if _ranks(job) > 1:
                check_interfaces()
                model = copies = Replicas(job, say)
                closing.callback(model.close)
                copies.wait_until_ready()
            else:
                model = open_model(job)
                closing.callback(model.close)
            model.try_forward()
        for remark in job.remarks:
            say(remark)
        if model.most > 1:
            say(f"{model.most} replicas of these processes")
        with _following(parsed, job, model, say):
            _serve(model, job, say, lambda: model.failure)
        if model.failure is not None:
            raise model.failure
    return 0


def _check(parsed: argparse.Namespace, job: ForwardJob) -> None:
    """Raise :class:`ConfigError` if the file with the access token cannot be read, or if ``serve.follow`` is set
    although ``--step`` selects one checkpoint."""
    job.config.serve.token()
    if job.config.serve.follow and parsed.step is not None:
        raise ConfigError(
            f"serve.follow=true: --step {parsed.step} names one checkpoint; leave out one of both"
        )


def _start_afresh(job: ForwardJob) -> None:
    """Replace this process by a new one that serves ``job``, if this process has used an accelerator and would keep
    memory there that the ranks need."""
    kind = choose_devices(local_cluster(job.config)).kind
    if uses_accelerator(kind):
        name = f"parallax-serve-{os.getpid()}-{os.urandom(8).hex()}.json"
        file = Path(tempfile.gettempdir()) / name
        job.write(file)
        start_afresh([*sys.argv[1:], "--prepared", str(file)])


def _as_rank(parsed: argparse.Namespace, watch: Watch) -> int:
    with watch.phase("planning"):
        job = job_of_rank(
            parsed.prepared, lambda: _stored(parsed), lambda ranks: _request(parsed, ranks)
        )
    if (path := os.environ.get(LINK)) is not None:
        answer_batches(job, watch, lambda: connected(path))
        return 0
    if job.config.serve.replicas > 1:
        raise ConfigError(
            f"serve.replicas={job.config.serve.replicas}: torchrun's ranks compute one copy of the model, with "
            "replicas of its stages; start parallax serve without torchrun for several"
        )
    _check(parsed, job)
    console = console_of(parsed)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def front(model: RunModel) -> None:
        model.try_forward()
        for remark in job.remarks:
            say(remark)
        with _following(parsed, job, model, say):
            _serve(model, job, say, watch.stop_requested)

    serve_together(job, watch, front)
    return 0


@contextlib.contextmanager
def _following(
    parsed: argparse.Namespace, job: ForwardJob, model: RunModel, say: Say
) -> Iterator[None]:
    """A context in which ``model`` loads each new checkpoint, if ``serve.follow`` is set."""
    if not job.config.serve.follow:
        yield
        return
    run, choice = _stored(parsed), _request(parsed)
    over = threading.Event()
    thread = threading.Thread(target=follow, args=(model, job, run, choice, say, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _stored(parsed: argparse.Namespace) -> StoredRun:
    return stored_run(parsed.run, RUNS, parsed.overrides)


def _request(parsed: argparse.Namespace, devices: int = 1) -> ForwardRequest:
    return ForwardRequest(
        task=PlanTask.INFERENCE,
        overrides=(PLANNED_ROWS, *parsed.overrides),
        choice=CheckpointChoice(step=parsed.step, best=parsed.best),
        weights=parsed.weights,
        devices=devices,
        groups=("serve",),
    )


def _serve(model: RunModel, job: ForwardJob, say: Say, end_requested: Callable[[], object]) -> None:
    from parallax.serve.invariance import batch_difference, difference_text
    from parallax.serve.server import serve
    from parallax.serve.timing import TimedModel

    config, timed = job.config.serve, TimedModel(model)

    with handling_requests(interrupt):
        difference = batch_difference(timed, config)
        rates = measured_rates(timed, job, config.replicas) if config.requests_per_second else None
    if difference is not None:
        say(difference_text(difference, config))
    for line in rates.lines() if rates else unrated_lines(config):
        say(line)
    for what, specs in (("takes", model.inputs), ("returns", model.outputs)):
        listed = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs)
        say(f"{model.name} {what} {listed}")
    if not config.token_file and not config.host.startswith(_LOCAL):
        say(
            f"serve.host={config.host}: everyone who reaches this address can use the model; serve.token_file=FILE "
            "asks for a token"
        )
    with _frozen_objects():
        serve(
            model,
            replace(config, max_wait=rates.max_wait if rates else config.wait_seconds),
            lambda address: say(
                f"serving {address}/v2/models/{model.name}, version {model.version}"
            ),
            __version__,
            end_requested,
        )


@contextlib.contextmanager
def _frozen_objects() -> Iterator[None]:
    """A context in which garbage collections skip all objects that exist at its start. The model and the libraries have
    about 300,000 objects. Searching them takes 0.2 s every few thousand requests, during which no request is
    answered."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

"""The command line: words before ``key=value`` belong to the command, the rest is Hydra's override grammar."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from parallax import __version__, launch
from parallax.config import compose
from parallax.doctor import run_doctor
from parallax.errors import ConfigError, ParallaxError, UserError, printable
from parallax.job import plan_run
from parallax.report import plan_table

TRAIN_EXAMPLES = """examples:
  parallax train                                        the main job on this machine's devices
  parallax train model.layers=12 trainer.steps=200 name=deeper
  parallax train data.path=~/texts cluster.devices=2 cluster.device_memory=400MiB
  parallax train model=custom model.target=mymodel:build plan.stages=3
  parallax train name=deeper                            continues runs/deeper from its last checkpoint
  torchrun --nproc-per-node=4 -m parallax train trainer.global_batch=32
"""
PLAN_EXAMPLES = """examples:
  parallax plan                                         what `parallax train` would do here
  parallax plan cluster.devices=4 plan.stages=auto
  parallax plan cluster.device_memory=80MiB --json | jq .prediction
  parallax plan plan.activations=recompute --output recompute.yaml
"""
DOCTOR_EXAMPLES = """examples:
  parallax doctor                                       what this machine has, and what will go wrong on it
  parallax doctor --json
"""


PATIENCE_SECONDS = 1.5
_BROKEN = re.compile(r"gloo/|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, call, exit code: 0 well, 1 failed, 2 wrong input."""
    parsed = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("parallax").setLevel(logging.INFO)  # others' remarks (fonts, imports) are not the user's
    try:
        code: int = parsed.call(parsed)
        return code
    except (Exception, KeyboardInterrupt) as error:
        if launch.under_torchrun():
            _leave(error)
        if isinstance(error, KeyboardInterrupt):
            return 130
        if not isinstance(error, ParallaxError):
            raise
        print(f"parallax: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parallax",
        description="Train PyTorch models that are too large for their devices.",
        epilog="`parallax COMMAND --help` shows examples. Settings are key=value; configs/ lists the groups.",
    )
    parser.add_argument("--version", action="version", version=f"parallax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = _command(commands, "train", "plan and train; under torchrun, one rank of it", TRAIN_EXAMPLES, _train)
    train.add_argument("--run-dir", type=Path, help="a prepared run directory: its config.yaml and plan.yaml are used")
    _add_overrides(train)

    plan = _command(commands, "plan", "measure, search, and print the plan; writes plan.yaml", PLAN_EXAMPLES, _plan)
    plan.add_argument("--json", action="store_true", help="print the plan for programs")
    plan.add_argument("--output", type=Path, default=Path("plan.yaml"), help="where to write it (default: plan.yaml)")
    _add_overrides(plan)

    doctor = _command(
        commands, "doctor", "devices, memory, bandwidths, and what will go wrong", DOCTOR_EXAMPLES, _doctor
    )
    doctor.add_argument("--json", action="store_true", help="print it for programs")
    return parser


def _command(commands, name, text, examples, call):  # type: ignore[no-untyped-def]
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(call=call)
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings in Hydra's override grammar")


def _train(parsed: argparse.Namespace) -> int:
    if parsed.run_dir is not None and parsed.overrides:
        raise ConfigError(f"{parsed.overrides[0]}: --run-dir is prepared already; leave out one of them")
    if launch.under_torchrun():
        return launch.work(parsed.overrides, parsed.run_dir)
    if parsed.run_dir is not None:
        return launch.launch(launch.Run.read(parsed.run_dir))
    return launch.launch(launch.prepare(parsed.overrides, Console()))


def _plan(parsed: argparse.Namespace) -> int:
    console = Console(stderr=parsed.json)
    with console.status("planning") as status:
        planned = plan_run(compose(parsed.overrides), Path.cwd(), status.update)
    try:
        planned.plan.save(parsed.output)
    except OSError as error:
        raise ConfigError(f"--output {parsed.output}: cannot be written ({error.strerror})") from error
    if parsed.json:
        print(json.dumps({**planned.plan.to_dict(), "hash": planned.plan.hash()}))
        return 0
    console.print(plan_table(planned.plan, planned.profile))
    for line in planned.plan.explain():
        console.print(line, highlight=False)
    console.print(f"plan: {parsed.output}")
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    return run_doctor(parsed.json)


def _leave(error: BaseException) -> NoReturn:
    """One rank's exception ends the run: say where and why, and go at once, so that torchrun stops the others.

    A connection that broke is no cause: whoever broke it says more, and torchrun stops this rank meanwhile. It would
    stop the one that speaks, too, if another left first.
    """
    if isinstance(error, KeyboardInterrupt):
        os._exit(130)
    if isinstance(error, RuntimeError) and _BROKEN.search(str(error)):
        time.sleep(PATIENCE_SECONDS)
    if launch.speaks_first():
        text = printable(str(error))
        if not isinstance(error, ParallaxError):
            traceback.print_exception(error)
            text = f"{type(error).__name__}: {text}"
        if not isinstance(error, UserError):
            where = [f"rank {os.environ.get('RANK', '?')}", *getattr(error, "__notes__", [])]
            text = f"{printable(', '.join(where))}: {text}"
        print(f"parallax: {text}", file=sys.stderr)
    else:
        time.sleep(PATIENCE_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code if isinstance(error, ParallaxError) else 1)

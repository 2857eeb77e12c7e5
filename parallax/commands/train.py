"""``parallax train``: plan, start the processes, train; under torchrun, one rank of it."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from parallax.commands.options import add_overrides, trusting, words_of
from parallax.common.lock import locked
from parallax.common.signals import heeding, interrupt, under_torchrun
from parallax.common.terminal import safe_console
from parallax.common.trust import KEYS
from parallax.errors import ConfigError, printable
from parallax.run.prepare import PreparedRun, Trusts, prepare
from parallax.run.processes.launch import launch
from parallax.run.processes.rank import run_rank

EXAMPLES = """examples:
  parallax train                                        the main job on this machine's devices
  parallax train model.layers=12 trainer.steps=200 name=deeper
  parallax train data.path=~/texts cluster.devices=2 cluster.device_memory=400MiB
  parallax train model=custom model.target=mymodel:build plan.stages=3
  parallax train plan.replan=auto                       plans again, once, where steps are not as predicted
  parallax train name=deeper                            continues runs/deeper from its last checkpoint
  parallax train --run-dir theirs model.target=mymodel:build   a directory that was prepared elsewhere
  torchrun --nproc-per-node=4 -m parallax train trainer.global_batch=32
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument(
        "--run-dir",
        type=Path,
        help="a prepared run directory: its config.yaml and plan.yaml are used",
    )
    add_overrides(parser)


def run(parsed: argparse.Namespace) -> int:
    """Train; the exit code."""
    trusts = _trusts(parsed)
    if under_torchrun():
        return run_rank(parsed.overrides, parsed.run_dir, trusts)
    with ExitStack() as held:
        if parsed.run_dir is None:
            with heeding(interrupt):
                run = prepare(parsed.overrides, safe_console(), held)
        else:
            run = PreparedRun.read(parsed.run_dir, trusts)
            held.enter_context(locked(parsed.run_dir))
        return launch(run, own_process=parsed.own_process)


def _trusts(parsed: argparse.Namespace) -> Trusts:
    """What is asked about a prepared directory: its settings stand, so nothing but class paths can be typed with it."""
    if parsed.run_dir is None:
        return trusting({})
    for word in parsed.overrides:
        if word.partition("=")[0] not in KEYS:
            raise ConfigError(
                f"{printable(word)}: --run-dir is prepared already; leave out one of them"
            )
    return trusting(words_of(parsed))

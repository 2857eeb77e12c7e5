"""``parallax train``: plan, start the ranks and train; under torchrun, be one of the ranks."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from parallax.commands.options import add_overrides, class_paths_of, trusting
from parallax.common.lock import locked
from parallax.common.signals import handling_requests, interrupt, under_torchrun
from parallax.common.terminal import safe_console
from parallax.common.trust import is_key
from parallax.config.multirun import wants_sweep
from parallax.config.printed import CFG, settings_text
from parallax.errors import ConfigError, printable
from parallax.machine.variables import check_interfaces, leftover_warning
from parallax.run.prepare import PreparedRun, prepare
from parallax.run.processes.launch import launch
from parallax.run.processes.rank import run_rank
from parallax.run.resume import Trusts
from parallax.run.sweep.sweep import sweep

EXAMPLES = """examples:
  parallax train experiment=demo                        two stages, three processes, activations offloaded
  parallax train model.layers=12 trainer.steps=200 name=deeper
  parallax train data.path=~/texts cluster.devices=2 cluster.device_memory=400MiB trainer.steps=200
  parallax train model=custom model.target=mymodel:build trainer.steps=200
  parallax train trainer.steps=200 plan.replan=auto     plans again, once, if steps differ from the prediction
  parallax train name=deeper                            continues runs/deeper from its last checkpoint
  parallax train -m model=gpt,mlp cluster.devices=1,2 trainer.steps=20 name=sizes   a sweep: each combination
  parallax train -m hydra/launcher=submitit_slurm swap=off,auto trainer.steps=20    as jobs of a batch system
  parallax train --config-dir mine experiment=long                   options of your own: mine/experiment/long.yaml
  parallax train --cfg job model=mlp                    prints the settings; runs nothing
  parallax train --run-dir theirs model.target=mymodel:build   a directory prepared elsewhere
  torchrun --nproc-per-node=4 -m parallax train trainer.global_batch=32 trainer.steps=200
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--run-dir",
        type=Path,
        help="a prepared run directory: its config.yaml and plan.yaml are used",
    )
    add_overrides(parser)
    parser.add_argument(
        "--multirun",
        "-m",
        action="store_true",
        help="a run for each combination of the listed values, key=1,2",
    )
    parser.add_argument(
        "--cfg",
        "-c",
        choices=CFG,
        help="print the settings of the job, of Hydra, or both; run nothing",
    )
    parser.add_argument("--package", "-p", metavar="KEY", help="with --cfg: print only this key")
    parser.add_argument(
        "--resolve", action="store_true", help="with --cfg: ${...} replaced by their values"
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    if parsed.cfg or parsed.resolve or parsed.package is not None:
        return _show_settings(parsed)
    if parsed.multirun or wants_sweep(parsed.overrides):
        return _sweep(parsed)
    trusts = _trusts(parsed)
    if under_torchrun():
        return run_rank(parsed.overrides, parsed.run_dir, trusts)
    check_interfaces()
    if warning := leftover_warning():
        print(f"parallax: {warning}", file=sys.stderr)
    with ExitStack() as held:
        if parsed.run_dir is None:
            with handling_requests(interrupt):
                run = prepare(parsed.overrides, safe_console(), held)
        else:
            run = PreparedRun.read(parsed.run_dir, trusts)
            held.enter_context(locked(parsed.run_dir))
        return launch(run, own_process=parsed.own_process)


def _show_settings(parsed: argparse.Namespace) -> int:
    """Print the settings of a run; return the exit code."""
    if parsed.cfg is None:
        raise ConfigError("--resolve and --package go with --cfg job, --cfg hydra or --cfg all")
    if parsed.multirun or wants_sweep(parsed.overrides):
        raise ConfigError("--cfg and -m: only one of them; --cfg shows the settings of one run")
    if parsed.run_dir is not None:
        raise ConfigError("--cfg and --run-dir: only one of them; its config.yaml can be read")
    found = settings_text(
        parsed.overrides, parsed.cfg, resolve=parsed.resolve, package=parsed.package
    )
    print(found, end="")
    return 0


def _sweep(parsed: argparse.Namespace) -> int:
    """Run all points of a sweep; return the exit code."""
    if parsed.run_dir is not None:
        raise ConfigError("--run-dir: a sweep prepares its own directories; leave out -m or this")
    if under_torchrun():
        raise ConfigError(
            "-m: a sweep starts the ranks of its points itself; run it without torchrun"
        )
    return sweep(parsed.overrides, safe_console())


def _trusts(parsed: argparse.Namespace) -> Trusts:
    """Return a function that checks the class paths in a prepared directory. The command line cannot change the
    settings in such a directory."""
    if parsed.run_dir is None:
        return trusting({})
    for word in parsed.overrides:
        if not is_key(word.partition("=")[0]):
            raise ConfigError(
                f"{printable(word)}: --run-dir is prepared already; leave out one of them"
            )
    return trusting(class_paths_of(parsed))

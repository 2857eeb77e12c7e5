"""``parallax estimate``: the memory that training a model needs, without a device."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from parallax.commands.options import add_json, add_overrides, console_of, print_json
from parallax.config import compose
from parallax.plan.cost.estimate import estimate
from parallax.plan.search.contradiction import check_rows
from parallax.plan.updates import Updates
from parallax.report import estimate_table
from parallax.run.job import model_work
from parallax.run.stepping import stepped_by
from parallax.run.working import working

EXAMPLES = """examples:
  parallax estimate                                     a GPT of 10 M parameters, the default
  parallax estimate model=transformer model.layers=96 model.hidden=12288 model.heads=96 \\
      precision=mixed_bf16 trainer.global_batch=64 trainer.microbatch=1
  parallax estimate model=custom model.target=mymodel:build --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_json(parser)
    add_overrides(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    console = console_of(parsed)
    with working(console, "counting") as work:
        config = compose(parsed.overrides)
        work.limit(config.trainer)
        check_rows(config.trainer.global_batch, config.trainer.microbatch)
        costs = stepped_by(
            model_work(config, work),
            config.optimizer,
            averages=config.ema.averages,
            replicas=config.replicas,
            delays=config.trainer.updates == Updates.DELAYED,
        )
        found = estimate(
            costs, global_batch=config.trainer.global_batch, microbatch=config.trainer.microbatch
        )
    if parsed.json:
        print_json(asdict(found))
        return 0
    console.print(estimate_table(found))
    return 0

"""``parallax profile``: the costs of each block of a model, measured here or derived from shapes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from parallax.commands.options import (
    add_json,
    add_overrides,
    check_writable,
    console_of,
    print_json,
    writing,
)
from parallax.config import compose
from parallax.report import profile_table, tell_noise
from parallax.run.job import device_kind, profile_run
from parallax.run.planning import MEASURED_ROWS
from parallax.run.working import working

EXAMPLES = """examples:
  parallax profile                                      measures the default model's blocks on this machine
  parallax profile model.layers=12 precision=bf16 --output deeper.json
  parallax profile cluster=dgx_a100 --json              derived from shapes, nothing runs
  parallax profile model=transformer model.hidden=8192 model.heads=64 cluster=dgx_h100
  parallax plan --profile profile.json                  plans with it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_json(parser)
    parser.add_argument(
        "--output", type=Path, default=Path("profile.json"), help="where to write it (profile.json)"
    )
    add_overrides(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    console = console_of(parsed)
    check_writable("--output", parsed.output)
    with working(console, "profiling") as work:
        config = compose(parsed.overrides)
        work.limit(config.trainer)
        profile = profile_run(config, work)
    with writing("--output", parsed.output) as path:
        path.write_text(profile.to_json() + "\n", encoding="utf-8")
    if parsed.json:
        print_json(json.loads(profile.to_json()))
        return 0
    tell_noise(console, profile)
    rows = min(MEASURED_ROWS, config.trainer.global_batch)
    console.print(profile_table(profile, rows))
    if not any(block.moved.at(rows) for block in profile.blocks) and any(
        b.stays.at(rows) for b in profile.blocks
    ):
        console.print(
            f"no activation of {rows} row(s) can be offloaded: tensors smaller than "
            f"swap.minimum_bytes={config.swap.smallest_bytes(device_kind(config))} stay on the device",
            soft_wrap=True,
        )
    console.print(f"profile: {parsed.output}", soft_wrap=True)
    return 0

"""``parallax doctor``: what this machine has, and what will go wrong on it."""

from __future__ import annotations

import argparse

from parallax.commands.options import add_json
from parallax.machine.doctor import run_doctor

EXAMPLES = """examples:
  parallax doctor                                       what this machine has, and what will go wrong on it
  parallax doctor --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Print it; the exit code."""
    return run_doctor(parsed.json)

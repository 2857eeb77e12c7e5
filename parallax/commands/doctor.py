"""``parallax doctor``: show the devices, memory and links of this machine, and its known problems."""

from __future__ import annotations

import argparse
from pathlib import Path

from parallax.commands.options import add_json
from parallax.common.terminal import safe_console
from parallax.errors import ConfigError
from parallax.machine.doctor import run_doctor
from parallax.machine.inventory import write_cluster

EXAMPLES = """examples:
  parallax doctor                                       this machine's devices and memory, and the problems to expect
  parallax doctor --json
  parallax doctor --write-cluster ours.yaml             this host, or all nodes of Slurm, as a cluster to plan for
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_json(parser)
    parser.add_argument(
        "--write-cluster",
        type=Path,
        metavar="FILE",
        help="write the devices of this host, or of all nodes of Slurm, as an option of cluster, and nothing else",
    )


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    if parsed.write_cluster is None:
        return run_doctor(parsed.json)
    if parsed.json:
        raise ConfigError(
            "--write-cluster writes a file, and prints nothing for programs: leave out --json"
        )
    for line in write_cluster(parsed.write_cluster):
        safe_console().print(line, highlight=False, markup=False, soft_wrap=True)
    return 0

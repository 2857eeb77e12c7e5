"""``parallax import``: make a run's first checkpoint from weights of other libraries."""

from __future__ import annotations

import argparse
from pathlib import Path

from parallax.commands.options import add_json, add_overrides, console_of, print_json
from parallax.common.units import format_bytes
from parallax.run.imports import SOURCES, import_run, import_settings
from parallax.run.working import working

EXAMPLES = """examples:
  parallax import ~/llama --from huggingface name=tuned      runs/tuned, with the model that its config.json names
  parallax import weights.safetensors --from safetensors name=mine model=custom model.target=mymodel:build
  parallax import step-2000 --from dcp --step 2000 name=theirs model=gpt model.layers=4   optimizer states, too
  parallax train name=theirs                                 resumes from it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a file or a folder")
    parser.add_argument(
        "--from",
        dest="form",
        required=True,
        choices=list(SOURCES),
        help="safetensors: a file, or a folder of shards, with the model's own names; dcp: a folder of "
        "torch.distributed.checkpoint; huggingface: a folder of transformers",
    )
    parser.add_argument(
        "--step",
        type=int,
        default=0,
        help="steps that it was trained for, from which learning rate and rows continue (default: 0)",
    )
    parser.add_argument(
        "--weights-only", action="store_true", help="leave out the optimizer states"
    )
    add_json(parser)
    add_overrides(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    console = console_of(parsed)
    with working(console, "importing") as work:
        path = parsed.source.expanduser()
        config = import_settings(path, parsed.form, parsed.overrides)
        work.limit(config.trainer)
        found = import_run(
            config,
            path,
            parsed.form,
            step=parsed.step,
            weights_only=parsed.weights_only,
            progress=work,
        )
    if parsed.json:
        print_json(
            {
                "directory": str(found.directory),
                "step": found.step,
                "weight_bytes": found.weight_bytes,
                "state_bytes": found.state_bytes,
                "remarks": found.remarks,
            }
        )
        return 0
    states = format_bytes(found.state_bytes) if found.state_bytes else "nothing"
    steps = "" if config.trainer.steps else " trainer.steps=N"
    for line in (
        *found.remarks,
        f"step {found.step}, {format_bytes(found.weight_bytes)} of weights, {states} of optimizer states",
        f"imported to {found.directory}: `parallax train name={found.directory.name}{steps}` continues from there",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0

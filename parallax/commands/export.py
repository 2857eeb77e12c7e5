"""``parallax export``: the weights of a run's checkpoint in the formats of other libraries."""

from __future__ import annotations

import argparse
from pathlib import Path

from parallax.commands.options import (
    RUNS,
    add_checkpoint,
    add_class_paths,
    add_json,
    class_paths_of,
    console_of,
    print_json,
    trusting,
)
from parallax.common.units import format_bytes
from parallax.run.export import FORMS, CheckpointChoice, export
from parallax.run.resume import StoredRun

_SHOWN = 12  # files
EXAMPLES = """examples:
  parallax export deeper --to huggingface               runs/deeper/huggingface/step-...: from_pretrained loads it
  parallax export deeper --to huggingface --out ~/model
  parallax export deeper --to safetensors --out ~/weights   the weights alone, under the model's own names
  parallax export deeper --to dcp                       weights and optimizer states: torch.distributed.checkpoint.load
  parallax export deeper --to huggingface --best        the checkpoint with the best checkpoint.metric, not the last
  parallax export deeper --to safetensors --step 400    the checkpoint of a step
  parallax export tuned --to peft                       the adapters of a run with model.adapter
  parallax export tuned --to huggingface --merge        its base, with the adapters merged into the weights
  parallax export theirs --to safetensors model.target=mymodel:build   a run made elsewhere
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run, or its name")
    parser.add_argument(
        "--to",
        required=True,
        choices=FORMS,
        help="huggingface: a folder of transformers, with tokenizer; safetensors: the weights alone; dcp: weights and "
        "optimizer states, for torch.distributed.checkpoint; peft: adapters",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--merge",
        action="store_true",
        help="merge the run's adapters into the weights of their base",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a new or empty folder; one of the run's by default"
    )
    parser.add_argument(
        "--weights",
        choices=("trained", "ema"),
        default="trained",
        help="trained: the weights of the last step; ema: their averages, of a run with ema=on or ema=average",
    )
    add_class_paths(parser)
    add_json(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    console = console_of(parsed)
    directory = parsed.run if parsed.run.is_dir() else RUNS / parsed.run
    out = parsed.out.expanduser() if parsed.out is not None else None
    found = StoredRun.read(directory, trusting(class_paths_of(parsed)))
    with console.status("exporting"):
        choice = CheckpointChoice(step=parsed.step, best=parsed.best)
        exported = export(
            found,
            FORMS[parsed.to],
            out,
            choice=choice,
            merge=parsed.merge,
            averaged=parsed.weights == "ema",
        )
    if parsed.json:
        print_json(
            {
                "directory": str(exported.directory),
                "step": exported.step,
                "weight_bytes": exported.weight_bytes,
                "files": exported.files,
                "remarks": exported.remarks,
            }
        )
        return 0
    for remark in exported.remarks:
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    size, files = format_bytes(exported.weight_bytes), ", ".join(exported.files[:_SHOWN])
    more = f" and {len(exported.files) - _SHOWN} more" if len(exported.files) > _SHOWN else ""
    console.print(
        f"step {exported.step}, {size}: {files}{more}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print(
        f"exported to {exported.directory}", highlight=False, markup=False, soft_wrap=True
    )
    return 0

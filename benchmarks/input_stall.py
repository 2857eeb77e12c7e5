"""How long do steps wait for their rows?  ``python -m benchmarks.input_stall [--json] [--only TEXT] [--records]``

ResNet-18 trains on JPEG files of 256 pixels, and the byte-level GPT on text, each as a user would: ``parallax train``
in processes of its own, on one rank and on four, with and without the files in memory, workers and reading ahead. The
share of the step in which the slowest rank waits for rows is the run's own ``input_share``; the bar is 10%, which is
MLPerf Storage's bar of 90% utilisation. The images are random textures, whose JPEG files are as large as photographs'.

With ``--records``, how many rows a second does a run get? The same files are in tar files, and the model is a single
convolution, so that a step takes no longer than its rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

BAR = 0.1
IMAGES, CLASSES, PIXELS = 480, 4, 256
COMMON = ["trainer.eval_every=0", "trainer.checkpoint_every=0", "logger=none"]
PHOTOGRAPHS = [
    *("model=custom", "model.target=benchmarks.resnet:resnet18", f"model.kwargs.classes={CLASSES}"),
    *("data=images", "data.size=224", "data.crop=random", "data.flip=true"),
    *("trainer.global_batch=16", "trainer.steps=12", "replicas=sync"),
]
RECORDS = [
    *("model=custom", "model.target=benchmarks.input_stall:Small", "replicas=sync"),
    *("data=shards", "data.size=224", "data.crop=random", "data.flip=true"),
    *("trainer.global_batch=48", "trainer.steps=16"),
]
TEXT = ["model=gpt", "data=text", "data.max_bytes=4MiB", "trainer.global_batch=16"]


@dataclass(frozen=True, kw_only=True)
class Waited:
    """A run's share of waiting for rows, and its speed."""

    case: str
    input_share: float
    rows_per_second: float


def cases() -> dict[str, list[str]]:
    """Return the settings of each run by its name."""
    found = {"GPT, 1 rank": [*TEXT, "trainer.steps=12", "cluster.devices=1"]}
    for ranks in (1, 4):
        for name, settings in (
            ("from disk, read when needed", ["data.workers=0"]),
            ("from disk, 1 worker, one request ahead", ["data.workers=1", "data.prefetch=1"]),
            ("from disk, 1 worker", ["data.workers=1"]),
            ("in memory, read when needed", ["data.workers=0", "data.in_memory=true"]),
            ("in memory, 1 worker", ["data.workers=1", "data.in_memory=true"]),
        ):
            place = [f"cluster.devices={ranks}", "plan.stages=1", f"plan.replicas={ranks}"]
            found[f"ResNet-18, {ranks} rank(s), {name}"] = [*PHOTOGRAPHS, *place, *settings]
    return found


def record_cases() -> dict[str, list[str]]:
    """Return the settings of each run on records by its name."""
    found = {}
    for ranks in (1, 4):
        for place, kept in (("from disk", "false"), ("in memory", "true")):
            for name, settings in (
                ("read when needed", ["data.workers=0"]),
                ("1 worker, one request ahead", ["data.workers=1", "data.prefetch=1"]),
                ("1 worker", ["data.workers=1"]),
            ):
                plan = [f"cluster.devices={ranks}", "plan.stages=1", f"plan.replicas={ranks}"]
                found[f"{ranks} rank(s), {place}, {name}"] = [
                    *(*RECORDS, *plan, *settings),
                    f"data.in_memory={kept}",
                ]
    return found


class Small(nn.Sequential):
    """A model whose step is quicker than reading its rows."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
        )

    @staticmethod
    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores, targets)


def make_records(images: Path, folder: Path) -> None:
    """Write the JPEG files of ``images`` into four tar files."""
    folder.mkdir()
    for shard in range(4):
        with tarfile.open(folder / f"{shard}.tar", "w") as file:
            for number, image in enumerate(sorted(images.rglob("*.jpg"))[shard::4]):
                label = folder / f"{shard}-{number}.cls"
                label.write_text(image.parent.name.removeprefix("class-"))
                file.add(image, f"{shard}-{number}.jpg")
                file.add(label, label.name)
                label.unlink()


def make_images(folder: Path) -> None:
    """Write the JPEG files, a folder for each class."""
    random = np.random.default_rng(0)
    for number in range(IMAGES):
        place = folder / f"class-{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(1.5))
        image.save(place / f"{number:05d}.jpg", quality=90)


def measured(only: str, chosen: dict[str, list[str]]) -> Iterator[Waited]:
    """Train each case and yield what its summary says."""
    with tempfile.TemporaryDirectory(prefix="parallax-stall-") as name:
        folder = Path(name)
        make_images(folder / "images")
        make_records(folder / "images", folder / "shards")
        for number, (case, settings) in enumerate(chosen.items()):
            if only not in case:
                continue
            run = f"case-{number}"
            path = [
                f"data.path={folder / kind}"
                for kind in ("images", "shards")
                if f"data={kind}" in settings
            ]
            command = [sys.executable, "-m", "parallax", "train", f"name={run}"]
            paths = f"{Path(__file__).resolve().parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            subprocess.run(
                [*command, *COMMON, *settings, *path],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
                check=True,
                stdout=subprocess.DEVNULL,
            )
            summary = json.loads((folder / "runs" / run / "summary.json").read_text())
            yield Waited(
                case=case,
                input_share=summary["input_share"],
                rows_per_second=summary["rows_per_second"],
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.input_stall",
        description="How long do steps wait for their rows?",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name has it")
    parser.add_argument("--records", action="store_true", help="rows a second of tar files")
    arguments = parser.parse_args()
    chosen = record_cases() if arguments.records else cases()
    table = Table("case", "waits for rows", "rows/s", box=box.SIMPLE_HEAD)
    for waited in measured(arguments.only, chosen):
        if arguments.json:
            print(json.dumps(asdict(waited)), flush=True)
        else:
            print(f"{waited.case}: {waited.input_share:.1%}", file=sys.stderr)
        table.add_row(waited.case, f"{waited.input_share:.1%}", f"{waited.rows_per_second:.1f}")
    if not arguments.json:
        Console().print(table, f"bar: at most {BAR:.0%} where rows are read ahead")


if __name__ == "__main__":
    main()

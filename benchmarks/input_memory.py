"""Does reading rows take more and more memory?  ``python -m benchmarks.input_memory [--json]``

A rank reads 50,000 rows of images, of tar files and of a user's Dataset, without workers and with one. The memory is
the proportional set size of the rank and its workers, without mapped files. The slope is that of the line of least
squares over rows 5,000 to 50,000, so a leak of a few bytes for each row is seen.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import Dataset

from parallax.model.factory.mlp import MLPConfig
from parallax.train.data.dataset import DatasetDataConfig
from parallax.train.data.images import ImagesDataConfig
from parallax.train.data.indexed import IndexedDataConfig
from parallax.train.data.shards import ShardsDataConfig

FILES, PIXELS = 1000, 40
BATCH, SKIPPED, ROWS, EVERY = 50, 5_000, 50_000, 1_000


@dataclass(frozen=True, kw_only=True)
class Grown:
    """How memory grows while rows are read, and how much there is at the end."""

    case: str
    bytes_per_row: float
    bytes_at_end: int


class Noisy(Dataset[tuple[Tensor, int]]):
    """Rows of 1 KiB, to each of which noise is added."""

    def __init__(self) -> None:
        self.rows = torch.rand(FILES, 256)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.rows[row] + torch.rand(256), row % 7


def write_rows(folder: Path) -> None:
    """Write small JPEG files, and the same into a tar file."""
    random = np.random.default_rng(0)
    (folder / "images" / "class").mkdir(parents=True)
    with tarfile.open(folder / "rows.tar", "w") as shard:
        for number in range(FILES):
            pixels = random.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "jpeg")
            (folder / "images" / "class" / f"{number:04}.jpg").write_bytes(file.getvalue())
            for name, content in (("jpg", file.getvalue()), ("cls", b"1")):
                member = tarfile.TarInfo(f"{number:04}.{name}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


def cases(folder: Path) -> Iterator[tuple[str, IndexedDataConfig]]:
    kinds: dict[str, IndexedDataConfig] = {
        "images": ImagesDataConfig(
            path=str(folder / "images"), size=32, crop="random", flip=True, validation=0
        ),
        "shards": ShardsDataConfig(path=str(folder / "rows.tar"), size=32, validation=0),
        "dataset": DatasetDataConfig(target="benchmarks.input_memory:Noisy", validation=0),
    }
    for name, config in kinds.items():
        for workers in (0, 1):
            yield f"{name}, {workers} worker(s)", replace(config, workers=workers)


def grown(case: str, config: IndexedDataConfig) -> Grown:
    """Read the rows of ``config``."""
    source = config.indexed(MLPConfig(), 0)
    source.start()
    rows, sizes = list[int](), list[int]()
    try:
        for read in range(BATCH, ROWS + 1, BATCH):
            batch = source.batch(BATCH)
            batch.inputs(0, BATCH), batch.targets(0, BATCH)
            if read >= SKIPPED and read % EVERY == 0:
                rows.append(read)
                sizes.append(_memory())
    finally:
        source.close()
    slope, _ = np.polyfit(rows, sizes, 1)
    return Grown(case=case, bytes_per_row=float(slope), bytes_at_end=sizes[-1])


def _memory() -> int:
    """Return the bytes of this process and its workers; shared bytes count once. Mapped files of other processes, such
    as libraries, do not count, because their share changes with these processes."""
    here, found = psutil.Process(), 0
    for each in (here, *here.children(recursive=True)):
        for line in Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                found += int(line.split()[1]) * 2**10
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.input_memory",
        description="Does reading rows take more and more memory?",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    table = Table("case", "bytes a row", "MiB at the end", box=box.SIMPLE_HEAD)
    with tempfile.TemporaryDirectory(prefix="parallax-memory-") as name:
        write_rows(Path(name))
        for case, config in cases(Path(name)):
            found = grown(case, config)
            if arguments.json:
                print(json.dumps(asdict(found)), flush=True)
            else:
                print(f"{found.case}: {found.bytes_per_row:.1f} bytes a row", file=sys.stderr)
            at_end = f"{found.bytes_at_end / 2**20:.0f}"
            table.add_row(found.case, f"{found.bytes_per_row:.1f}", at_end)
    if not arguments.json:
        Console().print(table)


if __name__ == "__main__":
    main()

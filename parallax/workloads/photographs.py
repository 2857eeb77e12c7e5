"""Thousands of photographs: crops of the two sample images of scikit-learn, flipped and scaled.

As rows of a run: ``data=dataset data.target=parallax.workloads.photographs:Photographs``. As files, for
``data=images``, ``data=shards`` and ``parallax predict``:
``python -m parallax.workloads.photographs FOLDER --count 3700``.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from parallax.errors import DataError

NAMES = "temple", "flower"


@functools.cache
def _sources() -> list[Image.Image]:
    """Return the two sample images of scikit-learn without importing scikit-learn, because the import takes a second
    and changes the environment."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError(
            "the photographs are those of scikit-learn: pip install 'parallax-train[workloads]', or name your own with "
            "data=images data.path=FOLDER"
        )
    folder = Path(found.submodule_search_locations[0], "datasets", "images")
    return [Image.open(folder / name).convert("RGB") for name in ("china.jpg", "flower.jpg")]


def photograph(index: int, pixels: int | Sequence[int]) -> tuple[Image.Image, int]:
    """Return a crop, and its class: 0 for the temple, 1 for the flower. The crop is square and scaled to ``pixels`` by
    ``pixels``, or to the height and the width in ``pixels``.

    The same index gives the same part of the same photograph at any size.
    """
    height, width = (pixels, pixels) if isinstance(pixels, int) else pixels
    random, label = np.random.default_rng(index), index % 2
    source = _sources()[label]
    side = int(random.integers(160, min(source.size) + 1))
    left, top = (int(random.integers(0, length - side + 1)) for length in source.size)
    part = source.resize((width, height), box=(left, top, left + side, top + side))
    flipped = random.random() < 0.5
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flipped else part, label


class Photographs(Dataset[tuple[Tensor, int]]):
    """``count`` photographs as float32 (3, height, width) between 0 and 1, with their classes. ``pixels``: the side of
    a square, or height and width."""

    def __init__(self, count: int = 4000, pixels: int | Sequence[int] = 64) -> None:
        self.count, self.pixels = count, pixels

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = photograph(index, self.pixels)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255, label


def write(folder: Path, count: int, pixels: int, shards: int = 0) -> None:
    """Write ``count`` photographs of ``pixels`` × ``pixels`` as JPEG files, into a folder for each class. ``shards``:
    write them into this number of tar files instead; 0: into folders."""
    folder.mkdir(parents=True)
    tars = [tarfile.open(folder / f"{shard}.tar", "w") for shard in range(shards)]  # noqa: SIM115
    for index in range(count):
        image, label = photograph(index, pixels)
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=90)
        if not tars:
            (folder / NAMES[label]).mkdir(exist_ok=True)
            (folder / NAMES[label] / f"{index:06d}.jpg").write_bytes(stream.getvalue())
            continue
        for suffix, content in ("jpg", stream.getvalue()), ("cls", str(label).encode()):
            entry = tarfile.TarInfo(f"{index:06d}.{suffix}")
            entry.size = len(content)
            tars[index % shards].addfile(entry, io.BytesIO(content))
    for tar in tars:
        tar.close()


def main() -> None:
    """Write photographs as JPEG files."""
    parser = argparse.ArgumentParser(
        prog="python -m parallax.workloads.photographs", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--count", type=int, default=3700)
    parser.add_argument("--pixels", type=int, default=256)
    parser.add_argument("--shards", type=int, default=0, help="tar files; 0: a folder a class")
    given = parser.parse_args()
    write(given.folder, given.count, given.pixels, given.shards)


if __name__ == "__main__":
    main()

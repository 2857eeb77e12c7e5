"""Images made on the spot, for the tests of ``data=images`` and ``data=shards``, and transforms as users write them."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def smooth(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image without details, which any way of resizing leaves nearly as it is."""
    draw = np.random.default_rng(seed)
    small = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "png", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def folder(root: Path, counts: dict[str, int], *, side: int = 12, kind: str = "png") -> Path:
    """A folder for each class, with as many images; the images differ."""
    seed = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            seed += 1
            (root / name / f"{number:03d}.{kind}").write_bytes(
                encoded(smooth(side + 2, side, seed), {"jpg": "jpeg"}.get(kind, kind))
            )
    return root


def turned(image: Image.Image) -> Image.Image:
    """A transform of Pillow images that draws from Python's generator."""
    return image.rotate(random.choice([0, 90, 180, 270])).resize((6, 6))


def noisy(image: Image.Image) -> Tensor:
    """A transform into tensors that draws from torch's and numpy's generators."""
    values = torch.from_numpy(np.asarray(image.resize((4, 4))).copy()).float()
    return values.permute(2, 0, 1) + torch.rand(3, 4, 4) + np.random.rand()  # noqa: NPY002


def uneven(image: Image.Image) -> Tensor:
    return torch.zeros(image.width)


def text(image: Image.Image) -> str:
    return str(image)


def failing(image: Image.Image) -> Image.Image:
    raise RuntimeError("no such colour")

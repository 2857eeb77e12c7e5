"""Reading folders of images, for the tests of ``data=images``."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallax.train.data.images import ImagesDataConfig
from parallax.train.data.indexed import IndexedSource
from tests.unit.train.image_rows import Step, read, refusal, started

BARE: dict[str, Any] = {"mean": [0.0], "std": [1.0]}  # values from 0 to 1


def opened(place: Path, seed: int = 3, **settings: Any) -> AbstractContextManager[IndexedSource]:
    """The images of a folder, 8 × 8 and read in this process unless ``settings`` differ."""
    return started(ImagesDataConfig(path=str(place), **{"size": 8, "workers": 0, **settings}), seed)


def whole(place: Path, **settings: Any) -> Step:
    """All rows in their own order, none held out."""
    with opened(place, validation=0, shuffle=False, **settings) as source:
        return read(source, len(source))


def line(place: Path, **settings: Any) -> str:
    """The error of opening and reading a folder."""
    return refusal(lambda: whole(place, **settings))


def settled(place: Path) -> Path:
    """Give the folders of ``place`` an older time, so that their index is kept."""
    for each in (place, *(inner for inner in place.rglob("*") if inner.is_dir())):
        os.utime(each, (10**9, 10**9))
    return place


def one(
    tmp_path: Path, content: bytes, name: str = "x.png", **settings: Any
) -> NDArray[np.float32]:
    """The only row of a folder, (channels, height, width), from 0 to 1."""
    (tmp_path / "one" / "class").mkdir(parents=True, exist_ok=True)
    (tmp_path / "one" / "class" / name).write_bytes(content)
    found: NDArray[np.float32] = whole(tmp_path / "one", **BARE, **settings)[0][0].numpy()
    return found

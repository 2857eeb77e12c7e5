"""Shards made on the spot, and reading them, for the tests of ``data=shards``."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from parallax.train.data.indexed import IndexedSource
from parallax.train.data.shards import ShardsDataConfig
from tests.unit.train.image_rows import Step, read, refusal, started
from tests.unit.train.pictures import encoded, smooth

Members = Sequence[tuple[str, bytes]]


def tar(place: Path, members: Members, **options: Any) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(place, "w", **options) as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return place


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def samples(first: int, count: int, kind: str = "png") -> list[tuple[str, bytes]]:
    """Samples of an image, its class as text, details as JSON, and an array."""
    found = []
    for number in range(first, first + count):
        array = io.BytesIO()
        np.save(array, np.full((2, 3), number, np.float32))
        details = {"label": number % 3, "box": [0.5, number], "name": "x"}
        image = encoded(smooth(14, 12, number), {"jpg": "jpeg"}.get(kind, kind))
        found += [
            (f"a/{number:04d}.{kind}", image),
            (f"a/{number:04d}.cls", str(number % 5).encode()),
            (f"a/{number:04d}.json", json.dumps(details).encode()),
            (f"a/{number:04d}.npy", array.getvalue()),
        ]
    return found


def three_shards(root: Path) -> Path:
    """Three shards of 9, 1 and 14 samples."""
    for number, (first, count) in enumerate(((0, 9), (9, 1), (10, 14))):
        tar(root / f"s-{number:02d}.tar", samples(first, count))
    return root


def opened(place: object, seed: int = 3, **settings: Any) -> AbstractContextManager[IndexedSource]:
    return started(ShardsDataConfig(path=str(place), **{"size": 8, "workers": 0, **settings}), seed)


def whole(place: object, **settings: Any) -> Step:
    with opened(place, validation=0, shuffle=False, **settings) as source:
        return read(source, len(source))


def line(place: object, **settings: Any) -> str:
    return refusal(lambda: whole(place, **settings))

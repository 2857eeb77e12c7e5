"""Are rows read as fast as by torch's DataLoader?  ``python -m benchmarks.inputs [--json] [--only KIND]``

For each kind of data, the same rows are read by turns by the source of ``data=KIND`` and by
``torch.utils.data.DataLoader`` over a Dataset that does the same to each row, written as users write it: shuffled, the
same batch size, as many workers. A turn starts its workers, reads a few batches, and then counts rows for a while.

``images``   JPEGs of 500 × 375 in folders, random resized crops of 224 and flips
``photos``   JPEGs of 2000 × 1500 in folders, the middle at 224
``shards``   the images of ``images`` in tar files; the Dataset seeks in them
``text``     windows of a text; the Dataset maps the same file
``dataset``  the same Dataset of a user on both sides: 16 × 64 × 64 values each, drawn and added to

``ratio`` is our seconds for a row over theirs in neighbouring turns (benchmarks/ratios.py): below 1, ours is faster.

Another kind is one more function of :data:`KINDS`.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.ratios import ratios, show
from benchmarks.workers import rotated
from parallax.model.factory.mlp import MLPConfig
from parallax.model.factory.transformer import TransformerConfig
from parallax.model.source import ModelConfig
from parallax.train.data.dataset import DatasetDataConfig
from parallax.train.data.images import ImagesDataConfig
from parallax.train.data.indexed import IndexedDataConfig, IndexedSource
from parallax.train.data.shards import ShardsDataConfig
from parallax.train.data.text import TextDataConfig, open_corpus

Row = tuple[Tensor, Any]
Batches = Iterator[int]
SIDE = 224
MEAN, DEVIATION = (
    np.array(each, np.float32) for each in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """``images``, ``photos``: how many files are made. A turn counts rows for ``seconds``, after ``warm`` batches."""

    repetitions: int = 5
    seconds: float = 0.7
    warm: int = 4
    images: int = 384
    photos: int = 48


@dataclass(frozen=True, kw_only=True)
class Case:
    """Our settings of a kind, the Dataset beside it, and the rows of a batch."""

    config: IndexedDataConfig
    dataset: Dataset[Row]
    rows: int
    model: ModelConfig = field(default_factory=MLPConfig)


def ours(case: Case, workers: int) -> Batches:
    """Yield the rows of each batch that was read."""
    source = replace(case.config, workers=workers, validation=0).open(case.model, 0)
    assert isinstance(source, IndexedSource)
    source.start()
    try:
        while True:
            batch = source.batch(case.rows)
            batch.inputs(0, case.rows)
            batch.targets(0, case.rows)
            yield case.rows
    finally:
        source.close()


def theirs(case: Case, workers: int) -> Batches:
    """Yield the rows of each batch that was read."""
    loader = DataLoader(
        case.dataset,
        case.rows,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    while True:
        for _ in loader:
            yield case.rows


WAYS: dict[str, Callable[[Case, int], Batches]] = {"ours": ours, "theirs": theirs}


def turn(batches: Batches, sizes: Sizes) -> float:
    """Return the seconds for a row."""
    for _ in range(sizes.warm):
        next(batches)
    rows, begun = 0, time.perf_counter()
    while (taken := time.perf_counter() - begun) < sizes.seconds or not rows:
        rows += next(batches)
    batches.close()  # type: ignore[attr-defined]
    return taken / rows


# ------------------------------------------------------------------------------------------------ images


def picture(width: int, height: int, seed: int) -> bytes:
    """A JPEG with areas and details, of about as many bytes as a photograph."""
    draw = np.random.default_rng(seed)
    areas = Image.fromarray(draw.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    pixels = np.asarray(areas.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noise = draw.normal(0, 12, (height, width, 1))
    file = io.BytesIO()
    Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(file, "jpeg", quality=85)
    return file.getvalue()


def picture_files(place: Path, count: int, width: int, height: int) -> list[Path]:
    """Write pictures of four classes."""
    found = []
    for number in range(count):
        path = place / f"class{number % 4}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(width, height, number))
        found.append(path)
    return found


def normalized(image: Image.Image) -> Tensor:
    pixels = np.asarray(image, np.float32) / 255
    return torch.from_numpy(np.ascontiguousarray(((pixels - MEAN) / DEVIATION).transpose(2, 0, 1)))


def random_crop(image: Image.Image) -> Image.Image:
    """A random resized crop as torchvision draws it, and a flip."""
    width, height = image.size
    for _ in range(10):
        area = width * height * float(torch.empty(1).uniform_(0.08, 1))
        ratio = float(torch.exp(torch.empty(1).uniform_(np.log(3 / 4), np.log(4 / 3))))
        across, down = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if across <= width and down <= height:
            break
    else:
        across = down = min(width, height)
    left = int(torch.randint(0, width - across + 1, (1,)))
    upper = int(torch.randint(0, height - down + 1, (1,)))
    image = image.crop((left, upper, left + across, upper + down))
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    if torch.rand(1) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def center_crop(image: Image.Image) -> Image.Image:
    """Resize the short side and cut out the middle."""
    short = min(image.size)
    width, height = (round(each * SIDE / short) for each in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, upper = (width - SIDE) // 2, (height - SIDE) // 2
    return image.crop((left, upper, left + SIDE, upper + SIDE))


class ImageFiles(Dataset[Row]):
    """Images of files, whose classes follow each other."""

    def __init__(self, paths: Sequence[Path], cut: Callable[[Image.Image], Image.Image]) -> None:
        self.paths, self.cut = list(map(str, paths)), cut

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> Row:
        with open(self.paths[row], "rb") as file:
            image = Image.open(file).convert("RGB")
        return normalized(self.cut(image)), row % 4


def images(place: Path, sizes: Sizes) -> Case:
    paths = picture_files(place, sizes.images, 500, 375)
    config = ImagesDataConfig(path=str(place), crop="random", flip=True)
    return Case(config=config, dataset=ImageFiles(paths, random_crop), rows=32)


def photos(place: Path, sizes: Sizes) -> Case:
    paths = picture_files(place, sizes.photos, 2000, 1500)
    config = ImagesDataConfig(path=str(place))
    return Case(config=config, dataset=ImageFiles(paths, center_crop), rows=8)


# ------------------------------------------------------------------------------------------------ shards


class TarMembers(Dataset[Row]):
    """Finds all members first, and opens each tar file once in each process."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.rows: list[tuple[str, int, int, int, int]] = []
        self.files: dict[str, io.BufferedReader] = {}
        for path in paths:
            with tarfile.open(path) as file:
                members = file.getmembers()
            for image, label in zip(members[::2], members[1::2]):
                places = image.offset_data, image.size, label.offset_data, label.size
                self.rows.append((str(path), *places))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Row:
        path, offset, size, label_offset, label_size = self.rows[row]
        key = f"{os.getpid()} {path}"
        if key not in self.files:
            self.files[key] = open(path, "rb")  # noqa: SIM115
        file = self.files[key]
        file.seek(offset)
        image = Image.open(io.BytesIO(file.read(size))).convert("RGB")
        file.seek(label_offset)
        return normalized(random_crop(image)), int(file.read(label_size))


def shards(place: Path, sizes: Sizes) -> Case:
    place.mkdir(parents=True, exist_ok=True)
    count = max(1, sizes.images // 128)
    paths = [place / f"{number:03d}.tar" for number in range(count)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w") as file:
            for number in range(shard, sizes.images, count):
                for kind, content in (
                    ("jpg", picture(500, 375, number)),
                    ("cls", str(number % 4).encode()),
                ):
                    member = tarfile.TarInfo(f"{number:05d}.{kind}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))
    config = ShardsDataConfig(path=str(place), crop="random", flip=True)
    return Case(config=config, dataset=TarMembers(paths), rows=32)


# -------------------------------------------------------------------------------------- text and datasets


class Windows(Dataset[Row]):
    """Windows of text, and the byte after each."""

    def __init__(self, text: np.ndarray[Any, Any], sequence: int) -> None:
        self.text, self.sequence = text, sequence

    def __len__(self) -> int:
        return len(self.text) // (self.sequence + 1)

    def __getitem__(self, row: int) -> Row:
        first = row * (self.sequence + 1)
        window = torch.from_numpy(self.text[first : first + self.sequence + 1].astype(np.int64))
        return window[:-1], window[1:]


def text(place: Path, sizes: Sizes) -> Case:  # noqa: ARG001
    model, config = TransformerConfig(sequence=256), TextDataConfig(max_bytes="16MiB")
    dataset = Windows(open_corpus(config).bytes, model.sequence)
    return Case(config=config, dataset=dataset, rows=64, model=model)


class Noisy(Dataset[Row]):
    """Drawn values."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, row: int) -> Row:
        return torch.rand(16, 64, 64) + row, row % 4


@functools.cache
def noisy() -> Dataset[Row]:
    """Return the Dataset of ``data=dataset``."""
    return Noisy()


def dataset(place: Path, sizes: Sizes) -> Case:  # noqa: ARG001
    config = DatasetDataConfig(target="benchmarks.inputs:noisy")
    return Case(config=config, dataset=noisy(), rows=32)


KINDS: dict[str, Callable[[Path, Sizes], Case]] = {
    "images": images,
    "photos": photos,
    "shards": shards,
    "text": text,
    "dataset": dataset,
}


# --------------------------------------------------------------------------------------------- measuring


def measure(sizes: Sizes, kinds: Sequence[str], workers: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row of numbers for each kind and number of workers."""
    found = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            case = KINDS[kind](Path(folder), sizes)
            for count in workers:
                taken: dict[str, list[float]] = {name: [] for name in WAYS}
                for repetition in range(sizes.repetitions):
                    for name in rotated(list(WAYS), repetition):
                        taken[name].append(turn(WAYS[name](case, count), sizes))
                found.append(
                    {
                        "kind": kind,
                        "workers": count,
                        "rows_per_second": {name: 1 / min(each) for name, each in taken.items()},
                        "ratio": ratios(taken["ours"], taken["theirs"]),
                        "seconds_per_row": taken,
                    }
                )
    return found


def table(found: Sequence[dict[str, Any]]) -> Table:
    """The numbers for people."""
    result = Table(title="rows per second, and our seconds for a row over those of a DataLoader")
    for name in ("data", "workers", "ours", "DataLoader", "ratio", "fastest"):
        result.add_column(name, no_wrap=True, justify="left" if name == "data" else "right")
    for each in found:
        rates = [f"{each['rows_per_second'][name]:,.0f}" for name in WAYS]
        ratio = each["ratio"]
        result.add_row(
            each["kind"], str(each["workers"]), *rates, show(ratio), f"{ratio['fastest']:.3f}"
        )
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", action="append", choices=list(KINDS), help="one kind of data")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    asked: dict[str, Any] = vars(parser.parse_args())
    as_json, only, workers = asked.pop("json"), asked.pop("only"), asked.pop("workers")
    torch.set_num_threads(1)
    sizes = Sizes(**asked)
    found = measure(sizes, only or list(KINDS), workers)
    if as_json:
        about = {"torch": torch.__version__, "cores": os.cpu_count(), "sizes": asdict(sizes)}
        print(json.dumps({**about, "rows": found}))
    else:
        Console().print(table(found))


if __name__ == "__main__":
    main()

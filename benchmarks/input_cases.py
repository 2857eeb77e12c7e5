"""What ``benchmarks.inputs`` reads: rows of each kind of data, and a Dataset of the same rows as users write it."""

from __future__ import annotations

import functools
import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from parallax.model.factory.mlp import MLPConfig
from parallax.model.factory.transformer import TransformerConfig
from parallax.model.source import ModelConfig
from parallax.train.data.arrays import ArraysDataConfig
from parallax.train.data.audio import AudioDataConfig
from parallax.train.data.chat import ChatDataConfig
from parallax.train.data.dataset import DatasetDataConfig
from parallax.train.data.images import ImagesDataConfig
from parallax.train.data.indexed import IndexedDataConfig
from parallax.train.data.parquet import ParquetDataConfig
from parallax.train.data.shards import ShardsDataConfig
from parallax.train.data.text import TextDataConfig, open_corpus
from parallax.train.data.tokens import TokensDataConfig

Row = tuple[Tensor, Any]
SIDE = 224
MEAN, DEVIATION = (
    np.array(each, np.float32) for each in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """``images``, ``photos``, ``sounds``, ``chats``, ``rows``: how many are made. A turn counts rows for ``seconds``,
    after ``warm`` batches."""

    repetitions: int = 5
    seconds: float = 0.7
    warm: int = 4
    images: int = 384
    photos: int = 48
    sounds: int = 128
    chats: int = 2000
    rows: int = 8192


@dataclass(frozen=True, kw_only=True)
class Case:
    """Our settings of a kind, the Dataset beside it, and the rows of a batch."""

    config: IndexedDataConfig
    dataset: Dataset[Any]
    rows: int
    model: ModelConfig = field(default_factory=MLPConfig)
    collate: Callable[[list[Any]], Any] | None = None  # of the Dataset's rows


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
    config = DatasetDataConfig(target="benchmarks.input_cases:noisy")
    return Case(config=config, dataset=noisy(), rows=32)


# ------------------------------------------------------------------------------------ tokens and conversations


def tokens(place: Path, sizes: Sizes) -> Case:  # noqa: ARG001
    place.mkdir(parents=True, exist_ok=True)
    model, path = TransformerConfig(sequence=1024, vocabulary=50257), place / "train.bin"
    np.random.default_rng(0).integers(0, 50257, 2**23, dtype=np.uint16).tofile(path)
    dataset = Windows(np.memmap(path, np.uint16, "r"), model.sequence)
    return Case(config=TokensDataConfig(path=str(path)), dataset=dataset, rows=32, model=model)


TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def conversations(path: Path, count: int) -> list[list[dict[str, str]]]:
    """Write conversations of 2 to 8 messages, and return them."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(count):
        texts = [
            "".join(map(chr, draw.integers(97, 123, draw.integers(10, 120)))) for _ in range(8)
        ]
        roles = ["user", "assistant"] * int(draw.integers(1, 5))
        found.append([{"role": role, "content": text} for role, text in zip(roles, texts)])
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in found))
    return found


def byte_tokenizer(folder: Path) -> Any:
    """Save a tokenizer with a token for each byte, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({each: i for i, each in enumerate(["<end>", *alphabet])}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>")
    found.chat_template = TEMPLATE
    found.save_pretrained(folder)
    return found


def padded(rows: list[dict[str, Tensor]], sequence: int) -> Row:
    """Return ids and targets of conversations, each padded after its end."""
    inputs = torch.zeros(len(rows), sequence, dtype=torch.int64)
    targets = torch.full((len(rows), sequence), -100)
    for place, row in enumerate(rows):
        ids, labels = row["input_ids"], row["labels"]
        inputs[place, : len(ids)], targets[place, : len(ids) - 1] = ids, labels[1:]
    return inputs, targets


def chat(place: Path, sizes: Sizes) -> Case:
    import datasets

    place.mkdir(parents=True, exist_ok=True)
    path, model = place / "chats.jsonl", TransformerConfig(sequence=1024, vocabulary=300)
    found, tokenizer = conversations(path, sizes.chats), byte_tokenizer(place / "tokenizer")
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for each in found:
        encoded = tokenizer.apply_chat_template(
            each, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, counted = encoded["input_ids"], encoded["assistant_masks"]
        rows["input_ids"].append(ids)
        rows["labels"].append([token if own else -100 for token, own in zip(ids, counted)])
    dataset: Any = datasets.Dataset.from_dict(rows).with_format("torch")
    config = ChatDataConfig(path=str(path), tokenizer=str(place / "tokenizer"))
    collate = functools.partial(padded, sequence=model.sequence)
    return Case(config=config, dataset=dataset, rows=32, model=model, collate=collate)


# ------------------------------------------------------------------------------------ arrays, columns, sounds


class Arrays(Dataset[Row]):
    """Rows of two arrays."""

    def __init__(self, inputs: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> Row:
        return torch.from_numpy(self.inputs[row].copy()), self.targets[row]


def drawn(rows: int, values: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return inputs and targets."""
    draw = np.random.default_rng(0)
    return draw.random((rows, values), np.float32), draw.integers(0, 10, rows)


def arrays(place: Path, sizes: Sizes) -> Case:
    place.mkdir(parents=True, exist_ok=True)
    for name, values in zip(("x", "y"), drawn(sizes.rows, 1024)):
        np.save(place / f"{name}.npy", values)
    config = ArraysDataConfig(path=str(place), inputs="x", targets="y")
    mapped = (np.load(place / f"{name}.npy", mmap_mode="r") for name in ("x", "y"))
    return Case(config=config, dataset=Arrays(*mapped), rows=64)


def parquet(place: Path, sizes: Sizes) -> Case:
    import datasets
    import pyarrow
    import pyarrow.parquet

    place.mkdir(parents=True, exist_ok=True)
    inputs, targets = drawn(sizes.rows, 64)
    columns = {"x": pyarrow.FixedSizeListArray.from_arrays(inputs.reshape(-1), 64), "y": targets}
    path = str(place / "rows.parquet")
    datasets.disable_progress_bars()
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=1000)
    dataset: Any = datasets.Dataset.from_parquet(path, cache_dir=str(place / "cache"))
    return Case(config=ParquetDataConfig(path=path), dataset=dataset.with_format("torch"), rows=64)


class Sounds(Dataset[Row]):
    """A second of each sound file."""

    def __init__(self, paths: Sequence[Path], samples: int) -> None:
        self.paths, self.samples = list(map(str, paths)), samples

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> Row:
        import soundfile

        with soundfile.SoundFile(self.paths[row]) as file:
            file.seek(int(torch.randint(file.frames - self.samples + 1, (1,))))
            window = file.read(self.samples, dtype="float32", always_2d=True)
        return torch.from_numpy(window.T), row % 4


def audio(place: Path, sizes: Sizes) -> Case:
    import soundfile

    paths, rate = list[Path](), 16_000
    for number in range(sizes.sounds):
        path = place / f"class{number % 4}" / f"{number:05d}.flac"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, np.random.default_rng(number).normal(0, 0.1, 4 * rate), rate)
        paths.append(path)
    config = AudioDataConfig(path=str(place))
    return Case(config=config, dataset=Sounds(paths, rate), rows=32)


KINDS: dict[str, Callable[[Path, Sizes], Case]] = {
    "images": images,
    "photos": photos,
    "shards": shards,
    "text": text,
    "tokens": tokens,
    "chat": chat,
    "arrays": arrays,
    "parquet": parquet,
    "audio": audio,
    "dataset": dataset,
}

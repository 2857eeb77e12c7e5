"""Rows for the recipes: files in a folder, and the settings that read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.unit.train.tokenizers_ import CHATML, save


def write_images(folder: Path) -> list[str]:
    from PIL import Image

    random = np.random.default_rng(0)
    for index in range(16):
        (folder / "images" / f"{index % 3}").mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{index % 3}" / f"{index}.png")
    return [f"data.path={folder / 'images'}", "data.size=8", "data.validation=0"]


def write_text(folder: Path) -> list[str]:
    save(folder / "tokenizer", template=CHATML)
    (folder / "text.txt").write_text("\n".join(f"one two {n} three" for n in range(300)))
    return [f"data.path={folder / 'text.txt'}", f"data.tokenizer={folder / 'tokenizer'}"]


def write_chats(folder: Path) -> list[str]:
    save(folder / "tokenizer", template=CHATML)
    with (folder / "chat.jsonl").open("w") as file:
        for row in range(24):
            pair = {"question": "one " * (row % 4), "answer": "two" * (row * row % 7)}
            file.write(json.dumps(pair) + "\n")
    return [
        f"data.path={folder / 'chat.jsonl'}",
        f"data.tokenizer={folder / 'tokenizer'}",
        "data.validation=0",
    ]


def write_pairs(folder: Path) -> list[str]:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    random = np.random.default_rng(0)
    source, target = (random.integers(1, 16, (32, length)) for length in (6, 5))
    labels = np.where(random.random((32, 4)) < 0.3, -100, target[:, 1:])
    columns = {"input_ids": source, "decoder_input_ids": target[:, :-1], "labels": labels}
    table = pa.table({name: each.tolist() for name, each in columns.items()})
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    return [f"data.path={folder / 'pairs.parquet'}", "data.validation=0"]


def write_masked(folder: Path) -> list[str]:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet

    random = np.random.default_rng(0)
    tokens, kept = random.integers(2, 16, (32, 6)), np.arange(6) < random.integers(2, 7, (32, 1))
    masked = kept & (random.random((32, 6)) < 0.4)
    masked[:, 1] = True
    columns = {
        "input_ids": np.where(masked, 1, np.where(kept, tokens, 0)),
        "attention_mask": kept.astype(np.int64),
        "labels": np.where(masked, tokens, -100),
    }
    table = pa.table({name: each.tolist() for name, each in columns.items()})
    pyarrow.parquet.write_table(table, folder / "masked.parquet")
    return [f"data.path={folder / 'masked.parquet'}", "data.validation=0"]


def write_sounds(folder: Path) -> list[str]:
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    random = np.random.default_rng(0)
    for index in range(16):
        word = folder / "sounds" / f"{index % 3}"
        word.mkdir(parents=True, exist_ok=True)
        soundfile.write(word / f"{index}.wav", random.uniform(-1, 1, 50 + index), 100)
    return [f"data.path={folder / 'sounds'}", "data.seconds=0.5", "data.validation=0"]

"""Small rows of every kind, as files of users, and a model whose loss depends on every value that it gets."""

from __future__ import annotations

import csv
import json
import os
import signal
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.unit.train import datasets

ROWS = 23
_KILL = Path("kill")  # holds the number of forwards after which a process is killed
_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def digests(values: Tensor) -> Tensor:
    """Return a number for each row, (rows, 1), which any change of one of its values changes."""
    each = values.double().reshape(len(values), -1)
    weights = torch.sin(torch.arange(1, each.shape[1] + 1, dtype=torch.float64) * 12.9898)
    return torch.sin((each @ weights)[:, None] * 3.7)


class Same(nn.Module):
    """Returns its inputs. The process that gets here last before its time is killed."""

    forwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and "RANK" in os.environ and torch.is_grad_enabled():
            Same.forwards += 1
            if _KILL.exists() and Same.forwards >= int(_KILL.read_text()):
                _KILL.rename("killed")
                os.kill(os.getpid(), signal.SIGKILL)
        return x * self.weight


class Digests(nn.Module):
    """The loss is the mean, over the rows, of the digests of inputs and targets."""

    def __init__(self, sequence: int, vocabulary: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(Same(), Same(), Same(), Same())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(digests(x))
        return found

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs + digests(targets)).mean()


# -------------------------------------------------------------------------------------------------- the kinds


def text(folder: Path) -> list[str]:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(3):
        words = " ".join(draw.choice(_WORDS, 100))
        (folder / f"{number}.txt").write_text(words, encoding="utf-8")
    return ["data=text", f"data.path={folder}"]


def tokenized(folder: Path) -> list[str]:
    from tests.unit.train.tokenizers_ import save

    return [*text(folder), f"data.tokenizer={save(Path('tokenizer'))}"]


def lines(folder: Path) -> list[str]:
    settings = tokenized(folder)
    draw = np.random.default_rng(1)
    rows = [" ".join(draw.choice(_WORDS, 8 + row % 9)) for row in range(ROWS)]
    (folder / "0.txt").write_text("\n\n".join(rows), encoding="utf-8")
    return [*settings, "data.pattern=0.txt", "data.documents=lines", "model.verify=false"]


def tokens(folder: Path) -> list[str]:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name, count in (("web", 14 * 41), ("code", 6 * 41 + 3)):
        draw.integers(0, 1000, count).astype(np.uint16).tofile(folder / f"{name}.bin")
    return ["data=tokens", f"data.path={folder}", "data.mixture={web.bin: 0.7, code.bin: 0.3}"]


def chat(folder: Path) -> list[str]:
    from tests.unit.train.tokenizers_ import CHATML, save

    folder.mkdir()
    with (folder / "chats.jsonl").open("w") as file:
        for row in range(ROWS):
            pair = {"prompt": _WORDS[row % 10], "completion": " ".join([_WORDS[row % 7]] * row)}
            file.write(json.dumps(pair | {"completion": f"{pair['completion']} {row}"}) + "\n")
    tokenizer = save(Path("tokenizer"), template=CHATML)
    settings = ["data=chat", f"data.path={folder}", f"data.tokenizer={tokenizer}"]
    return [*settings, "model.verify=false"]  # which refuses a model that reads the padding


def images(folder: Path) -> list[str]:
    from tests.unit.train.pictures import folder as write_images

    write_images(folder, {"cat": ROWS - 9, "größe": 9}, kind="jpg")
    return ["data=images", f"data.path={folder}", "data.size=8", "data.crop=random"]


def shards(folder: Path) -> list[str]:
    from tests.unit.train.pictures import encoded, smooth

    folder.mkdir()
    for shard in range(3):
        with tarfile.open(folder / f"s-{shard}.tar", "w") as file:
            for row in range(shard, ROWS, 3):
                for name, content in (
                    ("png", encoded(smooth(12, 10, row))),
                    ("cls", str(row).encode()),
                ):
                    member = tarfile.TarInfo(f"{row:03}.{name}")
                    member.size = len(content)
                    file.addfile(member, BytesIO(content))
    return ["data=shards", f"data.path={folder}", "data.size=8", "data.flip=true"]


def shards_in_memory(folder: Path) -> list[str]:
    return [*shards(folder), "data.in_memory=true", "data.crop=random"]


def parquet(folder: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    values = np.random.default_rng(0).normal(size=(ROWS, 3))
    for part, rows in enumerate((slice(0, 10), slice(10, ROWS))):
        columns = {"x": list(values[rows]), "y": np.arange(ROWS)[rows]}
        pq.write_table(pa.table(columns), folder / f"{part}.parquet", row_group_size=4)
    return ["data=parquet", f"data.path={folder}", "data.inputs=x"]


def arrow(folder: Path) -> list[str]:
    import pyarrow as pa

    folder.mkdir()
    values = np.random.default_rng(0).normal(size=(ROWS, 3))
    rows = pa.table({"x": list(values), "y": np.arange(ROWS)})
    with pa.ipc.new_file(folder / "rows.arrow", rows.schema) as file:
        file.write_table(rows, max_chunksize=5)
    return ["data=parquet", f"data.path={folder}", "data.inputs=x"]


def arrays(folder: Path) -> list[str]:
    folder.mkdir()
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(ROWS, 3)))
    np.save(folder / "y.npy", np.arange(ROWS))
    return ["data=arrays", f"data.path={folder}", "data.inputs=x"]


def audio(folder: Path) -> list[str]:
    import soundfile

    folder.mkdir()
    draw = np.random.default_rng(0)
    with (folder / "table.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        for row in range(ROWS):
            soundfile.write(folder / f"{row}.wav", draw.uniform(-1, 1, 80 + row), 100)
            rows.writerow([f"{row}.wav", row])
    return ["data=audio", f"data.path={folder / 'table.csv'}", "data.seconds=0.5"]


def of_dataset(target: str, *settings: str) -> Callable[[Path], list[str]]:
    found = ["data=dataset", f"data.target={__name__}:{target}", *settings]
    return lambda folder: found


def augmented() -> Any:
    return datasets.Augmented(ROWS)


def mixing() -> Any:
    return datasets.mixing(ROWS)


def stateful() -> Any:
    return datasets.Numbers(ROWS)


def stateless() -> Any:
    return datasets.Stateless()


def hugging_face() -> Any:
    return datasets.hugging_face(ROWS, "drawing")


def hugging_face_iterable() -> Any:
    return datasets.hugging_face(ROWS, "shuffled")


KINDS: dict[str, Callable[[Path], list[str]]] = {
    "bytes of text": text,
    "text": tokenized,
    "lines of text": lines,
    "tokens": tokens,
    "chat": chat,
    "images": images,
    "shards": shards,
    "shards in memory": shards_in_memory,
    "parquet": parquet,
    "arrow": arrow,
    "arrays": arrays,
    "audio": audio,
    "dataset": of_dataset("augmented"),
    "dataset mixed in collating": of_dataset("mixing"),
    "iterable with a state": of_dataset("stateful"),
    "iterable": of_dataset("stateless"),
    "Hugging Face": of_dataset("hugging_face"),
    "Hugging Face iterable": of_dataset("hugging_face_iterable", "data.inputs=x"),
}
"""Writes the rows of a kind into a folder and returns the settings that read them, by the name of the kind."""
DRAWING = {
    *("images", "shards", "shards in memory", "audio", "dataset", "dataset mixed in collating"),
    *("iterable", "Hugging Face"),
}
"""Kinds whose rows differ between epochs, because random numbers are drawn for them."""

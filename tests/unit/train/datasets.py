"""Datasets as users write them, for the tests of ``data=dataset``."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    WeightedRandomSampler,
    default_collate,
)


class Augmented(Dataset[tuple[Tensor, int]]):
    """Row i is i and three random numbers, as an augmentation draws them; its class is i modulo 7."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        drawn = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002
        return torch.tensor([float(row), *drawn]), row % 7


class Fatal(Augmented):
    """Reading row ``bad`` kills its process: once, if ``mark`` is a file that does not exist yet."""

    def __init__(self, rows: int, bad: int, mark: str) -> None:
        super().__init__(rows)
        self.bad, self.mark, self.owner = bad, Path(mark), os.getpid()

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if row == self.bad and os.getpid() != self.owner and not self.mark.exists():
            if self.mark.name != "never":
                self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(row)


class Broken(Augmented):
    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if row == 5:
            raise ValueError("row five is broken\nin two lines")
        return super().__getitem__(row)


class Impure(Augmented):
    """Its random numbers are its own and not seeded."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.from_numpy(np.random.default_rng().random(4)), row % 7


class Counting(Augmented):
    """Numbers its readings."""

    reads = 0

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        self.reads += 1
        return torch.tensor([self.reads]), row % 7


class Ragged(Augmented):
    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.ones(1 + row % 3), row % 7


class Mappings(Dataset[dict[str, Any]]):
    def __init__(self, keys: list[str]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {key: torch.tensor([row, place]) for place, key in enumerate(self.keys)}


class Numbers(IterableDataset[tuple[Tensor, int]]):
    """The numbers from 0, from a saved place on; with ``shuffled`` through a buffer that its state leaves out."""

    def __init__(self, rows: int, shuffled: bool = False) -> None:
        self.rows, self.next, self.shuffled = rows, 0, shuffled

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        buffer: list[int] = []
        while self.next < self.rows:
            row, self.next = self.next, self.next + 1
            if self.shuffled:
                buffer.append(row)
                if len(buffer) < 4:
                    continue
                row = buffer.pop(0)
            yield torch.tensor([float(row)]), row % 7
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Stateless(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        """Rows with random numbers, in an order that is drawn."""
        rows = list(range(25))
        random.shuffle(rows)
        for row in rows:
            yield torch.tensor([row, torch.rand(()).item(), np.random.rand()]), row % 7  # noqa: NPY002


def padded(examples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """A collate function that pads."""
    rows = torch.nn.utils.rnn.pad_sequence([row for row, _ in examples], batch_first=True)
    return torch.nn.functional.pad(rows, (0, 3 - rows.shape[1])), torch.tensor(
        [y for _, y in examples]
    )


def to_longest(examples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """A collate function that pads to the longest example of its batch."""
    rows = torch.nn.utils.rnn.pad_sequence([row for row, _ in examples], batch_first=True)
    return rows, torch.tensor([y for _, y in examples])


def mixed_up(examples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """A collate function that mixes each row with another of its batch, as MixUp does."""
    rows, classes = torch.stack([row for row, _ in examples]), [y for _, y in examples]
    share, others = np.random.beta(0.4, 0.4), torch.randperm(len(rows))  # noqa: NPY002
    return rows * share + rows[others] * (1 - share), torch.tensor(classes)


def mixing(rows: int) -> tuple[Dataset[Any], Callable[..., Any]]:
    return Augmented(rows), mixed_up


class RaggedStream(Numbers):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return ((torch.ones(1 + row % 3), row % 7) for row in range(self.rows))


def padding_stream(rows: int) -> tuple[Dataset[Any], Callable[..., Any]]:
    return RaggedStream(rows), to_longest


def mixing_stream(rows: int) -> tuple[Dataset[Any], Callable[..., Any]]:
    return Numbers(rows), mixed_up


class Rarely(Augmented):
    """One row in five draws from the generators of Python and numpy; all draw from torch's."""

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        drawn = [torch.rand(()).item()]
        if row % 5 == 3:
            drawn.append(random.random() if row % 2 else np.random.rand())  # noqa: NPY002
        return torch.tensor([row, sum(drawn)]), row % 7


class AtOnce(Dataset[tuple[Tensor, int]]):
    """Has rows by lists of numbers alone."""

    def __len__(self) -> int:
        return 20

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, int]]:
        return [(torch.tensor([row, torch.rand(()).item()]), row % 7) for row in rows]


@dataclass
class Pair:
    x: Tensor
    labels: Tensor


def paired(examples: list[tuple[Tensor, int]]) -> Pair:
    return Pair(torch.stack([row for row, _ in examples]), torch.tensor([y for _, y in examples]))


class Failing(IterableDataset[Any]):
    """Fails at ``place``."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __iter__(self) -> Iterator[Any]:
        for row in range(20):
            if self.place == "row" and row == 5:
                raise ValueError("row five is broken\nin two lines")
            yield torch.tensor([row] if self.place != "collate" else [0] * (1 + row % 3)), row % 7

    def state_dict(self) -> dict[str, Any]:
        if self.place == "state":
            raise ValueError("no state")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.place == "load":
            raise KeyError("next")


def once() -> Iterator[tuple[Tensor, int]]:
    return ((torch.tensor([row]), row % 7) for row in range(20))


def loader(rows: int, kind: str = "plain") -> DataLoader[Any]:
    """A DataLoader, with an order of its own for other kinds than plain."""
    if kind == "batch":
        batches = BatchSampler(range(rows), 4, drop_last=False)
        return DataLoader(Augmented(rows), batch_sampler=_Own(batches))
    if kind == "weighted":
        return DataLoader(Augmented(rows), sampler=WeightedRandomSampler([1.0] * rows, rows))
    return DataLoader(Ragged(rows), batch_size=4, shuffle=True, collate_fn=padded)


class _Own(BatchSampler):
    def __init__(self, batches: BatchSampler) -> None:
        super().__init__(batches.sampler, 4, drop_last=False)


def with_collate(rows: int) -> tuple[Dataset[Any], Callable[..., Any]]:
    return Ragged(rows), padded


class Texts(Dataset[dict[str, Any]]):
    """Rows with text, which is no tensor."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"name": f"row {row} " + "x" * 200, "y": row}


def hugging_face(rows: int, kind: str = "map") -> Any:
    """A dataset of Hugging Face: map-style, with a transform that draws, or iterable."""
    import datasets

    columns = {
        "input_ids": [[row, row + 1] for row in range(rows)],
        "label": [row % 3 for row in range(rows)],
    }
    found = datasets.Dataset.from_dict(columns)
    if kind == "drawing":
        found.set_transform(_drawn)
    if kind == "plain iterable":
        return found.to_iterable_dataset(num_shards=4)
    if kind == "dictionary":
        return datasets.DatasetDict({"train": found, "test": found})
    if kind == "dates":
        return found.add_column("on", [datetime(2026, 1, 1)] * rows)
    if kind in ("arrow", "pandas", "numpy"):
        return found.with_format(kind, columns=["input_ids", "label"])
    if kind == "iterable":
        return found.to_iterable_dataset(num_shards=4).map(_plain)
    if kind == "shuffled":
        return found.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=10).map(_plain)
    return found


def _plain(example: dict[str, Any]) -> dict[str, Any]:
    return {"x": float(example["input_ids"][0]), "label": example["label"]}


def _drawn(batch: dict[str, Any]) -> dict[str, Any]:
    drawn = [row[0] + random.random() for row in batch["input_ids"]]
    return {"x": drawn, "label": batch["label"]}


class Epochs(Augmented):
    """Its rows are the epoch that was set last."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.tensor([float(row), self.epoch]), row % 7


class Named(NamedTuple):
    labels: Any
    x: Any


class Leaving(Augmented):
    """Row five ends the process, row three is None, and the length is that of the kind."""

    def __init__(self, rows: int, kind: str) -> None:
        super().__init__(rows)
        self.kind = kind

    def __len__(self) -> int:
        return "no number" if self.kind == "length" else self.rows  # type: ignore[return-value]

    def __getitem__(self, row: int) -> Any:
        if self.kind == "exit" and row == 5:
            raise SystemExit("the disk is gone")
        if self.kind == "none" and row == 3:
            return None
        if self.kind == "named":
            return Named(row % 7, torch.tensor([float(row)]))
        return super().__getitem__(row)


def without_none(examples: list[Any]) -> Any:
    return default_collate([each for each in examples if each is not None])


def in_place_of_a_dataset(kind: str) -> Any:
    """What people return in place of a dataset."""
    one, other = Augmented(9), Augmented(5)
    if kind == "frame":
        import pandas

        return pandas.DataFrame({"x": [1.0], "label": [0]})
    return {
        "splits": {"train": one, "test": other},
        "tensors": {"x": torch.ones(3), "y": torch.ones(3)},
        "pair": (one, other),
        "loaders": [DataLoader(one), DataLoader(other)],
        "class": Augmented,
        "batches": DataLoader(one, batch_size=None),
        "batches of a stream": DataLoader(Numbers(8), batch_size=None),
    }[kind]


def causal() -> nn.Module:
    """A model whose forward computes its loss from labels."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=1, n_positions=8))


def headless() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=1, n_positions=8))

"""Are rows read as fast as by torch's DataLoader?  ``python -m benchmarks.inputs [--json] [--only KIND]``

For each kind of data, the same rows are read by turns by the source of ``data=KIND`` and by
``torch.utils.data.DataLoader`` over a Dataset that does the same to each row, written as users write it
(benchmarks/input_cases.py): shuffled, the same batch size, as many workers. A turn starts its workers, reads a few
batches, and then counts rows for a while.

``images``   JPEGs of 500 × 375 in folders, random resized crops of 224 and flips
``photos``   JPEGs of 2000 × 1500 in folders, the middle at 224
``shards``   the images of ``images`` in tar files; the Dataset seeks in them
``text``     windows of a text; the Dataset maps the same file
``tokens``   windows of 1,024 tokens of a file; the Dataset maps the same file
``chat``     conversations; the Dataset is one of Hugging Face that holds the tokens, padded when collated
``arrays``   rows of 1,024 values in a .npy file; the Dataset maps the same file
``parquet``  rows of 64 values; the Dataset is one of Hugging Face with torch's format
``audio``    a second at random of FLAC files of four; the Dataset seeks in them with soundfile
``dataset``  the same Dataset of a user on both sides: 16 × 64 × 64 values each, drawn and added to

``speed`` is our rows per second over theirs in neighbouring turns (benchmarks/ratios.py): above 1, ours is faster.
``processor`` is the same of rows per second of processor time, of the rank and its workers, which other work on the
machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.input_cases import KINDS, Case, Sizes
from benchmarks.ratios import ratios, show
from benchmarks.workers import rotated
from parallax.train.data.indexed import IndexedSource

Batches = Iterator[int]


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
        collate_fn=case.collate,
    )
    while True:
        for _ in loader:
            yield case.rows


WAYS: dict[str, Callable[[Case, int], Batches]] = {"ours": ours, "theirs": theirs}


def processor_seconds() -> float:
    """Return the processor time of this process and its workers."""
    workers = (each.cpu_times() for each in psutil.Process().children())
    return time.process_time() + sum(each.user + each.system for each in workers)


def turn(batches: Batches, sizes: Sizes) -> tuple[float, float]:
    """Return the seconds for a row, and the seconds of processor time."""
    for _ in range(sizes.warm):
        next(batches)
    rows, processor, begun = 0, processor_seconds(), time.perf_counter()
    while (taken := time.perf_counter() - begun) < sizes.seconds or not rows:
        rows += next(batches)
    processor = processor_seconds() - processor
    batches.close()  # type: ignore[attr-defined]
    return taken / rows, processor / rows


def measure(sizes: Sizes, kinds: Sequence[str], workers: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row of numbers for each kind and number of workers."""
    found = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            case = KINDS[kind](Path(folder), sizes)
            for count in workers:
                turns: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
                for repetition in range(sizes.repetitions):
                    for name in rotated(list(WAYS), repetition):
                        turns[name].append(turn(WAYS[name](case, count), sizes))
                found.append({"kind": kind, "workers": count, **compared(turns)})
    return found


def compared(turns: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return the rows per second of each side, and how many times as many are ours."""
    taken = {name: [seconds for seconds, _ in each] for name, each in turns.items()}
    processor = {name: [seconds for _, seconds in each] for name, each in turns.items()}
    return {
        "rows_per_second": {name: 1 / min(each) for name, each in taken.items()},
        "speed": ratios(taken["theirs"], taken["ours"]),
        "processor": ratios(processor["theirs"], processor["ours"]),
        "seconds_per_row": taken,
        "processor_seconds_per_row": processor,
    }


def table(found: Sequence[dict[str, Any]]) -> Table:
    """The numbers for people."""
    result = Table(title="rows per second, and ours over those of a DataLoader")
    for name in ("data", "workers", "ours", "DataLoader", "speed", "fastest", "processor"):
        result.add_column(name, no_wrap=True, justify="left" if name == "data" else "right")
    for each in found:
        rates = [f"{each['rows_per_second'][name]:,.0f}" for name in WAYS]
        speed = show(each["speed"]), f"{each['speed']['fastest']:.2f}", show(each["processor"])
        result.add_row(each["kind"], str(each["workers"]), *rates, *speed)
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
    given: dict[str, Any] = vars(parser.parse_args())
    as_json, only, workers = given.pop("json"), given.pop("only"), given.pop("workers")
    torch.set_num_threads(1)
    sizes = Sizes(**given)
    found = measure(sizes, only or list(KINDS), workers)
    if as_json:
        about = {"torch": torch.__version__, "cores": os.cpu_count(), "sizes": asdict(sizes)}
        print(json.dumps({**about, "rows": found}))
    else:
        Console().print(table(found))


if __name__ == "__main__":
    main()

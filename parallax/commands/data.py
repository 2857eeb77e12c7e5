"""``parallax data``: show the number, the content and the reading speed of a run's rows."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from torch import Tensor

from parallax.commands.options import (
    add_json,
    add_overrides,
    check_writable,
    console_of,
    print_json,
    writing,
)
from parallax.common.units import format_bytes, plural
from parallax.config import RunConfig, compose
from parallax.errors import ConfigError, DataError, printable
from parallax.model.block import leaves
from parallax.plan.tier import AUTO
from parallax.run.job import open_source
from parallax.run.working import LongWork, working
from parallax.runtime.batch import Rows, as_tensors
from parallax.train.data.indexed import IndexedDataConfig, IndexedSource
from parallax.train.data.paths import data_path
from parallax.train.data.table import INPUTS, TARGETS
from parallax.train.data.tokenizer import load_pretrained, read_backend

EXAMPLES = """examples:
  parallax data                                         the default, bytes of text
  parallax data data.path=~/texts model.sequence=512
  parallax data data=arrays data.path=FOLDER data.inputs=x data.targets=y trainer.global_batch=64
  parallax data data=dataset data.target=package.module:function --sheet rows.png   images, as a picture
  parallax data data=parquet data.path=rows --json
"""

_SAMPLED_ROWS = 8  # rows from which types, shapes and ranges are shown
_SHOWN_ROWS = 3
_SHOWN_VALUES = 6
_SHOWN_CHARACTERS = 88
_TIMED_ROWS = 16  # rows of a timed request, at most
_TIMED_SECONDS = 2.0
_TOLD_SECONDS = 0.25
_IGNORED = -100  # torch's cross-entropy leaves such targets out
_BARS = 8
_SHEET_ROWS, _SHEET_COLUMNS, _THUMBNAIL = 64, 8, 128  # images, images, pixels

Decode = Callable[[list[int]], str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--sheet", type=Path, metavar="FILE", help="write the first images into one picture, a PNG"
    )
    add_json(parser)
    add_overrides(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    console = console_of(parsed)
    if parsed.sheet is not None:
        check_writable("--sheet", parsed.sheet)
    with working(console, "opening the rows") as work:
        config = compose(parsed.overrides)
        work.limit(config.trainer)
        source = open_source(config, quiet=False)
        found = _overview(config, source, work)
        if parsed.sheet is not None:
            work("drawing images")
            images = _images(config, source)
            with writing("--sheet", parsed.sheet) as path:
                _write_sheet(images, path)
    if parsed.json:
        print_json(asdict(found))
    else:
        _print(console, found)
    return 0


# --------------------------------------------------------------------------------------------- the overview


@dataclass(frozen=True)
class Column:
    """One of the tensors of a row.

    ``shape``             its shape in one row
    ``step_bytes``        its bytes in a global batch
    ``low`` and ``high``  the smallest and the largest finite value in a few rows; None if no value is finite
    ``non_finite``        the number of values in these rows that are not finite
    """

    name: str
    dtype: str
    shape: list[int]
    step_bytes: int
    low: float | None
    high: float | None
    non_finite: int


@dataclass(frozen=True)
class Lengths:
    """A histogram of the lengths of ``rows`` rows. The length of a row is the number of its targets that the loss does
    not ignore. ``low``, ``mean`` and ``high``: the smallest, the mean and the largest length. ``counts``: the number of
    rows in each of several equally wide ranges of lengths from ``low`` to ``high``."""

    rows: int
    low: int
    mean: float
    high: int
    counts: list[int]


@dataclass(frozen=True)
class Reading:
    """The speed of reading in one process.

    ``rows``             the number of rows that were read
    ``rows_per_second``  the speed of all parts of reading together
    ``parts``            part of reading, such as ``decode`` → the speed of this part alone, in rows per second
    ``lengths``          the lengths of the rows; None if they are all equal, or unknown
    """

    rows: int
    rows_per_second: float
    parts: dict[str, float]
    lengths: Lengths | None


@dataclass(frozen=True)
class Overview:
    """The figures that the command shows.

    ``rows``          the number of training rows; None if the source does not know it
    ``validation``    name → number of rows of each held-out set
    ``fingerprint``   a digest of the rows; None if the source has none
    ``first_rows``    the values of some rows as text, by the names of ``columns``
    ``workers``       the setting ``data.workers``; None if this kind of data has no workers
    ``auto_workers``  the number of workers that ``data.workers=auto`` starts
    ``remarks``       messages for the user about the data
    """

    label: str
    rows: int | None
    validation: dict[str, int]
    fingerprint: str | None
    global_batch: int
    steps_per_epoch: int | None
    columns: list[Column]
    first_rows: list[dict[str, str]]
    reading: Reading
    workers: int | str | None
    auto_workers: int | None
    remarks: list[str] = field(default_factory=list)


def _overview(config: RunConfig, source: Any, work: LongWork) -> Overview:
    """Return the figures that the command shows about the rows of ``source``."""
    wanted, remarks = config.trainer.global_batch, list(getattr(source, "remarks", []))
    try:
        config.data.check_size(source, config.model, wanted)
    except DataError as error:
        remarks.append(str(error))
    rows = len(source) if hasattr(source, "__len__") else None
    work("reading the first rows")
    batch = _sample(source, min(wanted, _SAMPLED_ROWS, rows or wanted))
    values = _tensors(config, batch)
    indexed = config.data if isinstance(config.data, IndexedDataConfig) else None
    auto = None
    if indexed is not None and isinstance(source, IndexedSource):
        auto = replace(indexed, workers=AUTO).count_workers(source.table)
    sets = getattr(source, "validation_sets", {})
    steps = getattr(source, "steps", None)
    fingerprint = getattr(source, "fingerprint", None)
    show = Shown(_decoder(config.data), getattr(source, "classes", None))
    return Overview(
        label=config.data.label,
        rows=rows,
        validation={name: each.validation_rows for name, each in sets.items()},
        fingerprint=fingerprint and hashlib.sha256(fingerprint.encode()).hexdigest()[:12],
        global_batch=wanted,
        steps_per_epoch=steps and steps(1, wanted),
        columns=[_column(name, each, wanted) for name, each in values.items()],
        first_rows=[
            {name: show(name, each[row]) for name, each in values.items()}
            for row in range(min(_SHOWN_ROWS, len(batch)))
        ],
        reading=_read(config, source, rows, work),
        workers=None if indexed is None else indexed.workers,
        auto_workers=auto,
        remarks=remarks,
    )


def _sample(source: Any, rows: int) -> Rows:
    sample = getattr(source, "sample", source.batch)
    found: Rows = sample(rows)
    if not len(found):
        raise DataError("the source's first batch has no rows")
    return found


def _tensors(config: RunConfig, batch: Rows) -> dict[str, Tensor]:
    """Return the tensors in the inputs and targets of ``batch`` by name, in the dtypes to which a run converts them.
    Tensors whose first dimension is not the rows are left out."""
    rows, dtype = len(batch), config.precision.parameter_dtype
    parts = {INPUTS: batch.inputs(0, rows), TARGETS: batch.targets(0, rows)}
    found = {}
    for part, values in parts.items():
        for path, each in leaves(as_tensors(part, values, rows, dtype)):
            name = part if len(path) == 0 else ".".join([part, *map(str, path)])
            if isinstance(each, Tensor) and each.ndim and len(each) == rows:
                found[name] = each
    return found


def _column(name: str, values: Tensor, rows: int) -> Column:
    plain = values.to(torch.float64) if not values.is_complex() else values.abs().to(torch.float64)
    finite = plain[plain.isfinite()]
    return Column(
        name=name,
        dtype=str(values.dtype).removeprefix("torch."),
        shape=list(values.shape[1:]),
        step_bytes=values.nbytes // len(values) * rows,
        low=finite.min().item() if len(finite) else None,
        high=finite.max().item() if len(finite) else None,
        non_finite=values.numel() - len(finite),
    )


def _decoder(config: Any) -> Decode | None:
    """Return a function that decodes tokens to text, for the data settings ``config``; None if this kind of data has no
    tokenizer."""
    if not hasattr(config, "tokenizer"):
        return None
    if not config.tokenizer:
        return lambda ids: bytes(ids).decode("utf-8", "replace")
    path = data_path("data.tokenizer", config.tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    found = read_backend(file) if file.is_file() else load_pretrained(path)
    return lambda ids: str(found.decode(ids, skip_special_tokens=False))


@dataclass(frozen=True)
class Shown:
    """Converts the values of a row to text. Tokens are converted by ``decode``, labels to their names in ``classes``.
    Of any other tensor, the first values are shown."""

    decode: Decode | None
    classes: Sequence[str] | None

    def __call__(self, name: str, values: Tensor) -> str:
        if not values.ndim:
            number = values.item()
            if self.classes and name == TARGETS and 0 <= int(number) < len(self.classes):
                return f"{number} {printable(self.classes[int(number)])}"
            return _number(number)
        whole = not values.is_floating_point() and not values.is_complex()
        if self.decode is not None and whole and values.ndim == 1:
            kept = values[values != _IGNORED]
            text = repr(self.decode(kept.tolist()))
            if len(text) > _SHOWN_CHARACTERS:
                text = f"{text[: _SHOWN_CHARACTERS - 1]}…"
            return (
                f"{len(kept)} of {len(values)} count: {text}" if len(kept) < len(values) else text
            )
        first = [_number(each) for each in values.flatten()[:_SHOWN_VALUES].tolist()]
        return " ".join(first) + (" …" if values.numel() > _SHOWN_VALUES else "")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ------------------------------------------------------------------------------------------------ reading


def _read(config: RunConfig, source: Any, rows: int | None, work: LongWork) -> Reading:
    """Read rows in the order of training for about two seconds, without workers, and return the speed. ``rows``: the
    number of training rows; None if unknown."""
    request = min(config.trainer.global_batch, _TIMED_ROWS)
    count, lengths, next_report = 0, list[int](), 0.0
    begun = time.monotonic()
    while (seconds := time.monotonic() - begun) < _TIMED_SECONDS:
        try:
            batch = source.batch(request)
        except StopIteration:
            break
        inputs, targets = (
            as_tensors(part, values, len(batch), torch.float32)
            for part, values in (
                (INPUTS, batch.inputs(0, len(batch))),
                (TARGETS, batch.targets(0, len(batch))),
            )
        )
        if rows is None or count < rows:  # the first epoch has fewer
            lengths += (_counted(targets) or _counted(inputs))[
                : None if rows is None else rows - count
            ]
        count += len(batch)
        if seconds > next_report:
            work(f"reading rows: {count:,}, {count / max(seconds, 1e-9):,.0f} per second")
            next_report += _TOLD_SECONDS
    seconds = time.monotonic() - begun
    parts = source.seconds() if isinstance(source, IndexedSource) else {}
    return Reading(
        rows=count,
        rows_per_second=count / seconds,
        parts={name: count / spent for name, spent in sorted(parts.items()) if spent > 0},
        lengths=_lengths(lengths),
    )


def _counted(values: Any) -> list[int]:
    """Return for each row how many labels are not ignored. The labels are the first two-dimensional integer tensor in
    ``values`` that is called labels or has no name. Without such a tensor the list is empty."""
    for path, each in leaves(values):
        plain = torch.as_tensor(each) if isinstance(each, Tensor | np.ndarray) else None
        named = not path or "labels" in path
        if plain is None or plain.ndim != 2 or plain.is_floating_point() or not named:
            continue
        counted: list[int] = (plain != _IGNORED).sum(1).tolist()
        return counted
    return []


def _lengths(counted: list[int]) -> Lengths | None:
    """Return a histogram of ``counted``, the number of labels in each row; None if all rows have the same number."""
    if len(set(counted)) < 2:
        return None
    counts, _ = np.histogram(counted, bins=_BARS)
    return Lengths(
        rows=len(counted),
        low=min(counted),
        mean=sum(counted) / len(counted),
        high=max(counted),
        counts=counts.tolist(),
    )


# --------------------------------------------------------------------------------------------- printing


def _print(console: Console, found: Overview) -> None:
    for line in _lines(found):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_columns_table(found))
    for number, row in enumerate(found.first_rows):
        for name, text in row.items():
            console.print(
                f"{f'row {number + 1}' if name == next(iter(row)) else '':<8}{name}: {text}",
                highlight=False,
                soft_wrap=True,
            )
    for line in _reading_lines(found):
        console.print(line, highlight=False, soft_wrap=True)
    for remark in found.remarks:
        console.print(f"note: {remark}", highlight=False, soft_wrap=True)


def _lines(found: Overview) -> Iterator[str]:
    held_out = ", ".join(f"{rows:,} held out ({name})" for name, rows in found.validation.items())
    rows = "an unknown number of rows" if found.rows is None else f"{found.rows:,} training rows"
    yield f"{found.label}: {rows}, {held_out or 'none held out'}"
    if found.fingerprint is not None:
        yield f"fingerprint {found.fingerprint}, the same for the same rows at any place"
    size = format_bytes(sum(each.step_bytes for each in found.columns))
    steps = (
        ""
        if found.steps_per_epoch is None
        else f"; {plural(found.steps_per_epoch, 'step')} an epoch"
    )
    yield f"a step reads {found.global_batch:,} rows, {size}{steps}"


def _columns_table(found: Overview) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("", "type", "shape of a step", "bytes", "least", "most", "NaN or Inf"):
        grid.add_column(
            name, justify="left" if name in ("", "type", "shape of a step") else "right"
        )
    for each in found.columns:
        shape = ", ".join(map(str, [found.global_batch, *each.shape]))
        least, most = ("" if end is None else _number(end) for end in (each.low, each.high))
        size = format_bytes(each.step_bytes)
        grid.add_row(each.name, each.dtype, f"({shape})", size, least, most, str(each.non_finite))
    return grid


def _reading_lines(found: Overview) -> Iterator[str]:
    reading = found.reading
    if lengths := reading.lengths:
        yield (
            f"targets that count in a row: {lengths.low:,} to {lengths.high:,}, mean {lengths.mean:,.1f}, in "
            f"{lengths.rows:,} rows"
        )
        step = (lengths.high - lengths.low) / len(lengths.counts)
        for place, rows in enumerate(lengths.counts):
            bar = "█" * round(30 * rows / max(lengths.counts))
            yield f"{lengths.low + place * step:>10,.0f} {bar} {rows:,}"
    parts = ", ".join(f"{name} {rate:,.0f}" for name, rate in reading.parts.items())
    yield (
        f"{reading.rows_per_second:,.0f} rows per second in one process"
        + (f"; of its parts alone: {parts}" if parts else "")
    )
    if found.auto_workers is not None:
        set_here = "" if found.workers == AUTO else f" (data.workers={found.workers} is set)"
        yield f"data.workers=auto chooses {found.auto_workers}{set_here}"


# ------------------------------------------------------------------------------------------------- images


def _images(config: RunConfig, source: Any) -> Tensor:
    """Return the first images of ``source``. Raises :class:`ConfigError` if the inputs are not images."""
    rows = len(source) if hasattr(source, "__len__") else _SHEET_ROWS
    values = _tensors(config, _sample(source, min(_SHEET_ROWS, rows)))
    named = {name: each for name, each in values.items() if name.startswith(INPUTS)}
    for each in named.values():
        if each.ndim == 4 and each.shape[1] in (1, 3):
            return each
    shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in named.items())
    raise ConfigError(
        f"--sheet: the inputs are {shapes or 'no tensors'}; images are (rows, 1 or 3 channels, height, width)"
    )


def _write_sheet(images: Tensor, path: Path) -> None:
    """Write ``images`` in a grid to ``path``. The values of each image are scaled to the range from black to white."""
    from PIL import Image

    columns = min(_SHEET_COLUMNS, len(images))
    lines = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (_THUMBNAIL + 2), lines * (_THUMBNAIL + 2)))
    for place, image in enumerate(images.to(torch.float32).nan_to_num(0, 0, 0)):
        low, high = image.amin(), image.amax()
        scaled = (image - low) / (high - low).clamp(min=1e-12) * 255
        pixels = scaled.round().to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0)
        picture = Image.fromarray(pixels.contiguous().numpy())
        ratio = _THUMBNAIL / max(picture.size)
        width, height = (max(1, round(side * ratio)) for side in picture.size)
        how = Image.Resampling.NEAREST if ratio > 1 else Image.Resampling.BICUBIC
        line, column = divmod(place, columns)
        corner = column * (_THUMBNAIL + 2), line * (_THUMBNAIL + 2)
        sheet.paste(picture.resize((width, height), how), corner)
    sheet.save(path, format="PNG")

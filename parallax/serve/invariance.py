"""Test whether the bits of an answer depend on the other rows of its batch.

A matrix product of 32 rows may use another kernel than a product of one row, and so add in another order. The test
computes rows of random numbers alone and in batches of several sizes, and compares the results bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallax.serve.batching import padded
from parallax.serve.config import ServeConfig
from parallax.serve.model import ServedModel, TensorSpec

_SEED = 1
_ALONE = 4  # rows that are also computed alone
_FREE_SIZE = 8  # of a dimension that requests choose


@dataclass(frozen=True)
class Difference:
    """The largest difference between a row's output alone and in a batch.

    ``name``: the output. ``rows``: the number of rows of the batch. ``amount``: the absolute difference.
    """

    name: str
    rows: int
    amount: float


def sample_rows(specs: Sequence[TensorSpec], rows: int) -> list[Tensor]:
    """Return ``rows`` rows for the inputs that ``specs`` describe.

    Floating-point inputs are random. All others are zeros, because zero is a valid index.
    """
    generator = torch.Generator().manual_seed(_SEED)
    found = []
    for spec in specs:
        shape = [rows, *(_FREE_SIZE if size < 0 else size for size in spec.shape[1:])]
        if spec.dtype.is_floating_point:
            found.append(torch.randn(shape, generator=generator).to(spec.dtype))
        else:
            found.append(torch.zeros(shape, dtype=spec.dtype))
    return found


def batch_difference(model: ServedModel, config: ServeConfig) -> Difference | None:
    """Return the largest difference between a row's outputs alone and in a batch; None if all bits are equal."""
    most = config.max_batch_rows
    inputs = sample_rows(model.inputs, most)

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        rows = len(tensors[0])
        given = padded(tensors, most) if config.batch_invariant else tensors
        return [output[:rows].clone() for output in model.run(given).tensors]

    count = min(_ALONE, most)
    places = [index * (most - 1) // max(count - 1, 1) for index in range(count)]
    alone = {place: run([each[place : place + 1] for each in inputs]) for place in places}
    worst: Difference | None = None
    for rows in sorted({1, 2, 3, most // 2, most} & {*range(1, most + 1)}):
        together = run([each[:rows] for each in inputs])
        for place in (place for place in places if place < rows):
            for spec, one, many in zip(model.outputs, alone[place], together):
                found = _difference(one[0], many[place])
                if found is not None and (worst is None or found > worst.amount):
                    worst = Difference(spec.name, rows, found)
    return worst


def _difference(one: Tensor, other: Tensor) -> float | None:
    if one.shape == other.shape and torch.equal(_bits(one), _bits(other)):
        return None
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def difference_text(found: Difference, config: ServeConfig) -> str:
    """Return a line that reports the difference ``found``, and the setting that prevents it."""
    what = (
        f"the bits of an answer depend on the other requests in its batch (output {found.name}, batch of {found.rows} "
        f"rows: a difference of {found.amount:.2g})"
    )
    if config.batch_invariant:
        return f"{what} although serve.batch_invariant=true pads it: serve.max_batch_rows=1 computes each row alone"
    return f"{what}; serve.batch_invariant=true pads each batch to {config.max_batch_rows} rows, which takes longer"

"""What a recorded forward takes for granted of every batch, checked as it runs.

Where Python decided by values of the sample's whole numbers (whether each row has its image tokens), or by what holds
of any numbers that are no accident (that none is NaN), the record has the one way that was taken. Beside it stands the
question with its answer: a batch that answers otherwise ends the run in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from parallax.errors import DescribeError
from parallax.model.block import tensors_in
from parallax.model.recording.fakes import is_fake


class DiffersFromSample(DescribeError):
    """A batch that the model's forward would treat in another way than the sample that it was recorded with."""


def expect_answer(
    ask: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    answer: Any,
    where: str,
) -> None:
    """Raise :class:`DiffersFromSample` unless ``ask`` gives ``answer``. Nothing is known of tensors without values."""
    if any(map(is_fake, tensors_in((args, kwargs)))):
        return
    found = ask(*args, **kwargs)
    if found != answer:
        name = getattr(ask, "__name__", "it")
        raise DiffersFromSample(
            f"{name} of a tensor gave {answer} with the sample and gives {found} with this batch{where}: the forward "
            "decides by it, and was recorded for the first; give the deciding part a module of its own, which stays "
            "whole, or make the model one block (model.blocks=[''])"
        )


def expect_sizes(tensor: Tensor, sizes: tuple[int, ...], where: str) -> None:
    """Raise :class:`DiffersFromSample` unless ``tensor``, whose sizes follow from values, has those of the record."""
    if tuple(tensor.shape) != tuple(sizes):
        raise DiffersFromSample(
            f"a tensor whose shape follows from values is {tuple(tensor.shape)} with this batch, and by the sample it "
            f"must be {tuple(sizes)}{where}; give that part a module of its own, which stays whole, or make the model "
            "one block (model.blocks=[''])"
        )


EXPECTATIONS = expect_answer, expect_sizes

"""Check the assumptions of a recorded forward with every batch.

A forward may branch in Python on integers of the sample (does each row have its image tokens?) or on a property of
floats (is any of them NaN?). The trace holds only the branch that was taken with the sample. At each branch it also
holds the call that the forward branched on, and the result of this call with the sample. Every batch repeats the call.
If the result differs, the run stops with a message of one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from parallax.errors import DescribeError
from parallax.model.block import tensors_in
from parallax.model.recording.fakes import is_fake


class DiffersFromSample(DescribeError):
    """Raised for a batch with which the model's forward would take another branch than with the recorded sample."""


def expect_answer(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    answer: Any,
    where: str,
) -> None:
    """Raise :class:`DiffersFromSample` unless ``function(*args, **kwargs)`` returns ``answer``.

    Nothing is checked if one of the arguments is a tensor without values. ``where``: the line of the user's code, for
    the message.
    """
    if any(map(is_fake, tensors_in((args, kwargs)))):
        return
    found = function(*args, **kwargs)
    if found != answer:
        name = getattr(function, "__name__", "it")
        raise DiffersFromSample(
            f"{name} of a tensor gave {answer} with the sample and gives {found} with this batch{where}: the forward "
            "branches on it, and only the sample's branch was recorded; move the branch into a module of its own, "
            "which stays whole, or make the model one block (model.blocks=[''])"
        )


def expect_sizes(tensor: Tensor, sizes: tuple[int, ...], where: str) -> None:
    """Raise :class:`DiffersFromSample` unless ``tensor`` has the shape ``sizes``, which was recorded with the sample.

    The shape of ``tensor`` depends on values. ``where``: the line of the user's code, for the message.
    """
    if tuple(tensor.shape) != tuple(sizes):
        raise DiffersFromSample(
            f"a tensor whose shape depends on values is {tuple(tensor.shape)} with this batch and was {tuple(sizes)} "
            f"with the sample{where}; move that part into a module of its own, which stays whole, or make the model "
            "one block (model.blocks=[''])"
        )


EXPECTATIONS = expect_answer, expect_sizes

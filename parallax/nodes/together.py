"""What one rank found out, known to all: its result, or its error, so that all go on or all end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from parallax.errors import ParallaxError
from parallax.nodes.objects import all_objects, object_of_first

_Found = TypeVar("_Found")


def rank_and_size() -> tuple[int, int]:
    """This process's rank, and how many there are; (0, 1) without torch's world."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def from_all(call: Callable[[], _Found]) -> list[_Found]:
    """What ``call`` gives on every rank, on every rank; or the error of the first that has one. Called by all ranks of
    torch's world. What is given is values and records (:mod:`parallax.nodes.objects`)."""
    mine = _tried(call)
    told = all_objects(mine) if rank_and_size()[1] > 1 else [mine]
    return [_found(each) for each in told]


def from_first(call: Callable[[], _Found]) -> _Found:
    """What ``call`` gives on rank 0, on every rank; or its error. The others do not call it."""
    rank, size = rank_and_size()
    mine: Any = _tried(call) if rank == 0 else None
    found: _Found = _found(object_of_first(mine) if size > 1 else mine)
    return found


def _tried(call: Callable[[], Any]) -> tuple[Any, type[ParallaxError] | None, str]:
    try:
        return call(), None, ""
    except ParallaxError as error:
        return None, type(error), str(error)


def _found(told: tuple[Any, type[ParallaxError] | None, str]) -> Any:
    found, kind, text = told
    if kind is not None:
        raise kind(text)
    return found

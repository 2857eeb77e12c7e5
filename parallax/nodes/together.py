"""Call a function on several ranks and share the result or the error, so that all ranks continue or all end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from parallax.errors import ParallaxError
from parallax.nodes.objects import all_gather_object, broadcast_object

_Found = TypeVar("_Found")
_Group = dist.ProcessGroup | None
_groups: list[_Group] = []
"""The groups of the contexts :func:`among` that this process is in, the innermost last."""


@contextmanager
def among(group: _Group) -> Iterator[None]:
    """A context in which the functions of this module are collective over ``group`` instead of all ranks, and ranks
    count within the group. None is the group of this rank alone."""
    _groups.append(group)
    try:
        yield
    finally:
        _groups.pop()


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) if torch.distributed is not initialised."""
    group = _groups[-1] if _groups else None
    if not dist.is_initialized() or (_groups and group is None):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def all_gather_result(call: Callable[[], _Found]) -> list[_Found]:
    """Call ``call`` on every rank, and return the list of all results, in rank order. Collective over all ranks.

    If the call raises a :class:`ParallaxError` on some ranks, every rank raises the error of the lowest of these ranks.
    Other exceptions are not shared. Results must be supported by :mod:`parallax.nodes.objects`.
    """
    mine = _tried(call)
    several = rank_and_size()[1] > 1
    outcomes = all_gather_object(mine, _groups[-1] if _groups else None) if several else [mine]
    return [_found(each) for each in outcomes]


def broadcast_result(call: Callable[[], _Found]) -> _Found:
    """Run ``call`` on rank 0 only, and return its result on every rank. If it raises a :class:`ParallaxError`, every
    rank raises that error. Collective over all ranks."""
    rank, size = rank_and_size()
    mine: Any = _tried(call) if rank == 0 else None
    group = _groups[-1] if _groups else None
    found: _Found = _found(broadcast_object(mine, group) if size > 1 else mine)
    return found


def _tried(call: Callable[[], Any]) -> tuple[Any, type[ParallaxError] | None, str]:
    try:
        return call(), None, ""
    except ParallaxError as error:
        return None, type(error), str(error)


def _found(outcome: tuple[Any, type[ParallaxError] | None, str]) -> Any:
    found, kind, text = outcome
    if kind is not None:
        raise kind(text)
    return found

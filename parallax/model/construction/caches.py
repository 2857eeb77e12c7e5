"""What a constructor leaves in the process must not be tensors without bytes.

A function that remembers its results forgets them. Other tensors that it keeps, in the attributes of a class or in a
table of its module, get their values, for the next constructor and the loss to find.
"""

from __future__ import annotations

import functools
import gc
import logging
import types
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from parallax.model.construction.log import Log, like
from parallax.model.construction.replay import Replay
from parallax.model.private import without_function_modes

logger = logging.getLogger("parallax")

_DEEP = 10_000  # objects behind one cache that are looked at
_ATOMS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


@contextmanager
def forgotten(log: Log) -> Iterator[None]:
    """Empty every ``functools.lru_cache`` that was given a tensor of ``log`` in this context."""
    before = {id(cache): cache.cache_info().misses for cache in _caches()}
    try:
        yield
    finally:
        for cache in _caches():
            if cache.cache_info().misses != before.get(id(cache), 0) and _holds(cache, log):
                cache.cache_clear()


def fill_kept(log: Log, replay: Replay, own: Collection[int]) -> None:
    """Give its value to every tensor of ``log`` that is alive and none of ``own``, the model's, by their identities."""
    if not _alive(log, own):
        return
    gc.collect()
    kept = _alive(log, own)
    values = replay.values([log.view(tensor) for tensor in kept])
    for tensor, value in sorted(zip(kept, values), key=lambda pair: not pair[0]._is_view()):
        try:
            torch.utils.swap_tensors(tensor, like(tensor, value))
        except RuntimeError as error:
            logger.warning(
                "the constructor keeps a tensor of %s outside of the model, which stays without values: %s",
                tuple(tensor.shape),
                str(error).splitlines()[0],
            )


def _alive(log: Log, own: Collection[int]) -> list[Tensor]:
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    with without_function_modes():
        return [t for t in found if t.is_meta and id(t) not in own and log.find(t) is not None]


def _caches() -> list[Any]:
    kind = functools._lru_cache_wrapper
    return [found for found in gc.get_objects() if type(found) is kind]


def _holds(cache: Any, log: Log) -> bool:
    seen: set[int] = set()
    ahead = [cache]
    while ahead and len(seen) < _DEEP:
        for part in gc.get_referents(ahead.pop()):
            if isinstance(part, Tensor):
                if log.find(part) is not None:
                    return True
            elif id(part) not in seen and not isinstance(part, _ATOMS):
                seen.add(id(part))
                ahead.append(part)
    return False

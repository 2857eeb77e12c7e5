"""Functions that remember their results must not remember tensors without bytes."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from parallax.model.construction.log import Log

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

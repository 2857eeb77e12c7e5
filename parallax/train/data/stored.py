"""Encoded items, such as image files or members of archives: read from storage on each access, or held in memory."""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from parallax.common.units import format_bytes
from parallax.errors import DataError
from parallax.machine.host import available_memory
from parallax.train.data.order import Numbers
from parallax.train.data.progress import progress

Encoded = bytes | memoryview

_ITEMS_AT_ONCE = 64


class EncodedStore(Protocol):
    """Encoded items, which are identified by their index. ``sizes``: the bytes of each item."""

    sizes: NDArray[np.int64]

    def read(self, items: Numbers) -> list[Encoded]:
        """Return the bytes of ``items``. Raises :class:`DataError` for an item that cannot be read. Forked workers also
        call this method."""

    def where(self, item: int) -> str:
        """Return the name of an item, for error messages."""


class InMemory:
    """Copies of the ``items`` of ``store`` in memory, which workers that are forked later share.

    Each rank of a host has its own copy. Raises :class:`DataError` if all copies together exceed the host's free
    memory.
    """

    def __init__(
        self, store: EncodedStore, items: Numbers, label: str, *, quiet: bool = True
    ) -> None:
        self.sizes, self._store = store.sizes, store
        self._items = np.unique(items)
        ends = np.cumsum(store.sizes[self._items], dtype=np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), ends])
        total, ranks = int(self._starts[-1]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if total > (free := available_memory(ranks)):
            raise DataError(
                f"{label}: data.in_memory=true needs {format_bytes(total)} for each of {ranks} rank(s) on this host, "
                f"and {format_bytes(free)} are free for each: use data.in_memory=false"
            )
        self._bytes = np.empty(total, np.uint8)
        with progress("reading data into memory", total, quiet=quiet) as advance:
            for first in range(0, len(self._items), _ITEMS_AT_ONCE):
                place = int(self._starts[first])
                for data in store.read(self._items[first : first + _ITEMS_AT_ONCE]):
                    self._bytes[place : place + len(data)] = np.frombuffer(data, np.uint8)
                    place += len(data)
                advance(place - int(self._starts[first]))

    def read(self, items: Numbers) -> list[Encoded]:
        places = np.searchsorted(self._items, items)
        starts, ends = self._starts[places].tolist(), self._starts[places + 1].tolist()
        whole = self._bytes.data
        return [whole[start:end] for start, end in zip(starts, ends)]

    def where(self, item: int) -> str:
        return self._store.where(item)

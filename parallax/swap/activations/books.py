"""Where a manager's records stand: each in one book at most, in the order in which the book is read."""

from __future__ import annotations

import weakref
from collections import OrderedDict

import torch

from parallax.swap.activations.records import Record, State


# Of a dict, to find the first costs as much as was deleted before it.
class Book(OrderedDict[Record, None]):
    """Records in an order, and the number by which each of them knows that it is here: the book itself would be a
    cycle."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Books:
    """``fresh``: saved by an operator that may still run. ``kept``: until room is needed, oldest first; ``preferred``:
    by the policy, while there is room, oldest first. ``early``: to be used next and not used yet, in the order of need;
    ``used``: loaded and used, the longest ago first. ``leaving`` counts the bytes that are being written and not wanted
    again."""

    def __init__(self) -> None:
        self._all = tuple(Book(number) for number in range(5))
        self.fresh, self.kept, self.preferred, self.early, self.used = self._all
        self.leaving = 0

    def put(self, record: Record, book: Book) -> None:
        """It is the last of ``book``, and in no other."""
        if record.book is not None:
            self._all[record.book].pop(record, None)
        record.book = book.number
        book[record] = None

    def take(self, record: Record) -> None:
        """It is in no book."""
        if record.book is not None:
            self._all[record.book].pop(record, None)
            record.book = None

    def leave(self, record: Record) -> None:
        """It is being written, and will make room."""
        self.leaving += 0 if record.leaving else record.size
        record.leaving = True

    def stop_leaving(self, record: Record) -> None:
        """It makes no room any more, or did."""
        if record.leaving:
            record.leaving = False
            self.leaving -= record.size

    def stay(self, record: Record) -> None:
        """It is on the device, and will be used soon or was used already."""
        record.state, record.transfer = State.LOADED, None
        self.put(record, self.used if record.used else self.early)

    def drop(self, record: Record) -> None:
        """Nobody claims it any more."""
        if record.leaving:
            self.stop_leaving(record)
        if record.book is not None:
            self._all[record.book].pop(record, None)
            record.book = None


class Lingering:
    """Copies that were given up while somebody still worked on their bytes, which count until they let go."""

    def __init__(self) -> None:
        self._watched: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []

    def add(self, watch: weakref.ref[torch.UntypedStorage], size: int) -> None:
        """Count ``size`` bytes for as long as what is watched is there."""
        self._watched.append((watch, size))

    def __len__(self) -> int:
        return len(self._watched)

    def gone(self) -> int:
        """Bytes that were let go of since the last call."""
        before, self._watched = (
            self._watched,
            [(watch, size) for watch, size in self._watched if watch() is not None],
        )
        return sum(size for _, size in before) - sum(size for _, size in self._watched)

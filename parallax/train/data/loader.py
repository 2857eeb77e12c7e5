"""Prefetch the rows of the next steps in workers while the current step trains.

The executor requests the rows of each micro-batch, and these requests are the same in every step. So the requests of
one step predict those of the next. No knowledge of stages or replicas is needed: a rank of the first stage requests
inputs, a rank of the last stage requests targets, and each rank requests only its own rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from parallax.model.block import leaves
from parallax.train.data.order import Taken
from parallax.train.data.table import (
    BOTH,
    INPUTS,
    TARGETS,
    Table,
    Values,
    rows_of,
    taken_seconds,
)
from parallax.train.data.workers import RowRequest, Workers, read

_MOST_REQUESTS = 64  # ahead
_MOST_BATCHES = 16  # ahead

Span = tuple[int, int]
"""The first row of a request within its batch, and the row after its last."""


class Loader:
    """Reads batches of one table on request and, if there are ``workers``, prefetches them.

    Prefetched rows use at most ``limit`` bytes, or the bytes of one request if these are more. ``name``: the name of
    the table among the tables of the workers. ``seconds``: a mapping from each part of reading, such as ``decode``, to
    the seconds that it took, summed over this process and the workers. ``whole_batches``: whether each request reads
    the whole batch, because a row of this table depends on the other rows of its batch.
    """

    def __init__(
        self, name: str, table: Table, seed: int, workers: Workers | None, limit: int
    ) -> None:
        self._name, self._table, self._seed = name, table, seed
        self._workers, self._limit = workers, limit
        self._coming: Iterator[Taken] = iter(())
        self._batches: deque[Taken] = (
            deque()
        )  # the present batch and the following ones, as far as known
        self._pattern: list[Span] = []
        self._parts: dict[Span, frozenset[str]] = {}
        self._times: Counter[tuple[Span, str]] = Counter()
        self._calls: Counter[tuple[Span, str]] = Counter()
        self._read: dict[Span, Values] = {}
        self._ahead: deque[tuple[int, Span, int]] = deque()  # batch from now, span, request
        self._cursor = 1, 0  # the next request to make: batch from now, place in the pattern
        self._request_bytes = 0
        self.turn = 0  # the number of the present batch
        self.whole_batches = getattr(table, "whole_batches", False)
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def batch(self, taken: Taken, coming: Callable[[], Iterator[Taken]]) -> LoadedRows:
        """Return the rows ``taken`` as a batch. ``coming()`` yields the rows of the following batches."""
        self._read.clear()
        follows = len(self._batches) > 1 and _same(self._batches[1], taken)
        changed = self._learn()
        if follows and not changed:
            self._batches.popleft()
            self._ahead = deque((turn - 1, span, number) for turn, span, number in self._ahead)
            while self._ahead and self._ahead[0][0] < 0:
                self._forget()
            self._cursor = max(0, self._cursor[0] - 1), self._cursor[1]
        else:
            while self._ahead:
                self._forget()
            self._batches, self._coming, self._cursor = deque([taken]), coming(), (1, 0)
        self._submit()
        return LoadedRows(self, taken)

    def get(self, batch: LoadedRows, taken: Taken, span: Span, part: str) -> Any:
        """Return the inputs or targets (``part``) of the rows ``span`` of ``batch``, a batch of the rows ``taken``."""
        if batch.loader_turn != self.turn:  # an earlier batch: nothing of it was kept
            return self._read_now(taken, span, frozenset({part}))[part]
        self._calls[span, part] += 1
        held = self._read.get(span, {})
        if part not in held:
            held = self._read[span] = held | self._take(taken, span, part)
        value = held[part]
        if self._calls[span, part] == self._times[span, part]:
            del held[part]  # requested as often as in the last batch
        self._submit()
        return value

    def _learn(self) -> bool:
        """Use the requests of the previous batch as the prediction for the next; return whether the prediction
        changed."""
        self.turn += 1
        if not self._calls:
            return False
        pattern, parts = list[Span](), dict[Span, frozenset[str]]()
        for span, part in self._calls:
            if span not in parts:
                pattern.append(span)
            parts[span] = parts.get(span, frozenset()) | {part}
        changed = (pattern, parts) != (self._pattern, self._parts)
        self._pattern, self._parts = pattern, parts
        self._times, self._calls = self._calls, Counter()
        return changed

    def _take(self, taken: Taken, span: Span, part: str) -> Values:
        """Return a mapping with ``part`` (inputs or targets), and possibly other parts, of the rows ``span`` of the
        batch ``taken``. If these rows have not been prefetched, read them now."""
        for place, (turn, known, number) in enumerate(self._ahead):
            if (turn, known) == (0, span) and part in self._parts[span]:
                del self._ahead[place]
                assert self._workers is not None
                values, seconds = self._workers.result(number)
                self._count(seconds)
                return self._sized(values)
        turn, place = self._cursor
        if turn == 0 and self._pattern[place] == span:
            self._advance()
        wanted = self._parts.get(span, frozenset()) | {part}
        return self._sized(self._read_now(taken, span, BOTH if self._table.whole else wanted))

    def _read_now(self, taken: Taken, span: Span, parts: frozenset[str]) -> Values:
        request = RowRequest(self._name, taken[slice(*span)], parts, self._seed)
        found = read({self._name: self._table}, request)
        self._count(taken_seconds())
        return found

    def _count(self, seconds: dict[str, float]) -> None:
        for part, taken in seconds.items():
            self.seconds[part] += taken

    def _sized(self, values: Values) -> Values:
        sizes = (part.nbytes for _, part in leaves(values) if isinstance(part, Tensor | np.ndarray))
        self._request_bytes = max(self._request_bytes, sum(sizes))
        return values

    def _submit(self) -> None:
        """Request from the workers the rows that the rank is predicted to need next, up to the limit of prefetched
        bytes."""
        if self._workers is None or not self._pattern:
            return
        most = max(1, min(_MOST_REQUESTS, self._limit // max(1, self._request_bytes)))
        while len(self._ahead) < most and (found := self._next()) is not None:
            turn, taken, span = found
            request = RowRequest(self._name, taken[slice(*span)], self._parts[span], self._seed)
            self._ahead.append((turn, span, self._workers.submit(request)))

    def _next(self) -> tuple[int, Taken, Span] | None:
        turn, place = self._cursor
        if turn > _MOST_BATCHES:
            return None
        while len(self._batches) <= turn:
            if (taken := next(self._coming, None)) is None:
                return None
            self._batches.append(taken)
        span = self._pattern[place]
        if span[1] > len(self._batches[turn]):  # a smaller batch is split in another way
            return None
        self._advance()
        return turn, self._batches[turn], span

    def _advance(self) -> None:
        turn, place = self._cursor
        self._cursor = (turn, place + 1) if place + 1 < len(self._pattern) else (turn + 1, 0)

    def _forget(self) -> None:
        assert self._workers is not None
        self._workers.forget(self._ahead.popleft()[2])


class LoadedRows:
    """The rows of one batch, read on access."""

    def __init__(self, loader: Loader, taken: Taken) -> None:
        self._loader, self._taken = loader, taken
        self.loader_turn = loader.turn

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def row_numbers(self) -> int:
        """A digest of the numbers of the rows."""
        return self._taken.digest()

    def inputs(self, start: int, stop: int) -> Any:
        return self._get(start, stop, INPUTS)

    def targets(self, start: int, stop: int) -> Any:
        return self._get(start, stop, TARGETS)

    def part(self, start: int, stop: int, part: str) -> Any:
        """Return the rows [start, stop) of a ``part`` that the table reads in addition to inputs and targets."""
        return self._get(start, stop, part)

    def _get(self, start: int, stop: int, part: str) -> Any:
        rows, stop = len(self), min(stop, len(self))
        if not self._loader.whole_batches:
            return self._loader.get(self, self._taken, (start, stop), part)
        return rows_of(self._loader.get(self, self._taken, (0, rows), part), rows, start, stop)


def _same(one: Taken, other: Taken) -> bool:
    return np.array_equal(one.rows, other.rows) and np.array_equal(one.epochs, other.epochs)

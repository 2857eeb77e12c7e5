"""Which tensors leave first, which stay by preference, and how early they come back.

The knobs are those of IBM's Large Model Support (TFLMS: ``n_tensors``, ``lb``; later ``swapout_threshold``,
``swapin_ahead``, ``swapin_groupby``), for whoever wants to set by hand what the limit decides by itself.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from parallax.errors import check_positive
from parallax.swap.activations.records import Batch, Record


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Preferences of a :class:`~parallax.swap.activations.manager.SwapManager`; its ``limit_bytes`` is the rule, so
    what stays by preference leaves before the budget is exceeded.

    ``eager``: tensors begin to leave as soon as they are saved; otherwise only when room is needed, those saved
    first (and needed last) before the others, so that nothing moves where all fits.

    ``n_tensors``: at most so many of a micro-batch are offloaded, the first saved; None: all.

    ``swapout_threshold``: a tensor stays whose use comes before so many others are saved, as far as the micro-batch
    before has shown; 0: none stays.

    ``swapin_ahead``: a tensor's way back begins when so many others are still to be used before it; None: as early
    as the limit allows.

    ``swapin_groupby``: tensors come back in groups of so many.
    """

    eager: bool = True
    n_tensors: int | None = None
    swapout_threshold: int = 0
    swapin_ahead: int | None = None
    swapin_groupby: int = 1

    def __post_init__(self) -> None:
        if self.n_tensors is not None:
            check_positive("swap.n_tensors", self.n_tensors, zero=True)
        check_positive("swap.swapout_threshold", self.swapout_threshold, zero=True)
        if self.swapin_ahead is not None:
            check_positive("swap.swapin_ahead", self.swapin_ahead, zero=True)
        check_positive("swap.swapin_groupby", self.swapin_groupby)

    def preferences(self) -> Preferences | NoPreferences:
        indifferent = Policy(eager=self.eager) == self
        return NoPreferences() if indifferent else Preferences(self)


class NoPreferences:
    """The default policy at work: the limit alone decides, so nothing need be remembered of what was saved."""

    def stays(self, _record: Record) -> bool:
        return False

    def used(self, _record: Record, _clock: int) -> None:
        """Teaches nothing."""

    def learn(self, _batch: Batch) -> None:
        """Nothing."""

    def due(self, _record: Record) -> bool:
        """As early as the limit allows."""
        return True

    def group_bytes(self, record: Record) -> int:
        return record.size


class Preferences:
    """A policy at work. A tensor is recognised by its ordinal and size in its micro-batch, because a training step
    saves the same again and again."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[int, tuple[int, int]] = {}

    def stays(self, record: Record) -> bool:
        """Whether a newly saved record stays while there is room."""
        policy = self._policy
        if policy.n_tensors is not None and record.ordinal >= policy.n_tensors:
            return True
        size, distance = self._known.get(record.ordinal, (-1, 0))
        return size == record.size and distance < policy.swapout_threshold

    def used(self, record: Record, clock: int) -> None:
        """The first use of a record, when ``clock`` records had been saved."""
        batch = record.batch
        batch.passed = max(batch.passed, batch.place(record) + 1)
        batch.uses[record.ordinal] = (record.size, clock - record.clock)
        if len(batch.uses) == batch.saved:
            self.learn(batch)

    def learn(self, batch: Batch) -> None:
        """Remember what is known of a micro-batch that has ended; one that was never used teaches nothing."""
        if batch.uses:
            self._known, batch.uses = batch.uses, {}

    def due(self, record: Record) -> bool:
        """Whether the way back of a record, or of its group, may begin."""
        if self._policy.swapin_ahead is None:
            return True
        return (
            self._group(record) * self._policy.swapin_groupby
            < record.batch.passed + self._policy.swapin_ahead
        )

    def group_bytes(self, record: Record) -> int:
        """What still waits of the group of a record that is the next to come."""
        total = 0
        for other in itertools.islice(record.batch.waiting, self._policy.swapin_groupby):
            total += other.size if self._group(other) == self._group(record) else 0
        return total

    def _group(self, record: Record) -> int:
        return record.batch.place(record) // self._policy.swapin_groupby

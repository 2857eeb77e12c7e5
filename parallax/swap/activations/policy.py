"""The policy of a swap manager: which saved tensors are evicted first, which are kept, and when they are prefetched.

The settings are those of IBM's Large Model Support (TFLMS: ``n_tensors``, ``lb``; later ``swapout_threshold``,
``swapin_ahead``, ``swapin_groupby``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from parallax.errors import check_positive
from parallax.swap.activations.records import Batch, Record


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Preferences of a :class:`~parallax.swap.activations.manager.SwapManager` within its ``limit_bytes``.

    The limit takes precedence: tensors that a preference keeps are evicted before the limit is exceeded.

    ``eager``: evict tensors as soon as they are saved. Otherwise tensors are evicted only when memory is short, in the
    order of saving (the first saved is needed last), so that nothing is offloaded if everything fits.

    ``n_tensors``: the most tensors of a micro-batch to offload, first saved first; None means all.

    ``swapout_threshold``: keep a tensor if, in the previous micro-batch, fewer than this many other tensors were saved
    between its save and its first use; 0 keeps none.

    ``swapin_ahead``: how many tensors before its use a tensor is prefetched; None means as early as the limit allows.

    ``swapin_groupby``: how many tensors are prefetched together.
    """

    eager: bool = True
    n_tensors: int | None = None
    swapout_threshold: int = 0
    swapin_ahead: int | None = None
    swapin_groupby: int = 1

    def __post_init__(self) -> None:
        if self.n_tensors is not None:
            check_positive("n_tensors", self.n_tensors, zero=True)
        check_positive("swapout_threshold", self.swapout_threshold, zero=True)
        if self.swapin_ahead is not None:
            check_positive("swapin_ahead", self.swapin_ahead, zero=True)
        check_positive("swapin_groupby", self.swapin_groupby)

    def preferences(self) -> Preferences | None:
        """Return an object that applies these settings in one manager.

        The result is None if all settings except ``eager`` have their defaults.
        """
        return None if Policy(eager=self.eager) == self else Preferences(self)


class Preferences:
    """Applies a policy to the records of one manager.

    Every training step saves the same tensors, so a record is recognised by its index and size within its micro-batch.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[int, tuple[int, int]] = {}

    def keeps(self, record: Record) -> bool:
        """Whether a newly saved record is kept on the device until memory is short."""
        policy = self._policy
        if policy.n_tensors is not None and record.ordinal >= policy.n_tensors:
            return True
        size, distance = self._known.get(record.ordinal, (-1, 0))
        return size == record.size and distance < policy.swapout_threshold

    def note_use(self, record: Record, clock: int) -> None:
        """Note the first use of ``record``. ``clock`` is the number of records saved before that use."""
        batch = record.batch
        batch.passed = max(batch.passed, batch.need_index(record) + 1)
        batch.uses[record.ordinal] = (record.size, clock - record.clock)
        if len(batch.uses) == batch.saved:
            self.learn(batch)

    def learn(self, batch: Batch) -> None:
        """Remember when the saved tensors of a finished micro-batch were used. This predicts the uses in the next
        micro-batch.

        A micro-batch without uses is ignored.
        """
        if batch.uses:
            self._known, batch.uses = batch.uses, {}

    def is_due(self, record: Record) -> bool:
        """Whether the policy allows ``record`` to be prefetched now.

        The answer is the same for all records of its group of ``swapin_groupby`` records, so these are prefetched
        together.
        """
        if self._policy.swapin_ahead is None:
            return True
        return (
            self._group(record) * self._policy.swapin_groupby
            < record.batch.passed + self._policy.swapin_ahead
        )

    def group_bytes(self, record: Record) -> int:
        """Return the bytes that are still to be read for ``record`` and the records that are prefetched together with
        it.

        ``record`` is the next record in the order of use. Together with it, the records that follow in this order are
        prefetched, up to ``swapin_groupby`` records in total.
        """
        total = 0
        for other in itertools.islice(record.batch.waiting, self._policy.swapin_groupby):
            total += other.size if self._group(other) == self._group(record) else 0
        return total

    def _group(self, record: Record) -> int:
        return record.batch.need_index(record) // self._policy.swapin_groupby

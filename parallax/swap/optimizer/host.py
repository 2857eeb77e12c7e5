"""The optimizer below the device: exact steps on the host, beside the next forward.

A global gradient norm is known only when the last gradient of the last stage is, so an exact step with clipping cannot
run inside the backward; but no weight is needed before the next forward comes to its block. So gradients move down
while the backward runs, the norm is agreed on as always, and :meth:`HostOptimizer.commit` only begins the step: a
thread takes bucket after bucket in the order of the forward, which waits (:meth:`HostOptimizer.ready`) for the buckets
of the block that it is about to run, and for no other. Nothing is speculated and nothing undone: the arithmetic is
that of the optimizer given, with the same kernels on the same numbers, whatever moves in between.

::

    main     … backward ─▶ norm ─▶ commit ─▶ forward of block 0 ─▶ block 1 ─▶ block 2 …
    thread                            └─▶ step 0 ─▶ step 1 ─▶ step 2 …      (bucket k before block k)
    store                          read 0, read 1 ─▶ read 2, write 0 …      (states, where they are in a store)

A bucket is a run of at most ``bucket_bytes`` of parameters, or of parts of them, stepped by a ``torch.optim`` optimizer
of its own, of the class and with the settings of the one given: fused kernels over long runs of memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from parallax.errors import SwapError
from parallax.machine.device import CopyEngine
from parallax.machine.host import relieve_memory
from parallax.plan.plan import STATE_BUCKET_BYTES
from parallax.swap.optimizer.buckets import (
    Bucket,
    GroupRates,
    InHostMemory,
    InStore,
    joined,
    settings_of,
)
from parallax.swap.optimizer.chunked_step import check_per_parameter
from parallax.swap.stores.store import Store
from parallax.swap.weights import (
    BucketWeights,
    CopiedWeights,
    ParameterSegment,
    ResidentWeights,
    aligned_runs,
    bytes_of,
    stepped_in,
)

_ALIGNMENT = 64  # bytes at which a bucket's place begins
# Where states need no room elsewhere: a bucket costs 0.4 ms by itself.
_LARGE_BUCKET_BYTES = 64 * STATE_BUCKET_BYTES
_FEWEST_BUCKETS = 4  # so that the first block does not wait for all
_WHOLE = (torch.optim.Adafactor,)  # looks at rows and columns, so a parameter may not be cut


class Exchange(Protocol):
    """Replicas that share one copy of the states: each steps what it owns and gives the others the new weights."""

    def owner(self, parameter: Tensor) -> int:
        """Which replica steps ``parameter``; all say the same."""

    def owns(self, parameter: Tensor) -> bool:
        """Whether this one does."""

    def spread(self, parameter: Tensor, tensors: list[Tensor]) -> None:
        """Make ``tensors`` equal to those of the replica that owns ``parameter``; all call in the same order."""


class Alone:
    """No exchange: one replica, which steps everything."""

    def owner(self, parameter: Tensor) -> int:  # noqa: ARG002
        return 0

    def owns(self, parameter: Tensor) -> bool:  # noqa: ARG002
        return True

    def spread(self, parameter: Tensor, tensors: list[Tensor]) -> None:
        """Nobody else has them."""


ALONE = Alone()


class NothingBelow:
    """No parameter is stepped below the device."""

    stall_seconds = 0.0
    state_bytes = 0

    def set_rate(self, rate: float, whole: float) -> None:
        """Nothing is stepped."""

    def zero_grad(self) -> None:
        """There are none."""

    def reduced(self, parameter: Tensor) -> None:
        """It stays."""

    def commit(self, coefficient: Tensor | None = None) -> None:
        """Nothing is stepped."""

    def skip(self) -> None:
        """Nothing is stepped."""

    def ready(self, parameters: Iterable[Tensor]) -> None:
        """All may be used."""

    def finish(self) -> None:
        """All may be used."""

    def reset(self) -> None:
        """There are no states."""

    def states(self, parameter: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        return {}

    def restore(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        """Nothing of it is here."""

    def close(self) -> None:
        """Nothing was begun."""


class HostOptimizer:
    """Steps the parameters of ``optimizer``, which itself never steps: its groups say what is stepped, and how.

    ``parameters`` are in the order of the forward. ``store``: where states lie between steps; None is host memory.
    ``extra``: buckets whose weights and gradients somebody else keeps (streamed parameters), in the order of the
    forward, after the others; replicas do not share their states. Optimizers that look at several parameters at once
    are refused with :class:`~parallax.errors.ConfigError`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        *,
        copies: CopyEngine,
        store: Store | None = None,
        exchange: Exchange = ALONE,
        extra: Sequence[BucketWeights] = (),
        bucket_bytes: int | None = None,
    ) -> None:
        check_per_parameter(optimizer)
        self.optimizer = optimizer
        self._rates = GroupRates(optimizer)
        # Of the stepping thread; of the main one waiting for it.
        self.update_seconds = self.stall_seconds = 0.0
        self._exchange, self._copies, self._beside = exchange, copies, copies.here()
        self._failure: str | None = None
        self._home: InHostMemory | InStore = InHostMemory() if store is None else InStore(store)
        self._stepping = ThreadPoolExecutor(1, "parallax-update", initializer=copies.adopt)
        self._spreading = (
            None
            if exchange is ALONE
            else ThreadPoolExecutor(1, "parallax-spread", initializer=copies.adopt)
        )
        groups = {
            p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        if bucket_bytes is None:
            part = sum(parameter.nbytes for parameter in groups) // _FEWEST_BUCKETS
            bucket_bytes = (
                STATE_BUCKET_BYTES if store is not None else min(_LARGE_BUCKET_BYTES, part)
            )
        cut = not isinstance(optimizer, _WHOLE)
        stepped = [parameter for parameter in parameters if parameter in groups]
        found = list(
            aligned_runs(stepped, bucket_bytes, lambda p: (p.dtype, exchange.owner(p)), cut=cut)
        )
        self._pinned = copies.arena(sum(_place_bytes(segments) for segments in found))
        ends = list(accumulate((_place_bytes(segments) for segments in found), initial=0))
        self._buckets = [
            Bucket(
                self._weights(run, copies, at), optimizer, groups, exchange.owner(run[0].parameter)
            )
            for run, at in zip(found, ends)
        ]
        self._buckets += [Bucket(weights, optimizer, groups, None) for weights in extra]
        self._of: dict[Tensor, list[Bucket]] = {}
        for bucket in self._buckets:
            for parameter in dict.fromkeys(segment.parameter for segment in bucket.segments):
                self._of.setdefault(parameter, []).append(bucket)

    @property
    def state_bytes(self) -> int:
        """Of the states that have been made, wherever they lie."""
        return sum(bucket.state_bytes for bucket in self._buckets)

    def set_rate(self, rate: float, whole: float) -> None:
        """The learning rate of the next step; see :class:`~parallax.swap.optimizer.buckets.GroupRates`."""
        self._rates.set(rate, whole)

    def reduced(self, parameter: Tensor) -> None:
        """The gradient of ``parameter`` is final: a bucket comes down when all of its gradients are."""
        for bucket in self._of.get(parameter, ()):
            bucket.due -= 1
            if bucket.due == 0:
                bucket.weights.reduced()

    def commit(self, coefficient: Tensor | None = None) -> None:
        """Begin the step, with every gradient multiplied by ``coefficient``."""
        self.finish()
        settings = [
            settings_of(self.optimizer, index) for index in range(len(self.optimizer.param_groups))
        ]
        for bucket in self._buckets:
            if bucket.due != 0:
                bucket.weights.reduced()
            bucket.due = bucket.count
        unused, self._beside = self._copies.mark(), self._copies.here()
        for bucket in self._buckets:
            bucket.weights.commit(unused)
        mine = [bucket for bucket in self._buckets if self._steps(bucket)]
        stepped: dict[Bucket, Future[None]] = {}
        for bucket, following in zip(mine, [*mine[1:], None]):
            stepped[bucket] = self._stepping.submit(
                self._step, bucket, following, settings, coefficient
            )
        for bucket in self._buckets:
            bucket.future = stepped.get(bucket)
            if self._spreading is not None and bucket.owner is not None:
                bucket.future = self._spreading.submit(self._spread, bucket, stepped.get(bucket))

    def ready(self, parameters: Iterable[Tensor]) -> None:
        """Return when ``parameters`` may be used by the device's current stream. Raises :class:`SwapError` where their
        step failed, and from then on: the weights are half new, until they are set again."""
        self._check()
        for parameter in parameters:
            for bucket in self._of.get(parameter, ()):
                self._arrive(bucket)

    def finish(self) -> None:
        """Return when every parameter may be used, and every state is where it belongs."""
        self.ready(self._of)
        self._flush()

    def reset(self) -> None:
        """Forget all states, and a step that failed; the weights on the device, or wherever they live, are right."""
        for bucket in self._buckets:
            if bucket.future is not None:
                wait([bucket.future])
                bucket.future = None
        self._home.reset()
        for bucket in self._buckets:
            bucket.reset()
        self._failure = None

    def skip(self) -> None:
        """There is no step: what came down of the gradients is forgotten, and nothing changes."""
        self.finish()
        for bucket in self._buckets:
            bucket.due = bucket.count
            bucket.weights.skip()

    def zero_grad(self) -> None:
        """Gradients of a step that was never begun become zero; a step makes them zero itself."""
        if all(bucket.future is None for bucket in self._buckets):
            for bucket in self._buckets:
                bucket.weights.skip()  # those that are still being copied down
            self.optimizer.zero_grad(set_to_none=False)
        for bucket in self._buckets:
            bucket.due = bucket.count

    def states(self, parameter: Tensor) -> dict[str, Tensor]:
        """What the optimizer knows of ``parameter``, whole, as ``optimizer.state`` would have it, and its weights in
        full precision (``master``) where its own are not; nothing where another replica steps it, or before its first
        step."""
        self.finish()
        parts: list[dict[str, Tensor]] = []
        for bucket in self._of.get(parameter, ()):
            self._home.take(bucket)
            parts += bucket.copies(parameter)
            self._home.leave(bucket)
        return joined(parts, parameter)

    def restore(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        """The weights of ``parameter`` are what it holds now, its states are ``states``."""
        self.finish()
        for bucket in self._of.get(parameter, ()):
            if self._steps(bucket):
                self._home.take(bucket)
                bucket.restore(parameter, states)
                self._home.give(bucket)
        self._flush()

    def close(self) -> None:
        """End the threads; a step that has begun is let end, unless one failed: then other replicas may wait for what
        will never come."""
        self._stepping.shutdown(wait=True, cancel_futures=self._failure is not None)
        if self._spreading is not None:
            self._spreading.shutdown(
                wait=self._failure is None, cancel_futures=self._failure is not None
            )
        self._copies.synchronize()
        self._pinned.close()

    def _step(
        self,
        bucket: Bucket,
        following: Bucket | None,
        settings: Sequence[dict[str, Any]],
        coefficient: Tensor | None,
    ) -> None:
        start = time.perf_counter()
        with self._noting_failure(), torch.no_grad(), self._beside():
            self._home.take(bucket)
            if following is not None:
                self._home.ahead(following)
            bucket.step(settings, coefficient)
            if self._spreading is None or bucket.owner is None:
                bucket.weights.end()
            self._home.give(bucket)
            relieve_memory()  # of the states that were here
        self.update_seconds += time.perf_counter() - start

    def _spread(self, bucket: Bucket, stepped: Future[None] | None) -> None:
        if stepped is not None:
            stepped.result()
        with self._noting_failure(), torch.no_grad(), self._beside():
            self._exchange.spread(bucket.segments[0].parameter, bucket.weights.shared())
            bucket.weights.end()

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """After one failure nothing is stepped and nothing spread, until all is set again."""
        self._check()
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or str(error)
            raise

    def _check(self) -> None:
        if self._failure is not None:
            raise SwapError(
                f"an optimizer step below the device failed ({self._failure}), so weights are half new: load the last "
                "checkpoint"
            )

    def _flush(self) -> None:
        with self._noting_failure():
            self._home.flush()

    def _arrive(self, bucket: Bucket) -> None:
        if bucket.future is not None:
            start = time.perf_counter()
            future, bucket.future = bucket.future, None
            future.result()
            bucket.weights.wait()
            self.stall_seconds += time.perf_counter() - start

    def _steps(self, bucket: Bucket) -> bool:
        """Whether it is stepped here."""
        return bucket.owner is None or self._exchange.owns(bucket.segments[0].parameter)

    def _weights(
        self, segments: Sequence[ParameterSegment], copies: CopyEngine, at: int
    ) -> BucketWeights:
        size = _place_bytes(segments)
        if not size:
            return ResidentWeights(segments)
        place = self._pinned.data[at : at + size]
        owned = self._exchange.owns(segments[0].parameter)
        return CopiedWeights(segments, copies, place, owned=owned)


def _place_bytes(segments: Sequence[ParameterSegment]) -> int:
    """Host memory that weights pass through; none where they are in host memory, and stepped as they are."""
    first = segments[0].parameter
    if first.device.type == "cpu" and stepped_in(first.dtype) is first.dtype:
        return 0
    return -(-sum(map(bytes_of, segments)) // _ALIGNMENT) * _ALIGNMENT

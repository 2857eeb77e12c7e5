"""The host optimizer: exact optimizer steps on the host, while the next forward runs.

With clipping by the global gradient norm, an exact step must wait for the last gradient of the last stage, so it cannot
run during the backward. But the next forward needs the weights of only one block at a time. So gradients are copied to
the host while the backward runs, and the norm is computed as usual. Then :meth:`HostOptimizer.commit` only begins the
step: a thread steps bucket after bucket in the order of the forward. The forward waits (:meth:`HostOptimizer.ready`)
only for the buckets of its next block. No step is speculative, and kernels and operands are those of the given
optimizer.

::

    main     … backward ─▶ norm ─▶ commit ─▶ forward of block 0 ─▶ block 1 ─▶ block 2 …
    thread                            └─▶ step 0 ─▶ step 1 ─▶ step 2 …      (bucket k before block k)
    store                          read 0, read 1 ─▶ read 2, write 0 …      (if states are in a store)

A bucket contains consecutive parameters, or parts of them, of at most ``bucket_bytes``. Each bucket has an optimizer of
the given class and settings, so that fused kernels run over long ranges of memory.
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
from parallax.machine.pinned import PlainArena
from parallax.plan.plan import STATE_BUCKET_BYTES
from parallax.swap.optimizer.buckets import (
    Bucket,
    Correction,
    GroupRates,
    StatesInMemory,
    StatesInStore,
    joined,
    settings_of,
)
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
# for states in host memory: each bucket costs 0.4 ms
_LARGE_BUCKET_BYTES = 64 * STATE_BUCKET_BYTES
_FEWEST_BUCKETS = 4  # so that the first block does not wait for all


class Exchange(Protocol):
    """The interface to data-parallel replicas that together hold one copy of the optimizer states (as in ZeRO-1).

    Each replica steps the parameters that it owns, and broadcasts their new weights.
    """

    def owner(self, parameter: Tensor) -> int:
        """Return the replica that steps ``parameter``. The result is equal on all replicas."""

    def owns(self, parameter: Tensor) -> bool:
        """Whether this replica is the one that steps ``parameter``."""

    def broadcast(self, parameter: Tensor, tensors: list[Tensor]) -> None:
        """Broadcast ``tensors`` in place from the replica that owns ``parameter``.

        All replicas call this in the same order.
        """


def owner_of(exchange: Exchange | None, parameter: Tensor) -> int:
    """Return the replica that steps ``parameter``; 0 without an exchange."""
    return 0 if exchange is None else exchange.owner(parameter)


def owns(exchange: Exchange | None, parameter: Tensor) -> bool:
    """Whether this replica steps ``parameter``. Without an ``exchange``, every replica steps all parameters."""
    return exchange is None or exchange.owns(parameter)


class HostOptimizer:
    """Steps the parameters of ``optimizer`` on the host.

    ``optimizer``   its class, groups and settings are used, but its own ``step`` is never called. The class must step
                    each parameter independently.
    ``parameters``  the parameters to step, in the order of the forward
    ``copies``      copy engine of the device
    ``store``       holds the states between steps; None keeps them in host memory
    ``exchange``    the replicas that share one copy of the states; None if each replica steps all parameters
    ``extra``       further buckets with their own weights and gradients (offloaded parameters), in the order of the
                    forward. They are stepped last, and replicas do not share their states.
    ``divides``     a bucket may contain a part of a parameter
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        *,
        copies: CopyEngine,
        store: Store | None = None,
        exchange: Exchange | None = None,
        extra: Sequence[BucketWeights] = (),
        bucket_bytes: int | None = None,
        divides: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self._rates = GroupRates(optimizer)
        # seconds of the stepping thread, and seconds that the main thread has waited for it
        self.update_seconds = self.stall_seconds = 0.0
        self._exchange, self._copies = exchange, copies
        self._beside = copies.compute_stream_context()
        self._failure: str | None = None
        self._states: StatesInMemory | StatesInStore = (
            StatesInMemory() if store is None else StatesInStore(store)
        )
        self._stepping = ThreadPoolExecutor(1, "parallax-update", initializer=copies.bind_thread)
        self._broadcasting = (
            None
            if exchange is None
            else ThreadPoolExecutor(1, "parallax-broadcast", initializer=copies.bind_thread)
        )
        groups = {
            p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        if bucket_bytes is None:
            part = sum(parameter.nbytes for parameter in groups) // _FEWEST_BUCKETS
            bucket_bytes = (
                STATE_BUCKET_BYTES if store is not None else min(_LARGE_BUCKET_BYTES, part)
            )
        stepped = [parameter for parameter in parameters if parameter in groups]
        found = list(
            aligned_runs(
                stepped, bucket_bytes, lambda p: (p.dtype, owner_of(exchange, p)), split=divides
            )
        )
        sizes = [_staging_bytes(segments) for segments in found]
        # No byte is pinned for an optimizer that needs no staging: pinning may be impossible.
        self._pinned = copies.arena(sum(sizes)) if any(sizes) else PlainArena(0)
        self._buckets = []
        for run, at in zip(found, accumulate(sizes, initial=0)):
            owner = owner_of(exchange, run[0].parameter)
            self._buckets.append(Bucket(self._weights(run, copies, at), optimizer, groups, owner))
        self._buckets += [Bucket(weights, optimizer, groups, None) for weights in extra]
        for bucket in filter(self._steps, self._buckets):
            bucket.take_states(optimizer)
        optimizer.state.clear()
        self._buckets_of: dict[Tensor, list[Bucket]] = {}
        for bucket in self._buckets:
            for parameter in dict.fromkeys(segment.parameter for segment in bucket.segments):
                self._buckets_of.setdefault(parameter, []).append(bucket)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer states created so far, in memory or in the store."""
        return sum(bucket.state_bytes for bucket in self._buckets)

    def set_factor(self, factor: float) -> None:
        """Set the factor by which all learning rates are multiplied in the next step."""
        self._rates.set(factor)

    def reduced(self, parameter: Tensor) -> None:
        """Note that the gradient of ``parameter`` does not change any more before the step.

        When this is true for all parameters of a bucket, which are stepped together, their gradients are copied to the
        host.
        """
        for bucket in self._buckets_of.get(parameter, ()):
            bucket.pending_gradients -= 1
            if bucket.pending_gradients == 0:
                bucket.weights.reduced()

    def commit(self, corrections: Sequence[Correction] = ()) -> None:
        """Begin the step, on another thread.

        ``corrections`` are the changes of gradients before the step. A parameter group's setting ``clip_group`` is the
        index of its correction.
        """
        self.finish()
        settings = [
            settings_of(self.optimizer, index) for index in range(len(self.optimizer.param_groups))
        ]
        for bucket in self._buckets:
            if bucket.pending_gradients != 0:
                bucket.weights.reduced()
            bucket.pending_gradients = bucket.parameter_count
        unused, self._beside = self._copies.mark(), self._copies.compute_stream_context()
        for bucket in self._buckets:
            bucket.weights.commit(unused)
        mine = [bucket for bucket in self._buckets if self._steps(bucket)]
        stepped: dict[Bucket, Future[None]] = {}
        for bucket, following in zip(mine, [*mine[1:], None]):
            stepped[bucket] = self._stepping.submit(
                self._step, bucket, following, settings, corrections
            )
        for bucket in self._buckets:
            bucket.future = stepped.get(bucket)
            if self._broadcasting is not None and bucket.owner is not None:
                bucket.future = self._broadcasting.submit(
                    self._broadcast, bucket, stepped.get(bucket)
                )

    def ready(self, parameters: Iterable[Tensor]) -> None:
        """Wait until the device's current stream may use the new values of ``parameters``.

        Raises :class:`SwapError` after a failed step, which has updated only some weights. The error is raised until
        all weights and states are set again (:meth:`reset`).
        """
        self._check()
        for parameter in parameters:
            for bucket in self._buckets_of.get(parameter, ()):
                self._wait_for_bucket(bucket)

    def finish(self) -> None:
        """Wait until all new weights may be used and all states are stored."""
        self.ready(self._buckets_of)
        self._flush()

    def reset(self) -> None:
        """Drop all states, and forget a failed step.

        The caller must have set valid weights on the device or, if offloaded, in the store.
        """
        for bucket in self._buckets:
            if bucket.future is not None:
                wait([bucket.future])
                bucket.future = None
        self._states.reset()
        for bucket in self._buckets:
            bucket.reset()
        self._failure = None

    def skip(self) -> None:
        """Skip a step: discard the gradients that were copied to the host. Weights and states stay unchanged."""
        self.finish()
        for bucket in self._buckets:
            bucket.pending_gradients = bucket.parameter_count
            bucket.weights.skip()

    def zero_grad(self) -> None:
        """Set all gradients to zero, unless a step is running. A running step sets them to zero itself."""
        if all(bucket.future is None for bucket in self._buckets):
            for bucket in self._buckets:
                bucket.weights.skip()  # waits for gradients under copy to the host
            self.optimizer.zero_grad(set_to_none=False)
        for bucket in self._buckets:
            bucket.pending_gradients = bucket.parameter_count

    def states(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of ``parameter`` as ``optimizer.state`` would hold it.

        If the parameter is not in full precision, the state includes the full-precision weights (``master``). The
        result is empty before the first step, or if another replica steps the parameter.
        """
        self.finish()
        parts: list[dict[str, Tensor]] = []
        for bucket in self._buckets_of.get(parameter, ()):
            self._states.load(bucket)
            parts += bucket.copies(parameter)
            self._states.unload(bucket)
        return joined(parts, parameter)

    def restore(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        """Set the optimizer state of ``parameter``. The caller has already set the weights."""
        self.finish()
        for bucket in self._buckets_of.get(parameter, ()):
            if self._steps(bucket):
                self._states.load(bucket)
                bucket.restore(parameter, states)
                self._states.store(bucket)
        self._flush()

    def close(self) -> None:
        """End the threads after the running step.

        After a failed step, the call does not wait for broadcasts, because other replicas may never send their weights.
        """
        self._stepping.shutdown(wait=True, cancel_futures=self._failure is not None)
        if self._broadcasting is not None:
            self._broadcasting.shutdown(
                wait=self._failure is None, cancel_futures=self._failure is not None
            )
        if self._buckets:
            self._copies.synchronize()
        self._pinned.close()

    def _step(
        self,
        bucket: Bucket,
        following: Bucket | None,
        settings: Sequence[dict[str, Any]],
        corrections: Sequence[Correction],
    ) -> None:
        start = time.perf_counter()
        with self._noting_failure(), torch.no_grad(), self._beside():
            self._states.load(bucket)
            if following is not None:
                self._states.prefetch(following)
            bucket.step(settings, corrections)
            if self._broadcasting is None or bucket.owner is None:
                bucket.weights.publish()
            self._states.store(bucket)
            relieve_memory()  # the states of this bucket are freed
        self.update_seconds += time.perf_counter() - start

    def _broadcast(self, bucket: Bucket, stepped: Future[None] | None) -> None:
        if stepped is not None:
            stepped.result()
        assert self._exchange is not None
        with self._noting_failure(), torch.no_grad(), self._beside():
            self._exchange.broadcast(
                bucket.segments[0].parameter, bucket.weights.exchange_tensors()
            )
            bucket.weights.publish()

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """A context that records an error raised inside.

        After that, no bucket is stepped or broadcast until :meth:`reset` is called.
        """
        self._check()
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or str(error)
            raise

    def _check(self) -> None:
        if self._failure is not None:
            raise SwapError(
                f"an optimizer step on the host failed ({self._failure}), so only some weights are updated: load the "
                "last checkpoint"
            )

    def _flush(self) -> None:
        with self._noting_failure():
            self._states.flush()

    def _wait_for_bucket(self, bucket: Bucket) -> None:
        if bucket.future is not None:
            start = time.perf_counter()
            future, bucket.future = bucket.future, None
            future.result()
            bucket.weights.wait()
            self.stall_seconds += time.perf_counter() - start

    def _steps(self, bucket: Bucket) -> bool:
        """Whether this replica steps ``bucket``. Each bucket is stepped by one replica, or by every replica."""
        return bucket.owner is None or owns(self._exchange, bucket.segments[0].parameter)

    def _weights(
        self, segments: Sequence[ParameterSegment], copies: CopyEngine, at: int
    ) -> BucketWeights:
        size = _staging_bytes(segments)
        if not size:
            return ResidentWeights(segments)
        place = self._pinned.data[at : at + size]
        owned = owns(self._exchange, segments[0].parameter)
        return CopiedWeights(segments, copies, place, owned=owned)


def _staging_bytes(segments: Sequence[ParameterSegment]) -> int:
    """Return the bytes of host memory for copies of weights and gradients; 0 if the originals are stepped in place."""
    first = segments[0].parameter
    if first.device.type == "cpu" and stepped_in(first.dtype) is first.dtype:
        return 0
    return -(-sum(map(bytes_of, segments)) // _ALIGNMENT) * _ALIGNMENT

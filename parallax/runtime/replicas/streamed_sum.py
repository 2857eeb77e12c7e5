"""Sum the gradients of offloaded parameters over replicas while the last backward (or the last weight-gradient pass)
runs.

Gradients become final block by block, and are then offloaded. Before that, they are copied into one of two permanent
buffers, each of which holds the bucket of one all-reduce. If no buffer is free, a gradient is offloaded without being
summed, and read back when a buffer is free. So the backward waits neither for other replicas nor for the offload tier.
::

    backward    │ block 3 ──▶ buffer 0 │ block 2 ──▶ buffer 1 │ block 1 ──▶ tier │
    all-reduce              │ bucket 0            │ bucket 1            │ bucket 2 (read from the tier)
    tier                                          │ sums 0 written  │ sums 1 written  │ …

All replicas sum the same buckets in the same order, whichever buffers are free on each.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.errors import ParallaxError, SwapError
from parallax.runtime.replicas.buckets import anywhere
from parallax.swap.parameters.chunks import GradientWrite, has_ended
from parallax.swap.parameters.offloaded import OffloadedParameters
from parallax.swap.stores.store import Pending
from parallax.swap.weights import ParameterSegment, bytes_of

_BUFFERS = 2  # the planner counts the same number


class _BucketState(enum.Enum):
    FILLING = enum.auto()  # gradients are not complete
    READING = enum.auto()  # offloaded segments are read
    REDUCING = enum.auto()  # all-reduced
    WRITING = enum.auto()  # the sums are written to the tier


@dataclass(slots=True)
class _BucketRun:
    """Consecutive segments (ranges of elements) of one parameter. ``offset``: the index of their first element in the
    bucket."""

    parameter: nn.Parameter
    segments: list[ParameterSegment]
    offset: int

    @property
    def numel(self) -> int:
        return self.segments[-1].stop - self.segments[0].start

    def view(self, flat: Tensor) -> Tensor:
        """Return the run as a view of ``flat``, the bucket's memory."""
        return flat[self.offset : self.offset + self.numel]


class _Read(NamedTuple):
    """A read of the offloaded gradient of ``segment`` into ``target``, which has ended when ``work`` has.

    ``place`` is the segment's memory in the bucket. ``target`` is the same tensor, or a separate one if the bucket is
    summed in another type than the gradient has.
    """

    work: Pending
    segment: ParameterSegment
    target: Tensor
    place: Tensor


@dataclass(slots=True, eq=False)
class _GradientBucket:
    """The gradients of one all-reduce.

    ``buffer`` is the index of the permanent buffer that the bucket uses. ``flat`` is the bucket's memory in that
    buffer; None while another bucket uses the buffer. ``pending`` holds the parameters whose gradients are not yet
    final in this step, and ``given`` the segments that the backward has copied into the buffer. ``reads``, ``work`` and
    ``writes`` are the running reads, all-reduce and writes.
    """

    runs: list[_BucketRun]
    dtype: torch.dtype
    buffer: int = 0
    state: _BucketState = _BucketState.FILLING
    pending: set[nn.Parameter] = field(default_factory=set)
    given: set[ParameterSegment] = field(default_factory=set)
    flat: Tensor | None = None
    reads: list[_Read] = field(default_factory=list)
    work: dist.Work | None = None
    writes: list[tuple[GradientWrite, Tensor]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return self.runs[-1].offset + self.runs[-1].numel

    def place(self, run: _BucketRun, segment: ParameterSegment) -> Tensor:
        """Return the memory of ``segment``, a part of ``run``, in the bucket."""
        assert self.flat is not None
        start = run.offset + segment.start - run.segments[0].start
        return self.flat[start : start + segment.stop - segment.start]

    def missing(self) -> Iterator[tuple[_BucketRun, ParameterSegment]]:
        """Yield (run, segment) for each segment that the backward did not copy into the buffer."""
        for run in self.runs:
            for segment in run.segments:
                if segment not in self.given:
                    yield run, segment


class StreamedSum:
    """Sums the gradients of offloaded parameters over ``group``, which no other code may use at the same time.

    ``streamed`` holds the offloaded parameters of all stages of this rank, and ``members`` maps each stage to its
    parameters. ``short`` is the type in which gradients are summed; None for their own type. ``bucket_bytes`` limits
    the bytes of a bucket, counting a copy in the gradients' own type if ``short`` is given. ``other`` is another group
    of the same ranks, for the communication after an aborted step.

    If ``beside`` is True, sums run during the backward; otherwise all sums follow the backward. NCCL needs the latter:
    it requires that all ranks start the collectives of several groups in one order, and the order of these sums depends
    on timing.

    A parameter that no replica has ever used must have no gradient. So after the backward the replicas exchange which
    parameters they have used, and also sum the gradients of parameters that were used for the first time.
    """

    def __init__(
        self,
        streamed: OffloadedParameters,
        members: Mapping[int, Sequence[nn.Parameter]],
        group: dist.ProcessGroup,
        other: dist.ProcessGroup,
        short: torch.dtype | None,
        bucket_bytes: int,
        *,
        beside: bool = True,
    ) -> None:
        self._streamed, self._group, self._short = streamed, group, short
        self._members = members
        self._beside = beside
        self._other = other
        # With a short type, a copy in the full type exists while the sums are written.
        self._bucket_bytes = bucket_bytes if short is None else bucket_bytes // 2
        trained = [s.parameter for chunk in streamed.chunks for s in chunk.segments]
        # Gradients of the last block are complete first.
        self._trained = list(dict.fromkeys(reversed(trained)))
        self._unused = set(self._trained)
        self._buckets: list[_GradientBucket] = []
        self._of: dict[nn.Parameter, list[tuple[_GradientBucket, _BucketRun]]] = {}
        self._buffers: list[Tensor | None] = [None] * _BUFFERS
        self._waiting: deque[_GradientBucket] = deque()  # buckets without a buffer, in order
        self._active: deque[_GradientBucket] = deque()  # buckets with a buffer, in order
        self._begun = False
        # All-reduces that this step has started, in order; those of an aborted step, of which other ranks may have
        # started more.
        self._launched: list[_GradientBucket] = []
        self._unfinished: list[_GradientBucket] | None = None
        self.all_reduces = 0

    def arm(self, stage: int, pending: Collection[nn.Parameter] | None = None) -> None:
        """Prepare for the last backward of ``stage`` in a step. Call this method before that backward.

        With split backwards, call it before the stage's last weight-gradient pass. ``pending`` then holds the
        parameters whose gradients this pass still changes.
        """
        if not self._beside:
            return
        if not self._begun:
            self._begin(self._buckets)
        if pending is not None:
            self._complete(set(self._members[stage]).difference(pending))
        self._streamed.sink = self

    def ended(self, stage: int) -> None:
        """Announce that the last backward or weight-gradient pass of ``stage`` has ended, so that the gradients of its
        unused parameters are final too."""
        self._complete(self._members[stage])

    def _complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Mark the gradients of ``parameters`` as final."""
        self._streamed.sink = None
        for bucket in (*self._active, *self._waiting):
            bucket.pending.difference_update(parameters)
        if self._begun:
            self._advance()

    def accept(self, parameter: nn.Parameter, total: Tensor) -> Collection[ParameterSegment]:
        """Copy the gradient ``total`` of ``parameter`` into its buckets that have a buffer. Return the segments that
        were copied."""
        flat, taken = total.view(-1), set[ParameterSegment]()
        for bucket, run in self._of.get(parameter, ()):
            if parameter not in bucket.pending:
                raise ParallaxError(
                    "an offloaded parameter had two gradients in one backward, and replicas sum only the first: plan "
                    "with plan.replicas=1, or plan.parameters=device"
                )
            while self._open():
                pass
            if bucket.flat is not None:
                run.view(bucket.flat).copy_(flat[run.segments[0].start : run.segments[-1].stop])
                bucket.given.update(run.segments)
                taken.update(run.segments)
        return taken

    def accepted(self, parameter: nn.Parameter) -> None:
        """Mark the gradient of ``parameter`` as final, so that its offloaded segments can be read."""
        for bucket, _ in self._of.get(parameter, ()):
            bucket.pending.remove(parameter)
        self._advance()

    def run(self) -> None:
        """Finish all sums, and write them to the offload tier."""
        if not self._begun:
            self._begin(self._buckets)
        self._complete(self._trained)
        self._finish()
        if self._unused and (new := self._newly_used()):
            self._begin(self._divide(new))
            self._complete(self._trained)
            self._finish()
            self._lay_out()
        self._begun = False
        self._launched.clear()

    def forget(self) -> None:
        """Drop an aborted step, without waiting for reductions: other ranks may never join them."""
        self._streamed.sink = None
        if self._begun:
            self._unfinished, self._launched = self._launched, []
        for bucket in self._active:
            for read in bucket.reads:
                while not has_ended(read.work):
                    time.sleep(0)
            for written, _ in bucket.writes:
                with contextlib.suppress(SwapError):
                    self._end(written)
            bucket.reads.clear()
            bucket.writes.clear()
            if bucket.state is _BucketState.REDUCING:
                self._buffers[bucket.buffer] = None
        self._active.clear()
        self._waiting.clear()
        self._begun = False

    # ---- buckets

    def _lay_out(self) -> None:
        used = [parameter for parameter in self._trained if parameter not in self._unused]
        self._buckets = self._divide(used)
        self._of = {}
        for bucket in self._buckets:
            for run in bucket.runs:
                self._of.setdefault(run.parameter, []).append((bucket, run))

    def _divide(self, parameters: Iterable[nn.Parameter]) -> list[_GradientBucket]:
        """Return the buckets for ``parameters``, each with gradients of one type. A parameter that fits into a bucket
        is not divided."""
        found: list[_GradientBucket] = []
        free_bytes = 0
        for parameter in parameters:
            rest = list(self._streamed.gradient(parameter).segments)
            while rest:
                new = not found or found[-1].dtype is not parameter.dtype
                fits_anew = sum(map(bytes_of, rest)) <= self._bucket_bytes
                if (
                    new
                    or free_bytes < bytes_of(rest[0])
                    or (fits_anew and free_bytes < parameter.nbytes)
                ):
                    found.append(_GradientBucket([], parameter.dtype, len(found) % _BUFFERS))
                    free_bytes = self._bucket_bytes
                count = _fitting(rest, free_bytes)
                offset = found[-1].numel if found[-1].runs else 0
                found[-1].runs.append(_BucketRun(parameter, rest[:count], offset))
                free_bytes -= sum(map(bytes_of, rest[:count]))
                rest = rest[count:]
        return found

    def _begin(self, buckets: Sequence[_GradientBucket]) -> None:
        assert not self._active
        self._catch_up()
        for bucket in buckets:
            bucket.state, bucket.flat = _BucketState.FILLING, None
            bucket.pending = {run.parameter for run in bucket.runs}
            bucket.given.clear()
        self._waiting = deque(buckets)
        self._begun = True
        sizes = [0] * _BUFFERS
        for bucket in buckets:
            size = bucket.numel * (self._short or bucket.dtype).itemsize
            sizes[bucket.buffer] = max(sizes[bucket.buffer], size)
        for number, size in enumerate(sizes):
            held = self._buffers[number]
            if held is None or held.numel() < size:
                self._buffers[number] = None
                self._buffers[number] = torch.empty(
                    size, dtype=torch.uint8, device=self._trained[0].device
                )

    def _catch_up(self) -> None:
        """After an aborted step, make all ranks have started the same number of all-reduces.

        A rank joins, with zeros, the all-reduces that other ranks have started in that step and that it has not
        started.
        """
        if self._unfinished is None:
            return
        begun, self._unfinished = len(self._unfinished), None
        most = torch.tensor([begun], device=self._trained[0].device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._other)
        for bucket in self._buckets[begun : int(most)]:
            dtype = self._short or bucket.dtype
            zeros = torch.zeros(bucket.numel, dtype=dtype, device=most.device)
            dist.all_reduce(zeros, group=self._group)

    # ---- states of a bucket

    def _advance(self) -> None:
        """Advance every bucket as far as it can without waiting."""
        moved = True
        while moved:
            moved = self._open()
            for bucket in list(self._active):
                moved = self._move(bucket) or moved

    def _finish(self) -> None:
        """Wait for all buckets, the oldest first."""
        self._advance()
        while self._active:
            self._move(self._active[0], wait=True)
            self._advance()

    def _open(self) -> bool:
        """Give the next waiting bucket its buffer if that buffer is free; return whether the bucket got it."""
        if not self._waiting or any(b.buffer == self._waiting[0].buffer for b in self._active):
            return False
        bucket = self._waiting.popleft()
        dtype, buffer = self._short or bucket.dtype, self._buffers[bucket.buffer]
        assert buffer is not None
        bucket.flat = buffer[: bucket.numel * dtype.itemsize].view(dtype)
        self._active.append(bucket)
        return True

    def _move(self, bucket: _GradientBucket, *, wait: bool = False) -> bool:
        """Advance ``bucket`` to its next state; return whether it advanced. With ``wait``, wait until it can
        advance."""
        with torch.no_grad():
            return _MOVES[bucket.state](self, bucket, wait)

    def _read(self, bucket: _GradientBucket, wait: bool) -> bool:
        """Start to read the offloaded segments of ``bucket`` and return True. Return False if some of its gradients are
        not final or, unless ``wait`` is set, if some of these segments are still being offloaded."""
        gradient, missing = self._streamed.gradient, list(bucket.missing())
        if bucket.pending or not (
            wait or all(gradient(run.parameter).is_written(segment) for run, segment in missing)
        ):
            return False
        for run, segment in missing:
            target = place = bucket.place(run, segment)
            if place.dtype is not bucket.dtype:
                target = torch.empty(place.shape, dtype=bucket.dtype, device=place.device)
            with self._streamed.lock:
                pending = gradient(run.parameter).read(segment, target)
            if pending is None:
                place.zero_()
            else:
                bucket.reads.append(_Read(pending, segment, target, place))
        bucket.state = _BucketState.READING
        return True

    def _launch(self, bucket: _GradientBucket, wait: bool) -> bool:
        """Start the all-reduce of ``bucket`` and return True. Return False if an earlier bucket's all-reduce has not
        started or, unless ``wait`` is set, if reads of this bucket are still running."""
        before = itertools.takewhile(lambda each: each is not bucket, self._active)
        if any(
            each.state in (_BucketState.FILLING, _BucketState.READING) for each in before
        ) or not (wait or all(has_ended(read.work) for read in bucket.reads)):
            return False
        for read in bucket.reads:
            read.work.wait()
            self._streamed.gradient(read.segment.parameter).check(read.segment, read.target)
            if read.target is not read.place:
                read.place.copy_(read.target)
        bucket.reads.clear()
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        self.all_reduces += 1
        self._launched.append(bucket)
        bucket.state = _BucketState.REDUCING
        return True

    def _write(self, bucket: _GradientBucket, wait: bool) -> bool:
        """Start to write the sums of ``bucket`` to the offload tier and return True. Return False, unless ``wait`` is
        set, if the all-reduce is still running."""
        assert bucket.work is not None
        assert bucket.flat is not None
        if not (wait or bucket.work.is_completed()):
            return False
        bucket.work.wait()
        bucket.work = None
        for run in bucket.runs:
            total = run.view(bucket.flat).to(bucket.dtype)
            with self._streamed.lock:
                written = self._streamed.gradient(run.parameter).write(total, run.segments)
            bucket.writes.append((written, total))
        bucket.state = _BucketState.WRITING
        return True

    def _close(self, bucket: _GradientBucket, wait: bool) -> bool:
        """Free the buffer of ``bucket`` for the next bucket and return True. Return False, unless ``wait`` is set, if
        the writes to the offload tier are still running."""
        if not (wait or all(written.has_ended() for written, _ in bucket.writes)):
            return False
        self._active.remove(bucket)
        bucket.flat = None
        with contextlib.ExitStack() as stack:
            for written, _ in bucket.writes:
                stack.callback(self._end, written)
        bucket.writes.clear()
        return True

    def _end(self, written: GradientWrite) -> None:
        with self._streamed.lock:
            written.finish()

    def _newly_used(self) -> list[nn.Parameter]:
        """Return the parameters that a replica used for the first time in this step."""
        unused = [parameter for parameter in self._trained if parameter in self._unused]
        mine = [self._streamed.gradient(parameter).seen for parameter in unused]
        used = anywhere(mine, unused[0].device, self._group)
        new = [parameter for parameter, is_used in zip(unused, used) if is_used]
        self._unused.difference_update(new)
        return new


_MOVES: dict[_BucketState, Callable[[StreamedSum, _GradientBucket, bool], bool]] = {
    _BucketState.FILLING: StreamedSum._read,
    _BucketState.READING: StreamedSum._launch,
    _BucketState.REDUCING: StreamedSum._write,
    _BucketState.WRITING: StreamedSum._close,
}


def _fitting(segments: Sequence[ParameterSegment], free_bytes: int) -> int:
    """Return how many of the first ``segments`` fit into ``free_bytes``, but at least one."""
    sizes = itertools.accumulate(map(bytes_of, segments))
    return max(1, sum(1 for size in sizes if size <= free_bytes))

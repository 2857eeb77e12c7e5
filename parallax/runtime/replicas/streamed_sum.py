"""Gradients of parameters below the device, summed over the replicas of a stage while the last backward runs.

They come block by block and are soon to go below again, so they are summed on their way: in buckets, through two
buffers that are there for good. A gradient for which no buffer is free is written below as ever, and read again when
its bucket's turn has come, so nobody waits within the backward: neither for other replicas nor for the tier. ::

    backward    │ block 3 ──▶ buffer 0 │ block 2 ──▶ buffer 1 │ block 1 ──▶ below │
    all-reduce              │ bucket 0            │ bucket 1            │ bucket 2 (read from below)
    below                                         │ sums 0 written  │ sums 1 written  │ …

All replicas sum the same buckets in the same order, whatever is free when on each of them.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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

_BUFFERS = 2  # as many as the planner counts


class _BucketState(enum.Enum):
    FILLING = enum.auto()  # gradients are to come
    COMING = enum.auto()  # what was written below is read
    FLYING = enum.auto()  # summed over the replicas
    GOING = enum.auto()  # the sums are written below


@dataclass(slots=True)
class _BucketRun:
    """Neighbour segments of one parameter, and where in the bucket they begin."""

    parameter: nn.Parameter
    segments: list[ParameterSegment]
    offset: int

    @property
    def numel(self) -> int:
        return self.segments[-1].stop - self.segments[0].start

    def view(self, flat: Tensor) -> Tensor:
        """Its part of the bucket."""
        return flat[self.offset : self.offset + self.numel]


class _Read(NamedTuple):
    """A segment on its way up, into its place in the bucket or, of another type, beside it."""

    pending: Pending
    segment: ParameterSegment
    target: Tensor
    place: Tensor


@dataclass(slots=True, eq=False)
class _GradientBucket:
    """What is summed at one time. ``buffer`` is the number of the one that it passes through; in a step, ``owed`` are
    parameters whose gradients are to come, ``given`` the segments that are in the buffer."""

    runs: list[_BucketRun]
    dtype: torch.dtype
    buffer: int = 0
    state: _BucketState = _BucketState.FILLING
    owed: set[nn.Parameter] = field(default_factory=set)
    given: set[ParameterSegment] = field(default_factory=set)
    flat: Tensor | None = None
    reads: list[_Read] = field(default_factory=list)
    work: dist.Work | None = None
    writes: list[tuple[GradientWrite, Tensor]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return self.runs[-1].offset + self.runs[-1].numel

    def place(self, run: _BucketRun, segment: ParameterSegment) -> Tensor:
        """Where a segment of one of the runs lies."""
        assert self.flat is not None
        start = run.offset + segment.start - run.segments[0].start
        return self.flat[start : start + segment.stop - segment.start]

    def missing(self) -> Iterator[tuple[_BucketRun, ParameterSegment]]:
        """What did not come from the backward."""
        for run in self.runs:
            for segment in run.segments:
                if segment not in self.given:
                    yield run, segment


class StreamedSum:
    """The sum over ``group``, which nobody else may use meanwhile, in buckets of ``bucket_bytes``; in the type
    ``short`` where there is one. ``other`` is another group of the same ranks.
    Without ``beside`` all of it is summed after the backward: NCCL wants the sums of several groups in one order on all
    ranks, and here their order is a matter of time.

    A parameter that no replica has ever used has no gradient: the replicas ask each other after the backward, and sum
    then what was used for the first time.
    """

    def __init__(
        self,
        streamed: OffloadedParameters,
        group: dist.ProcessGroup,
        other: dist.ProcessGroup,
        short: torch.dtype | None,
        bucket_bytes: int,
        *,
        beside: bool = True,
    ) -> None:
        self._streamed, self._group, self._short = streamed, group, short
        self._beside = beside
        self._other = other
        # What is sent short is held twice when it is written.
        self._bucket_bytes = bucket_bytes if short is None else bucket_bytes // 2
        trained = [s.parameter for chunk in streamed.chunks for s in chunk.segments]
        # Those of the last block are complete first.
        self._trained = list(dict.fromkeys(reversed(trained)))
        self._unused = set(self._trained)
        self._buckets: list[_GradientBucket] = []
        self._of: dict[nn.Parameter, list[tuple[_GradientBucket, _BucketRun]]] = {}
        self._buffers: list[Tensor | None] = [None] * _BUFFERS
        self._waiting: deque[_GradientBucket] = deque()  # for a buffer, in order
        self._active: deque[_GradientBucket] = deque()  # those that have one, in order
        self._begun = False
        # Sums that a step has begun, in order; those of one that ended early, where others may have begun more.
        self._launched: list[_GradientBucket] = []
        self._unfinished: list[_GradientBucket] | None = None
        self.all_reduces = 0

    def arm(self) -> None:
        """The next backward is the step's last."""
        if not self._beside:
            return
        self._begin(self._buckets)
        self._streamed.sink = self

    def ended(self) -> None:
        """It is over: what took no part in it is complete, too."""
        self._streamed.sink = None
        for bucket in (*self._active, *self._waiting):
            bucket.owed.clear()
        if self._begun:
            self._advance()

    def accept(self, parameter: nn.Parameter, total: Tensor) -> Collection[ParameterSegment]:
        """Copy what there are buffers for."""
        flat, taken = total.view(-1), set[ParameterSegment]()
        for bucket, run in self._of.get(parameter, ()):
            if parameter not in bucket.owed:
                raise ParallaxError(
                    "a parameter below the device had two gradients in one backward, and replicas sum the first: plan "
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
        """Nothing of it is owed any more; what there was no buffer for can be read."""
        for bucket, _ in self._of.get(parameter, ()):
            bucket.owed.remove(parameter)
        self._advance()

    def run(self) -> None:
        """Return with everything summed and below."""
        if not self._begun:
            self._begin(self._buckets)
        self.ended()
        self._finish()
        if self._unused and (new := self._newly_used()):
            self._begin(self._cut(new))
            self.ended()
            self._finish()
            self._lay_out()
        self._begun = False
        self._launched.clear()

    def forget(self) -> None:
        """The step ended early. What is summed is not waited for: others may never answer."""
        self._streamed.sink = None
        if self._begun:
            self._unfinished, self._launched = self._launched, []
        for bucket in self._active:
            for read in bucket.reads:
                while not has_ended(read.pending):
                    time.sleep(0)
            for written, _ in bucket.writes:
                with contextlib.suppress(SwapError):
                    self._end(written)
            bucket.reads.clear()
            bucket.writes.clear()
            if bucket.state is _BucketState.FLYING:
                self._buffers[bucket.buffer] = None
        self._active.clear()
        self._waiting.clear()
        self._begun = False

    # ---- buckets

    def _lay_out(self) -> None:
        used = [parameter for parameter in self._trained if parameter not in self._unused]
        self._buckets = self._cut(used)
        self._of = {}
        for bucket in self._buckets:
            for run in bucket.runs:
                self._of.setdefault(run.parameter, []).append((bucket, run))

    def _cut(self, parameters: Iterable[nn.Parameter]) -> list[_GradientBucket]:
        """Of one type each. A parameter that fits a bucket is in one."""
        found: list[_GradientBucket] = []
        room = 0
        for parameter in parameters:
            rest = list(self._streamed.gradient(parameter).segments)
            while rest:
                new = not found or found[-1].dtype is not parameter.dtype
                fits_anew = sum(map(bytes_of, rest)) <= self._bucket_bytes
                if new or room < bytes_of(rest[0]) or (fits_anew and room < parameter.nbytes):
                    found.append(_GradientBucket([], parameter.dtype, len(found) % _BUFFERS))
                    room = self._bucket_bytes
                count = _fitting(rest, room)
                offset = found[-1].numel if found[-1].runs else 0
                found[-1].runs.append(_BucketRun(parameter, rest[:count], offset))
                room -= sum(map(bytes_of, rest[:count]))
                rest = rest[count:]
        return found

    def _begin(self, buckets: Sequence[_GradientBucket]) -> None:
        assert not self._active
        self._catch_up()
        for bucket in buckets:
            bucket.state, bucket.flat = _BucketState.FILLING, None
            bucket.owed = {run.parameter for run in bucket.runs}
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
        """Of a step that ended early, on all ranks, some may have begun more sums than others: these begin the rest."""
        if self._unfinished is None:
            return
        begun, self._unfinished = len(self._unfinished), None
        most = torch.tensor([begun], device=self._trained[0].device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._other)
        for bucket in self._buckets[begun : int(most)]:
            dtype = self._short or bucket.dtype
            zeros = torch.zeros(bucket.numel, dtype=dtype, device=most.device)
            dist.all_reduce(zeros, group=self._group)

    # ---- what becomes of one

    def _advance(self) -> None:
        """Move every bucket on as far as it goes without waiting."""
        moved = True
        while moved:
            moved = self._open()
            for bucket in list(self._active):
                moved = self._move(bucket) or moved

    def _finish(self) -> None:
        """Wait for all of them, the oldest first."""
        self._advance()
        while self._active:
            self._move(self._active[0], wait=True)
            self._advance()

    def _open(self) -> bool:
        """Give the next bucket its buffer, where that is free."""
        if not self._waiting or any(b.buffer == self._waiting[0].buffer for b in self._active):
            return False
        bucket = self._waiting.popleft()
        dtype, buffer = self._short or bucket.dtype, self._buffers[bucket.buffer]
        assert buffer is not None
        bucket.flat = buffer[: bucket.numel * dtype.itemsize].view(dtype)
        self._active.append(bucket)
        return True

    def _move(self, bucket: _GradientBucket, *, wait: bool = False) -> bool:
        """One state further; whether it went. With ``wait`` it goes: all is there, or on its way."""
        with torch.no_grad():
            return _MOVES[bucket.state](self, bucket, wait)

    def _read(self, bucket: _GradientBucket, wait: bool) -> bool:
        """Begin to read what is below."""
        gradient, missing = self._streamed.gradient, list(bucket.missing())
        if bucket.owed or not (
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
        bucket.state = _BucketState.COMING
        return True

    def _launch(self, bucket: _GradientBucket, wait: bool) -> bool:
        """Sum it, when all before it are on their way."""
        before = itertools.takewhile(lambda each: each is not bucket, self._active)
        if any(
            each.state in (_BucketState.FILLING, _BucketState.COMING) for each in before
        ) or not (wait or all(has_ended(read.pending) for read in bucket.reads)):
            return False
        for read in bucket.reads:
            read.pending.wait()
            self._streamed.gradient(read.segment.parameter).check(read.segment, read.target)
            if read.target is not read.place:
                read.place.copy_(read.target)
        bucket.reads.clear()
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        self.all_reduces += 1
        self._launched.append(bucket)
        bucket.state = _BucketState.FLYING
        return True

    def _write(self, bucket: _GradientBucket, wait: bool) -> bool:
        """Begin to write the sums."""
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
        bucket.state = _BucketState.GOING
        return True

    def _close(self, bucket: _GradientBucket, wait: bool) -> bool:
        """Give its buffer to the next."""
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
        """What no replica had ever used before this step."""
        asked = [parameter for parameter in self._trained if parameter in self._unused]
        mine = [self._streamed.gradient(parameter).seen for parameter in asked]
        used = anywhere(mine, asked[0].device, self._group)
        new = [parameter for parameter, is_used in zip(asked, used) if is_used]
        self._unused.difference_update(new)
        return new


_MOVES: dict[_BucketState, Callable[[StreamedSum, _GradientBucket, bool], bool]] = {
    _BucketState.FILLING: StreamedSum._read,
    _BucketState.COMING: StreamedSum._launch,
    _BucketState.FLYING: StreamedSum._write,
    _BucketState.GOING: StreamedSum._close,
}


def _fitting(segments: Sequence[ParameterSegment], room: int) -> int:
    """How many of the first have room; one at least."""
    sizes = itertools.accumulate(map(bytes_of, segments))
    return max(1, sum(1 for size in sizes if size <= room))

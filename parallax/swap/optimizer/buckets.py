"""Buckets: groups of parameters that the host optimizer steps together, and the memory of their states between
steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallax.errors import SwapError
from parallax.model.private import clamp_each_above, clamp_each_below, multiply_each
from parallax.swap.optimizer.chunked_step import independent_clone
from parallax.swap.optimizer.counters import GroupCounters, as_tensors
from parallax.swap.stores.slots import StoreSlot
from parallax.swap.stores.store import Pending, Store
from parallax.swap.weights import (
    BucketWeights,
    ParameterSegment,
    ResidentWeights,
    part_of,
    stepped_in,
)

MASTER = "master"  # key of a state: the weights in full precision
CLIP_GROUP = "clip_group"  # key of a parameter group: the number of its correction; 0 without it


class Correction(NamedTuple):
    """A change of gradients before a step: scaling, then clamping.

    Gradients are multiplied by ``coefficient``, or unchanged if it is None. Then each element is clamped to ±``bound``;
    0 means no clamping.
    """

    coefficient: Tensor | None = None
    bound: float = 0.0

    def apply(self, gradients: list[Tensor]) -> None:
        """Change ``gradients`` in place."""
        if gradients and self.coefficient is not None:
            multiply_each(gradients, self.coefficient)
        if gradients and self.bound:
            clamp_each_above(gradients, -self.bound)
            clamp_each_below(gradients, self.bound)


class _BucketPlace(NamedTuple):
    """The position of one state tensor in the bucket's byte buffer. The tensor is a state of the parameter segment with
    the index ``segment``."""

    segment: int
    key: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


class Bucket:
    """The parameters, or parts of parameters, that are stepped together, and the optimizer that steps them.

    ``owner`` is the replica that steps the bucket, or None if each replica steps its own copy.
    """

    def __init__(
        self,
        weights: BucketWeights,
        optimizer: torch.optim.Optimizer,
        groups: dict[nn.Parameter, int],
        owner: int | None,
    ) -> None:
        self.weights, self.segments, self.owner = weights, weights.segments, owner
        self.places: tuple[_BucketPlace, ...] = ()
        self.pending_gradients = self.parameter_count = len(
            {segment.parameter for segment in self.segments}
        )
        self.future: Future[None] | None = None
        self._empty = [
            torch.empty(0, dtype=stepped_in(s.parameter.dtype), device=weights.device)
            for s in self.segments
        ]
        self._stepped = [nn.Parameter(empty, requires_grad=False) for empty in self._empty]
        members: dict[int, list[nn.Parameter]] = {}
        for segment, stepped in zip(self.segments, self._stepped):
            members.setdefault(groups[segment.parameter], []).append(stepped)
        self._groups = list(members)
        self._given = [settings_of(optimizer, g) for g in members]
        self._kernel = independent_clone(
            optimizer, [{**own, "params": members[g]} for g, own in zip(members, self._given)]
        )
        self._counters = GroupCounters(self._kernel)

    def take_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the states that ``optimizer`` already had before the bucket's first step."""
        for index, segment in enumerate(self.segments):
            for key, value in optimizer.state.get(segment.parameter, {}).items():
                self.states(index)[key] = self._part(value, segment)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states created so far."""
        return self.places[-1].stop if self.places else 0

    def step(self, settings: Sequence[dict[str, Any]], corrections: Sequence[Correction]) -> None:
        """Step the parameters of the bucket once.

        ``settings`` has the settings of each parameter group. First, each group's entry in ``corrections`` is applied
        to the gradients of the group.
        """
        for group, index, given in zip(self._kernel.param_groups, self._groups, self._given):
            # Only changed settings are copied, because a step may keep a counter in its group.
            group.update({k: v for k, v in settings[index].items() if _differs(given.get(k), v)})
            given.update(settings[index])
        for stepped, (weight, gradient) in zip(self._stepped, self.weights.tensors_to_step()):
            stepped.data, stepped.grad = weight, gradient
        if len(corrections) == 1:  # takes the fewest kernels
            corrections[0].apply(_gradients(self._stepped))
        elif corrections:
            for group in self._kernel.param_groups:
                corrections[group.get(CLIP_GROUP, 0)].apply(_gradients(group["params"]))
        self._kernel.step()
        for stepped, empty in zip(self._stepped, self._empty):
            stepped.data, stepped.grad = empty, None
        self.weights.round_masters()

    def states(self, index: int) -> dict[str, Any]:
        """Return the optimizer state of the parameter segment (a parameter or a part of one) with this index."""
        found: dict[str, Any] = self._kernel.state[self._stepped[index]]
        return found

    def copies(self, parameter: Tensor) -> list[dict[str, Tensor]]:
        """Return copies of the optimizer states and master weights of ``parameter``, one dictionary for each part of
        the parameter in this bucket."""
        mine = [
            index for index, segment in enumerate(self.segments) if segment.parameter is parameter
        ]
        masters = self.weights.masters() if mine else []
        found = []
        for index in mine:
            known = {**self.states(index), **({MASTER: masters[index]} if masters else {})}
            counted = as_tensors(known, self._counters.of(self._stepped[index]))
            found.append({key: value.clone() for key, value in counted.items()})
        return found

    def restore(self, parameter: Tensor, states: Mapping[str, Tensor]) -> None:
        """Set the optimizer states of ``parameter``; the caller has already set its weights."""
        for index, segment in enumerate(self.segments):
            if segment.parameter is parameter:
                known = {key: self._part(value, segment) for key, value in states.items()}
                self.weights.restore(index, known.pop(MASTER, None))
                self.states(index).clear()
                self.states(index).update(self._counters.restored(self._stepped[index], known))

    def _part(self, value: Any, segment: ParameterSegment) -> Any:
        """Return the elements of ``segment``, a range of the parameter, from a parameter's optimizer state ``value``,
        on the device on which the bucket is stepped. A value that is no tensor is returned unchanged."""
        if not isinstance(value, Tensor):
            return value
        in_place = isinstance(self.weights, ResidentWeights)
        return _part_of_state(value, segment, in_place=in_place)

    def reset(self) -> None:
        """Drop all states and any unfinished step."""
        self._kernel.state.clear()
        self._counters.reset()
        self.places, self.pending_gradients = (), self.parameter_count
        self.weights.reset()

    def measure(self) -> None:
        """Find the state tensors of the bucket, and assign each of them a position in one byte buffer."""
        places, at = [], 0
        for index in range(len(self.segments)):
            # Sorted: states are views of the buffer, and must keep their positions if a step inserts a key again.
            for key, value in sorted(self._held(index).items(), key=lambda item: str(item[0])):
                if isinstance(value, Tensor) and (value.dim() > 0 or key == MASTER):
                    at = -(-at // value.element_size()) * value.element_size()
                    places.append(
                        _BucketPlace(
                            index,
                            key,
                            value.shape,
                            _stride(value),
                            value.dtype,
                            at,
                            at + value.nbytes,
                        )
                    )
                    at += value.nbytes
        self.places = tuple(places)

    def unload(self, flat: Tensor) -> None:
        """Copy the states into the byte buffer ``flat``, unless they are views of it already. Then release the
        states."""
        for place in self.places:
            view, held = _view(flat, place), self._held(place.segment)[place.key]
            if held.data_ptr() != view.data_ptr():
                view.copy_(held)
            self._hold(place, None)

    def load(self, flat: Tensor) -> None:
        """Make the states views of the byte buffer ``flat``."""
        for place in self.places:
            self._hold(place, _view(flat, place))

    def _held(self, index: int) -> dict[str, Any]:
        """Return the state of the parameter segment ``index``, with its master weights if these are stored with the
        states."""
        kept = self.weights.kept
        return {**self.states(index), **({MASTER: kept[index]} if kept else {})}

    def _hold(self, place: _BucketPlace, value: Tensor | None) -> None:
        if place.key == MASTER:
            self.weights.kept[place.segment] = value
        else:
            self.states(place.segment)[place.key] = value


class StatesInMemory:
    """Optimizer states that stay in host memory between steps. Its methods are no-ops, because nothing has to be read
    or written."""

    def prefetch(self, bucket: Bucket) -> None:
        pass

    def load(self, bucket: Bucket) -> None:
        pass

    def store(self, bucket: Bucket) -> None:
        pass

    def unload(self, bucket: Bucket) -> None:
        pass

    def reset(self) -> None:
        pass

    def flush(self) -> None:
        pass


class StatesInStore:
    """Optimizer states that are in a store between steps.

    During a step at most three buckets are in memory: the one being stepped, the next one being read, and the previous
    one being written.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._slots: dict[Bucket, StoreSlot] = {}
        self._reading: dict[Bucket, tuple[Tensor, Pending]] = {}
        self._loaded: dict[Bucket, Tensor] = {}
        self._writing: list[tuple[Tensor, Pending]] = []

    def prefetch(self, bucket: Bucket) -> None:
        """Begin to read the states of ``bucket``, the bucket to be stepped next."""
        slot = self._slots.get(bucket)
        if slot is not None and bucket not in self._reading:
            flat = torch.empty(slot.size, dtype=torch.uint8)
            self._reading[bucket] = (flat, self._store.read(slot, flat))

    def load(self, bucket: Bucket) -> None:
        """Load the states of a bucket into memory."""
        self.prefetch(bucket)
        if bucket in self._reading:
            flat, pending = self._reading.pop(bucket)
            pending.wait()
            bucket.load(flat)
            self._loaded[bucket] = flat

    def store(self, bucket: Bucket) -> None:
        self.flush()
        bucket.measure()
        flat = self._loaded.pop(bucket, None)
        if flat is None or flat.numel() != bucket.state_bytes:
            flat = torch.empty(bucket.state_bytes, dtype=torch.uint8)
        bucket.unload(flat)
        if bucket in self._slots:
            # first, so that the same slot is written again
            self._store.free(self._slots.pop(bucket))
        if not bucket.places:
            return
        self._slots[bucket], pending = self._store.write(flat)
        self._writing.append((flat, pending))

    def reset(self) -> None:
        for _, pending in [*self._reading.values(), *self._writing]:
            with contextlib.suppress(SwapError):
                pending.wait()
        for slot in self._slots.values():
            self._store.free(slot)
        for each in (self._slots, self._reading, self._loaded, self._writing):
            each.clear()

    def unload(self, bucket: Bucket) -> None:
        """Release the loaded states of ``bucket``, which were not changed. The stored states remain valid."""
        flat = self._loaded.pop(bucket, None)
        if flat is not None:
            bucket.unload(flat)

    def flush(self) -> None:
        while self._writing:
            self._writing.pop()[1].wait()


def joined(parts: Iterable[Mapping[str, Tensor]], parameter: Tensor) -> dict[str, Tensor]:
    """Return the state of a whole parameter, joined from ``parts``, the states of its segments.

    Scalars are equal in all segments, so the first is used.
    """
    found: dict[str, list[Tensor]] = {}
    for part in parts:
        for key, value in part.items():
            found.setdefault(key, []).append(value)
    return {key: _join(values, parameter) for key, values in found.items()}


class GroupRates:
    """Sets the learning rates of parameter groups to multiples of their initial values, like torch's ``LambdaLR``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._built = [group.get("lr") for group in optimizer.param_groups]

    def set(self, factor: float) -> None:
        """Set the learning rates of the next step to ``factor`` times the initial ones."""
        for group, built in zip(self._optimizer.param_groups, self._built):
            if isinstance(built, Tensor):
                group["lr"] = torch.full_like(built, built.item() * factor)
            elif isinstance(built, int | float):
                group["lr"] = built * factor


def settings_of(optimizer: torch.optim.Optimizer, group: int) -> dict[str, Any]:
    """Return the settings of parameter group ``group``, without its parameters and with ``capturable`` off."""
    found = {
        key: copy.copy(value)
        for key, value in optimizer.param_groups[group].items()
        if key != "params"
    }
    return {**found, "capturable": False} if "capturable" in found else found


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _differs(one: object, other: object) -> bool:
    return one is not other and (isinstance(other, Tensor) or one != other)


def _join(values: list[Tensor], parameter: Tensor) -> Tensor:
    if values[0].dim() == 0 or len(values) == 1:
        return values[0]
    return torch.cat(values).view(parameter.shape)


def _part_of_state(value: Tensor, segment: ParameterSegment, *, in_place: bool) -> Tensor:
    """Return a copy of the elements of ``segment`` in the optimizer state ``value``, in the memory layout of the tensor
    that is stepped.

    That layout is the parameter's if the parameter is stepped ``in_place``. Otherwise the result is contiguous, on the
    host.
    """
    device = segment.parameter.device if in_place else torch.device("cpu")
    value = value.detach().to(device).contiguous()
    if in_place and segment.whole and value.shape == segment.parameter.shape:
        return (
            torch.empty_like(segment.parameter, dtype=value.dtype, device=device)
            .detach()
            .copy_(value)
        )
    return value.clone() if value.dim() == 0 else part_of(value, segment).clone()


def _view(flat: Tensor, place: _BucketPlace) -> Tensor:
    return flat[place.start : place.stop].view(place.dtype).as_strided(place.shape, place.stride)


def _stride(value: Tensor) -> tuple[int, ...]:
    """Return the strides of ``value`` if its elements fill a range of memory without holes, otherwise contiguous
    strides.

    Kernels iterate in memory order, so weights and states need equal layouts.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return (
        value.stride()
        if span == value.numel()
        else torch.empty(value.shape, device="meta").stride()
    )

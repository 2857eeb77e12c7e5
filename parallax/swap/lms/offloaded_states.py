"""The optimizer state of a parameter while the large tensors of this state are offloaded."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, optim
from torch.nn import Parameter

from parallax.errors import SwapError
from parallax.swap.lms.offloaded_tensors import OffloadedWeight
from parallax.swap.lms.wrapped import address_of, parts, take_apart, wraps
from parallax.swap.stores.store import Store

SMALLEST = 4096  # bytes; slots of a store are multiples of it


def movable(parameter: Tensor, state: dict[Any, Any]) -> list[Any]:
    """Return the keys of the tensors in ``state`` that are worth offloading: large tensors that share no memory with
    the parameter, its gradient or each other."""
    held: set[int] = set()
    for tensor in (parameter, parameter.grad):
        if tensor is not None and _dense(tensor):
            held |= {address_of(part) for part in parts(tensor)}
    return [
        key
        for key, value in _tensors(state)
        if value.device == parameter.device and _unshared(value, held)
    ]


def moved_bytes(parameter: Tensor, state: dict[Any, Any]) -> int:
    """Return the bytes of the tensors in ``state`` that are worth offloading."""
    return sum(
        part.nbytes
        for key in movable(parameter, state)
        for part in parts(state[key])
        if _large(part)
    )


def sizes_of(parameter: Tensor, state: Any) -> tuple[int, list[int]]:
    """Return the total bytes of a state's tensors that are worth offloading, and the bytes of each of its other
    tensors.

    Memory of the parameter and of its gradient does not count.
    """
    keys = movable(parameter, state) if isinstance(state, dict) else []
    moved = [part for key in keys for part in parts(state[key])]
    left = {k: v for k, v in state.items() if k not in keys} if keys else state
    own = [parameter, *(state[key] for key in keys)]
    if parameter.grad is not None:
        own.append(parameter.grad)
    large = [part.nbytes for part in moved if _large(part)]
    small = [part.nbytes for part in moved if not _large(part)]
    return sum(large), small + _sizes_in(left, _addresses(own))


def others_bytes(optimizer: optim.Optimizer) -> list[int]:
    """Return the bytes of each tensor of a third-party optimizer that is neither a parameter nor a parameter's
    state."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return []
    own = [p for group in optimizer.param_groups for p in group["params"]]
    for key, state in optimizer.state.items():
        if isinstance(key, Tensor) and not isinstance(state, OffloadedStates):
            own += _tensors_in(state)
    held = [v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")]
    held += [v for k, v in optimizer.state.items() if not isinstance(k, Tensor)]
    return _sizes_in(held, _addresses(own))


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    found = [part for tensor in tensors for part in parts(tensor)]
    return {address_of(part) for part in found if _dense(part)}


def _sizes_in(value: Any, own: set[int]) -> list[int]:
    """Return the bytes of each storage of the tensors in ``value``, except storages at one of the addresses ``own``."""
    found: dict[int, int] = {}
    for tensor in _tensors_in(value):
        for part in parts(tensor):
            if _dense(part):
                storage = part.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return [size for address, size in found.items() if address not in own]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple | deque):
        for each in value:
            yield from _tensors_in(each)


# Number of tensors of the parameter's size that the first step makes, by the group's settings. Not for subclasses.
_MADE: dict[type[optim.Optimizer], Callable[[dict[str, Any]], int]] = {
    optim.ASGD: lambda group: 1,
    optim.Adadelta: lambda group: 2,
    optim.Adam: lambda group: 2 + bool(group["amsgrad"]),
    optim.AdamW: lambda group: 2 + bool(group["amsgrad"]),
    optim.Adamax: lambda group: 2,
    optim.NAdam: lambda group: 2,
    optim.RAdam: lambda group: 2,
    optim.RMSprop: lambda group: 1 + bool(group["centered"]) + (group["momentum"] > 0),
    optim.Rprop: lambda group: 2,
    optim.SGD: lambda group: int(group["momentum"] != 0),
}


def yet_to_be_made(
    optimizer: optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> int | None:
    """Return the bytes of the states that the first step of ``parameter`` will create and that are worth offloading.

    ``group`` is the parameter's group in ``optimizer``. The result is None if the number is unknown.
    """
    made, gradient = _MADE.get(type(optimizer)), parameter.grad
    if made is None or not _known(parameter) or gradient is None or not _dense(gradient):
        return None
    return made(group) * sum(part.nbytes for part in parts(parameter) if _large(part))


class OffloadedStates(dict[Any, Any]):
    """The optimizer state of a parameter as a mapping: its large tensors are offloaded, its small ones are in memory.

    Any access to a large tensor calls ``recall``. This restores all tensors and returns an ordinary mapping, which
    takes the place of this one in the optimizer. A copy of this mapping is an ordinary dictionary.
    """

    def __init__(
        self,
        parameter: Tensor,
        state: dict[Any, Any],
        keys: Sequence[Any],
        store: Store,
        recall: Callable[[Tensor], dict[Any, Any]],
    ) -> None:
        super().__init__({key: value for key, value in state.items() if key not in keys})
        self.parameter, self._order, self._store, self._recall = (
            parameter,
            list(state),
            store,
            recall,
        )
        self._written = False
        self._restored: dict[Any, Any] = {}
        self._places: list[_StatePlace] = []
        self._values: dict[Any, _Value] = {}
        try:
            for key in keys:
                self._values[key] = _Value(state[key], self._put)
        except SwapError:
            self.free()
            raise
        self.size = sum(place.nbytes for place in self._places)

    def __missing__(self, key: Any) -> Any:
        return self._live()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._order if self._values else self._restored)

    def __len__(self) -> int:
        return len(self._order if self._values else self._restored)

    def __contains__(self, key: Any) -> bool:
        return key in (self._order if self._values else self._restored)

    def __reversed__(self) -> Iterator[Any]:
        return reversed([*self])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._live()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._live()[key]

    def __eq__(self, other: object) -> bool:
        return self._live() == other

    def __or__(self, other: Any) -> Any:
        return self._live() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._live()

    def __ior__(self, other: Any) -> Any:
        state = self._live()
        state |= other
        return state

    def __repr__(self) -> str:
        return repr(self._live())

    def keys(self) -> Any:
        """Return all keys, without restoring offloaded tensors."""
        return dict.fromkeys(self).keys()

    def values(self) -> Any:
        return self._live().values()

    def items(self) -> Any:
        return self._live().items()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default`` if there is none. If the value is offloaded, all tensors are
        restored.
        """
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        return self._live().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        return self._live().popitem()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self._live().setdefault(key, default)

    def update(self, *others: Any, **more: Any) -> None:
        self._live().update(*others, **more)

    def clear(self) -> None:
        self._live().clear()

    def copy(self) -> dict[Any, Any]:
        """Restore all tensors, and return a dictionary of them."""
        return self._live().copy()

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        found = memo[id(self)] = {
            k: deepcopy(v, memo) for k, v in self._with(self._device_copy).items()
        }
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self._with(self._device_copy),)

    def _live(self) -> dict[Any, Any]:
        return self._recall(self.parameter) if self._values else self._restored

    @property
    def on_device(self) -> bool:
        """Whether some tensors occupy device memory: they are not written yet, under transfer, or read back."""
        return any(place.flat is not None for place in self._places)

    def is_written(self) -> bool:
        """Whether all writes have ended. If one failed, :meth:`finish_write` raises its error."""
        with suppress(SwapError):
            return all(place.pending.done() for place in self._places)
        return True

    def finish_write(self) -> bool:
        """Wait for the writes, then free the device copies; return whether all copies were freed.

        If other code references a copy, that code may change it, so the state is read back and stays on the device.
        """
        for place in self._places:
            place.pending.wait()
        self._written = True
        gone = [place.free_copy() for place in self._places]
        if not all(gone):
            self.start_read()
        return all(gone)

    def start_read(self) -> None:
        """Begin to read the tensors that are not on the device."""
        for place in self._places:
            if place.flat is None:
                place.start_read(self._store)

    def restored(self) -> dict[Any, Any]:
        """Return the state as the optimizer created it, after waiting for reads and for writes that have
        already begun."""
        for place in self._places:
            if self._written or not place.pending.cancel():
                self._wait(place)
        return self._with(lambda place: place.tensor(place.held))

    def restore(self) -> dict[Any, Any]:
        """Return the state as :meth:`restored` does, and free its slots in the store.

        From then on this mapping refers to the returned state.
        """
        self.start_read()
        # before the slots are freed, so that an interrupted call can be repeated
        self._restored = self.restored()
        self.free()
        return self._restored

    def host_copy(self) -> dict[Any, Any]:
        """Return the state with copies of its large tensors in host memory."""
        return self._with(self._host_copy)

    def free(self) -> None:
        """Free the slots in the store as soon as no transfer uses them."""
        self._values = {}
        while self._places:
            place = self._places.pop()
            if not place.pending.cancel():
                self._wait(place)
            self._store.free(place.slot)
        super().clear()

    def _put(self, tensor: Tensor) -> _StatePlace:
        self._places.append(_StatePlace(tensor, self._store))
        return self._places[-1]

    def _with(self, fill: Callable[[_StatePlace], Tensor]) -> dict[Any, Any]:
        """Return the state with all its large tensors. For each offloaded plain tensor, ``fill`` is called with its
        :class:`_StatePlace` and returns the tensor."""
        return {
            key: self._values[key].build(fill) if key in self._values else self[key]
            for key in self._order
        }

    def _host_copy(self, place: _StatePlace) -> Tensor:
        return self._copy(place, torch.device("cpu"))

    def _device_copy(self, place: _StatePlace) -> Tensor:
        return self._copy(place, place.device)

    def _copy(self, place: _StatePlace, device: torch.device) -> Tensor:
        if place.flat is not None:
            self._wait(place)
            return place.tensor(place.flat.to(device, copy=True))
        found = torch.empty(place.nbytes, dtype=torch.uint8, device=device)
        self._store.read(place.slot, found).wait()
        return place.tensor(found)

    def _wait(self, place: _StatePlace) -> None:
        """Wait for the transfer of one tensor.

        If it is a write that fails, the error is ignored as long as the device still has the bytes.
        """
        try:
            place.pending.wait()
        except SwapError:
            if self._written:
                raise


class _Value:
    """A tensor of the optimizer state, as one or several plain tensors (parts). Large parts are replaced by their
    locations.

    A plain tensor is its only part. A tensor subclass such as DTensor may have several. ``put`` offloads a large part
    and returns its location.
    """

    def __init__(self, tensor: Tensor, put: Callable[[Tensor], _StatePlace]) -> None:
        found, self._rebuild = take_apart(tensor)
        self._parts = [put(part) if _large(part) else part for part in found]

    def build(self, fill: Callable[[_StatePlace], Tensor]) -> Tensor:
        """Return the tensor. ``fill`` returns each large part from its location."""
        return self._rebuild(
            fill(part) if isinstance(part, _StatePlace) else part for part in self._parts
        )


class _StatePlace:
    """A plain tensor that is in the store or under transfer. While its bytes are on the device, ``flat`` holds them."""

    def __init__(self, tensor: Tensor, store: Store) -> None:
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self.device, self.nbytes = tensor.device, tensor.nbytes
        storage = tensor.untyped_storage()
        self.flat: Tensor | None = _flat(storage, tensor.device)
        self._watch, self._alias = (
            weakref.ref(storage),
            None if tensor.is_inference() else tensor.detach(),
        )
        self._version = 0 if self._alias is None else self._alias._version
        self.slot, self.pending = store.write(self.flat)

    @property
    def held(self) -> Tensor:
        """Return the bytes of the tensor on the device."""
        assert self.flat is not None
        return self.flat

    def free_copy(self) -> bool:
        """Free the device copy, and return whether it was freed.

        The copy is not freed if other code references it, or has changed it since the write began.
        """
        alias, self._alias = self._alias, None
        if alias is not None and alias._version != self._version:
            return False
        self.flat = alias = None
        storage = self._watch()
        if storage is not None:
            self.flat = _flat(storage, self.device)
        return storage is None

    def start_read(self, store: Store) -> None:
        flat = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self.pending = store.read(self.slot, flat)
        self.flat = flat  # assigned last: if the read fails to start, ``flat`` must not be used

    def tensor(self, flat: Tensor) -> Tensor:
        found = torch.empty(0, dtype=self._dtype, device=flat.device)
        return found.set_(flat.untyped_storage(), 0, self._size, self._stride)


def _tensors(state: dict[Any, Any]) -> Iterator[tuple[Any, Tensor]]:
    for key, value in state.items():
        if (
            isinstance(value, Tensor)
            and _whole(value)
            and any(_large(part) for part in parts(value))
        ):
            yield key, value


def _whole(tensor: Tensor) -> bool:
    """Whether ``tensor`` can be rebuilt from its bytes alone."""
    plain = type(tensor) is Tensor or wraps(tensor)
    return (
        plain
        and not tensor.requires_grad
        and all(type(p) is Tensor and _dense(p) for p in parts(tensor))
    )


def _large(part: Tensor) -> bool:
    return part.nbytes >= SMALLEST


def _known(parameter: Tensor) -> bool:
    return type(parameter) in (Tensor, Parameter, OffloadedWeight) or wraps(parameter)


def _dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _unshared(tensor: Tensor, held: set[int]) -> bool:
    addresses = [address_of(part) for part in parts(tensor)]
    new = held.isdisjoint(addresses)
    held.update(addresses)
    return new


def _flat(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

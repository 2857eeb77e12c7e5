"""What an optimizer holds as the state of a parameter while the large tensors of that state are below the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, optim
from torch.nn import Parameter

from parallax.errors import SwapError
from parallax.swap.store import Store

_SMALLEST = 4096  # bytes: what a place in a store is rounded up to


def movable(parameter: Tensor, state: dict[Any, Any]) -> list[Any]:
    """Keys of the tensors worth moving that nothing else holds."""
    held = {t.untyped_storage().data_ptr() for t in (parameter, parameter.grad) if t is not None and _dense(t)}
    return [key for key, value in _tensors(state) if value.device == parameter.device and _alone(value, held)]


# Tensors like the parameter that its first step makes, by the settings of its group. A subclass may make others.
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


def yet_to_be_made(optimizer: optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> int | None:
    """Bytes worth moving among the states that the first step of ``parameter`` will make; None: nobody can say."""
    made, gradient = _MADE.get(type(optimizer)), parameter.grad
    if made is None or type(parameter) not in (Tensor, Parameter) or gradient is None or not _dense(gradient):
        return None
    return made(group) * parameter.nbytes if parameter.nbytes >= _SMALLEST else 0


class Below(dict[Any, Any]):
    """What the optimizer holds as the state of a parameter whose large tensors are below: the small ones, and a clear
    word for whoever reaches for the others."""

    def __init__(self, parameter: Tensor, state: dict[Any, Any], keys: Sequence[Any], store: Store) -> None:
        super().__init__({key: value for key, value in state.items() if key not in keys})
        self.parameter, self._order = parameter, list(state)
        self._written = False
        self._places: dict[Any, _Place] = {}
        try:
            for key in keys:
                self._places[key] = _Place(state[key], store)
        except SwapError:
            self.free(store)
            raise
        self.size = sum(place.nbytes for place in self._places.values())

    def __missing__(self, key: Any) -> Any:
        if key not in self._places:
            raise KeyError(key)
        raise SwapError(f"optimizer state {key!r} is below the device between steps: read it from state_dict()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SwapError("optimizer states are below the device between steps: copy state_dict() instead")

    @property
    def on_device(self) -> bool:
        """Whether the device's memory holds them: still, already, or for a transfer under way."""
        return any(place.flat is not None for place in self._places.values())

    def landed(self) -> bool:
        """Whether no write is under way; :meth:`land` tells of one that failed."""
        with suppress(SwapError):
            return all(place.pending.done() for place in self._places.values())
        return True

    def land(self) -> None:
        """Wait until all is written, then let go of the device's copy."""
        for place in self._places.values():
            place.pending.wait()
        for place in self._places.values():
            place.flat = None
        self._written = True

    def call(self, store: Store) -> None:
        """Begin to read."""
        for place in self._places.values():
            place.call(store)

    def full(self) -> dict[Any, Any]:
        """The state as the optimizer made it; waits for reads, and for writes that began."""
        found = {}
        for key, place in self._places.items():
            if self._written or not place.pending.cancel():
                self._wait(place)
            assert place.flat is not None
            found[key] = place.tensor(place.flat)
        return {key: found[key] if key in found else self[key] for key in self._order}

    def on_host(self, store: Store) -> dict[Any, Any]:
        """The state, its large tensors as copies on the host."""
        found = {}
        for key, place in self._places.items():
            if place.flat is not None:
                self._wait(place)
                found[key] = place.tensor(place.flat.cpu().clone())
            else:
                host = torch.empty(place.nbytes, dtype=torch.uint8)
                store.read(place.slot, host).wait()
                found[key] = place.tensor(host)
        return {key: found[key] if key in found else self[key] for key in self._order}

    def free(self, store: Store) -> None:
        """Give the places back, when nothing runs on them."""
        for place in self._places.values():
            if not place.pending.cancel():
                self._wait(place)
            store.free(place.slot)

    def _wait(self, place: _Place) -> None:
        """A write that failed is no loss while the device has the bytes."""
        try:
            place.pending.wait()
        except SwapError:
            if self._written:
                raise


class _Place:
    """A state tensor in the store, or on its way there or back (``flat`` holds its bytes on the device then)."""

    def __init__(self, tensor: Tensor, store: Store) -> None:
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._device, self.nbytes = tensor.device, tensor.nbytes
        self.flat: Tensor | None = _flat(tensor.untyped_storage(), tensor.device)
        self.slot, self.pending = store.write(self.flat)

    def call(self, store: Store, device: torch.device | None = None) -> None:
        self.flat = torch.empty(self.nbytes, dtype=torch.uint8, device=device or self._device)
        self.pending = store.read(self.slot, self.flat)

    def tensor(self, flat: Tensor) -> Tensor:
        found = torch.empty(0, dtype=self._dtype, device=flat.device)
        return found.set_(flat.untyped_storage(), 0, self._size, self._stride)


def _tensors(state: dict[Any, Any]) -> Iterator[tuple[Any, Tensor]]:
    for key, value in state.items():
        if type(value) is Tensor and _dense(value) and value.nbytes >= _SMALLEST and not value.requires_grad:
            yield key, value


def _dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _alone(tensor: Tensor, held: set[int]) -> bool:
    address = tensor.untyped_storage().data_ptr()
    new = address not in held
    held.add(address)
    return new


def _flat(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

"""Which parameters of a chain of blocks can stream, and in which block."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn

from parallax.swap.parameters.flat import FlatParameter

_Make = Callable[[list[nn.Parameter]], FlatParameter]


def lay_out(blocks: Iterable[Iterable[nn.Parameter]], make: _Make) -> list[FlatParameter]:
    """One :class:`FlatParameter` for each block, made before the next block is asked for.

    A parameter that several blocks have, or whose memory others look at, stays on the device; so does one that is not
    plain, contiguous memory. That one is shared shows when the second block comes: it is brought back.
    """
    laid = _Layout(make)
    for parameters in blocks:
        laid.add(list(dict.fromkeys(parameters)))
    return laid.flats


class _Layout:
    """The blocks so far. ``_homes``: by identity, the storage that a parameter had before it streamed, for as long as
    anybody else holds it."""

    def __init__(self, make: _Make) -> None:
        self.flats: list[FlatParameter] = []
        self._make = make
        self._of: dict[nn.Parameter, FlatParameter] = {}
        self._kept: set[nn.Parameter] = set()
        self._homes: dict[int, tuple[weakref.ref[torch.UntypedStorage], nn.Parameter]] = {}

    def add(self, parameters: list[nn.Parameter]) -> None:
        storages = [parameter.untyped_storage() for parameter in parameters]
        going = []
        for parameter, storage in zip(parameters, storages):
            home, twin = self._homes.get(id(storage), (None, parameter))
            if parameter in self._of:
                self._keep(parameter, None)
            elif home is not None and home() is storage:
                self._keep(twin, storage)
            elif (
                _is_plain(parameter)
                and storages.count(storage) == 1
                and parameter not in self._kept
            ):
                going.append(parameter)
        self._homes |= {
            id(p.untyped_storage()): (weakref.ref(p.untyped_storage()), p) for p in going
        }
        flat = self._make(going)
        self.flats.append(flat)
        self._of |= dict.fromkeys(going, flat)

    def _keep(self, parameter: nn.Parameter, storage: torch.UntypedStorage | None) -> None:
        """Bring a parameter back to stay, into ``storage`` where others look at it there."""
        flat = self._of.pop(parameter, None)
        if flat is None:
            return
        self._kept.add(parameter)
        flat.restore()
        if storage is not None:
            home = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            parameter.data = home.set_(storage, 0, parameter.shape, parameter.stride())
        rest = [other for other in flat.parameters if other is not parameter]
        again = self.flats[self.flats.index(flat)] = self._make(rest)
        self._of |= dict.fromkeys(rest, again)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether it is contiguous memory, all of it its own."""
    plain = (
        type(parameter) is nn.Parameter
        and parameter.layout is torch.strided
        and parameter.is_contiguous()
    )
    return plain and 0 < parameter.nbytes == parameter.untyped_storage().nbytes()

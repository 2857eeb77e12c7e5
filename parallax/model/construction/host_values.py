"""Intercept functions that read a tensor's values or device while a constructor is recorded on meta tensors.

A recorded tensor reports that it is on the CPU and has a unique address. numpy, lists and printing get the tensor's
values. Writes through numpy cannot be logged, so they raise an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parallax.model.construction.log import Unrecordable, fingerprint, like
from parallax.model.construction.recorder import OperatorRecorder
from parallax.model.construction.replay import change, plain_execution
from parallax.model.private import parse_to, without_function_modes

CPU = torch.device("cpu")
_VALUES = (
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.__dlpack_device__,
    Tensor.__format__,
    Tensor.__repr__,
    Tensor.numpy,
    Tensor.tolist,
)
_MADE_OF_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_NOWHERE = (Tensor.cpu, Tensor.cuda, Tensor.pin_memory, Tensor.share_memory_)
"""Functions that move a tensor between devices.

They return a recorded tensor unchanged, because it counts as on the CPU.
"""


class HostValueInterceptor(TorchFunctionMode):
    """Makes recorded tensors look like CPU tensors.

    Functions that read the values or the device of a recorded tensor return what they would return for a CPU tensor.
    ``recorder``: the recorder of these tensors.
    """

    def __init__(self, recorder: OperatorRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._shown: list[tuple[Tensor, bytes]] = []
        self._special: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: _device,
            Tensor.is_cpu.__get__: lambda t: True,  # type: ignore[attr-defined]
            Tensor.is_meta.__get__: lambda t: False,  # type: ignore[attr-defined]
            Tensor.data_ptr: self._address,
            Tensor.to: self._to,
            Tensor.__getitem__: lambda t, index: t[self._places(index)],
            Tensor.__setitem__: self._set,
            **dict.fromkeys(_NOWHERE, lambda t, *_, **__: t),
        }
        for function in _VALUES:
            self._special[function] = self._shower(function)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return the result of a torch function.

        Functions that read values, and functions that create tensors from values, are handled here. All other functions
        run, and ``recorder`` intercepts their operators.
        """
        kwargs = kwargs or {}
        if function in _MADE_OF_VALUES:
            args = tuple(self._numbers(part) for part in args)
        elif isinstance(data := kwargs.get("data"), list | tuple):
            kwargs = {**kwargs, "data": self._numbers(data)}
        if function == _SET_DATA:
            args = self._of_one_kind(*args)
        special = self._special.get(function)
        if special is not None and isinstance(args[0], Tensor) and self._is_recorded(args[0]):
            return special(*args, **kwargs)
        if (device := kwargs.get("device")) is None or torch.device(device).type != "meta":
            return function(*args, **kwargs)
        return self._on_meta(function, *args, **kwargs)

    def _on_meta(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call for which the constructor itself requests the meta device.

        The result has no values. Without recording it would have none either.
        """
        before, self._recorder.to_meta = self._recorder.to_meta, True
        try:
            return function(*args, **kwargs)
        finally:
            self._recorder.to_meta = before

    def check(self) -> None:
        """Raise :class:`Unrecordable` if the constructor has written into memory that it got from ``numpy()`` of a
        tensor.
        """
        for tensor, digest in self._shown:
            if fingerprint(tensor.untyped_storage()) != digest:
                raise Unrecordable("it writes into what numpy() of a tensor returned")

    def _numbers(self, value: Any) -> Any:
        """Return nested lists or tuples with real tensors in place of recorded ones; any other value unchanged.

        torch builds a tensor from lists without calling operators, so recorded tensors inside lists cannot be
        intercepted.
        """

        def number(part: Any) -> Any:
            return self._recorder.real(part) if isinstance(part, Tensor) else part

        return change(value, number) if isinstance(value, list | tuple) else value

    def _is_recorded(self, tensor: Tensor) -> bool:
        with without_function_modes():
            return tensor.is_meta and self._recorder.log.cell_of(tensor) is not None

    def _shower(self, function: Any) -> Callable[..., Any]:
        def show(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            value = self._recorder.real(tensor)
            if function in (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__):
                self._shown.append((value, fingerprint(value.untyped_storage())))
            with plain_execution():
                return function(value, *args, **kwargs)

        return show

    def _address(self, tensor: Tensor) -> int:
        view = self._recorder.log.view_of(tensor)
        return ((view.cell.number + 1) << 40) + view.offset * view.dtype.itemsize

    def _of_one_kind(self, tensor: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``tensor`` and ``value`` for the assignment ``tensor.data = value``.

        If only one of the two is on the meta device, the other is converted to a meta tensor.
        """
        with plain_execution():
            if tensor.is_meta and not value.is_meta:
                return tensor, self._recorder.log.adopt(value)
            if value.is_meta and not tensor.is_meta:
                bare = like(tensor, self._recorder.log.adopt(tensor))
                torch.utils.swap_tensors(tensor, bare)
            return tensor, value

    def _set(self, tensor: Tensor, index: Any, value: Any) -> None:
        """Assign ``value`` to ``tensor`` at ``index``.

        A number is first converted to a CPU tensor, because torch would convert it to a meta tensor, which has no
        value.
        """
        if not isinstance(value, Tensor):
            with plain_execution():
                value = torch.as_tensor(value, dtype=tensor.dtype)
        tensor[self._places(index)] = value

    def _places(self, index: Any) -> Any:
        """Return ``index`` with a CPU tensor in place of each list, range or numpy array.

        torch would convert these to meta tensors, which have no values.
        """
        if type(index) is tuple:
            return tuple([self._places(part) for part in index])
        if not isinstance(index, list | range | np.ndarray):
            return index
        index = self._numbers(list(index))
        with plain_execution():
            return torch.as_tensor(index, dtype=None if index else torch.int64)

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return ``tensor`` in the dtype and memory format with which ``Tensor.to`` was called.

        The requested device is ignored unless it is meta, because recorded tensors count as on the CPU.
        """
        copy = bool(kwargs.pop("copy", False))
        if args and isinstance(args[0], Tensor):
            args = (args[0].dtype, *args[1:])
        elif isinstance(kwargs.get("other"), Tensor):
            kwargs["dtype"] = kwargs.pop("other").dtype
        device, dtype, _, memory_format = parse_to(*args, **kwargs)
        if device is not None and device.type == "meta":
            return self._on_meta(Tensor.to, tensor, *args, copy=copy, **kwargs)
        return tensor.to(
            dtype=dtype or tensor.dtype,
            copy=copy,
            memory_format=memory_format or torch.preserve_format,
        )


def _device(_: Tensor) -> torch.device:
    """Return the CPU as the device of a recorded tensor.

    Raises :class:`Unrecordable` while the tensor is being pickled, because it has no bytes that pickle could write.
    """
    if sys._getframe(2).f_code.co_name == "_reduce_ex_internal":
        raise Unrecordable("it pickles a tensor")
    return CPU

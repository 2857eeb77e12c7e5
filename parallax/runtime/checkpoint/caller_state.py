"""The caller's state in a checkpoint, for example the position in the data, a row order, or states of random
generators.

JSON would silently turn tuples into lists and numeric keys into text, and it cannot hold tensors. So such values are
written as objects with a kind::

    (3, 4)                ->  {"__kind__": "tuple", "items": [3, 4]}
    generator.get_state() ->  {"__kind__": "tensor", "dtype": "uint8", "shape": [5056], "base64": "…"}

The restored state is equal to the saved one. Saving refuses a value that could not be restored.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallax.common.units import format_bytes
from parallax.errors import CheckpointError, printable

MOST_BYTES = 64 * 2**20  # of a state as text; a quarter of the limit of an index
MOST_VALUES = 2**21  # in lists and dictionaries; half of the limit of an index
_LARGEST = 2**960  # larger integers are not read
_KIND = "__kind__"
_NUMBERS = "biufc"  # NumPy's kinds of numeric types
_ACCEPTED = (
    "numbers, text, None, lists, tuples, sets, dictionaries, bytes, tensors and NumPy's arrays"
)


def state_text(state: Any) -> str:
    """Return ``state`` as JSON, from which :func:`thaw` restores an equal state. Raises :class:`CheckpointError` for
    values that cannot be saved."""
    try:
        text = json.dumps(_plain(state, ""))
    except RecursionError:
        raise CheckpointError(
            "the state for checkpoints (state_dict()) is nested too deep, or contains itself"
        ) from None
    if len(text) > MOST_BYTES:
        raise CheckpointError(
            f"the state for checkpoints (state_dict()) has {format_bytes(len(text))}, and the limit is "
            f"{format_bytes(MOST_BYTES)}: save the inputs to rebuild it from, such as a seed"
        )
    values = text.count(",") + text.count("[") + text.count("{")
    if values > MOST_VALUES:
        raise CheckpointError(
            f"the state for checkpoints (state_dict()) has {values:,} values, and the limit is {MOST_VALUES:,}: give "
            "many numbers as one tensor or array, or save the inputs to rebuild them from"
        )
    return text


def thaw(found: Any) -> Any:
    """Return the state that was passed to :func:`state_text`. ``found``: the parsed JSON. Raises ValueError for any
    other data."""
    try:
        return _restored(found)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except RuntimeError as error:  # torch raises it for bytes that do not fit dtype and shape
        raise ValueError(str(error)) from None


def _plain(value: Any, place: str) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _array(value, place)
    if isinstance(value, int):
        return (
            int(value)
            if abs(value) < _LARGEST
            else _refuse(place, "an integer of more than 288 digits")
        )
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return value if _is_short(value) else _items(value, place)
    if isinstance(value, tuple | set | frozenset):
        kind = next(k for k in (tuple, set, frozenset) if isinstance(value, k)).__name__
        return {_KIND: kind, "items": _items(value, place)}
    if isinstance(value, Mapping):
        return _mapping(value, place)
    if isinstance(value, bytes | bytearray):
        return {_KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return _tensor(value, place)
    return _refuse(place, f"a {type(value).__name__}")


def _is_short(numbers: list[Any]) -> bool:
    """Whether ``numbers`` holds only 64-bit integers, as a list with the order of rows does.

    Such a list is written as it is, without a check of each number.
    """
    return (
        all(type(number) is int for number in numbers)
        and max(numbers, default=0) < 2**63
        and min(numbers, default=0) >= -(2**63)
    )


def _items(values: Any, place: str) -> list[Any]:
    return [_plain(each, f"{place}[{index}]") for index, each in enumerate(values)]


def _mapping(value: Mapping[Any, Any], place: str) -> dict[str, Any]:
    if all(type(key) is str for key in value) and _KIND not in value:
        return {key: _plain(each, f"{place}[{key!r}]") for key, each in value.items()}
    items = [[_plain(k, place), _plain(v, f"{place}[{k!r}]")] for k, v in value.items()]
    return {_KIND: "dict", "items": items}


def _tensor(value: Tensor, place: str) -> dict[str, Any]:
    if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested:
        return _refuse(place, f"a tensor of another kind than dense ones ({value.layout})")
    dense = value.detach().cpu().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    dtype = str(value.dtype).removeprefix("torch.")
    return _numbers("tensor", dtype, value.shape, data)


def _array(value: np.ndarray[Any, Any] | np.generic, place: str) -> dict[str, Any]:
    if value.dtype.kind not in _NUMBERS:
        return _refuse(place, f"an array of {value.dtype}")
    kind = "array" if isinstance(value, np.ndarray) else "scalar"
    return _numbers(kind, value.dtype.str, value.shape, value.tobytes())


def _numbers(kind: str, dtype: str, shape: tuple[int, ...], data: bytes) -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    return {_KIND: kind, "dtype": dtype, "shape": list(shape), "base64": text}


def _refuse(place: str, what: str) -> Any:
    raise CheckpointError(
        f"the state for checkpoints (state_dict()) holds {printable(what)} at "
        f"{printable(place) or 'its top'}: accepted are {_ACCEPTED}"
    )


# ---- restoring


def _restored(found: Any) -> Any:
    if isinstance(found, list):
        return found if _is_short(found) else [_restored(each) for each in found]
    if not isinstance(found, dict):
        return found
    if _KIND not in found:
        return {key: _restored(each) for key, each in found.items()}
    make = _KINDS.get(found[_KIND])
    if make is None:
        raise ValueError(f"it holds an unknown kind of value: {printable(str(found[_KIND]))}")
    return make(found)


def _restored_tensor(found: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, str(found["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it holds a tensor of {printable(str(found['dtype']))}")
    data = bytearray(base64.b64decode(found["base64"], validate=True))
    shape = [int(size) for size in found["shape"]]
    return (
        torch.frombuffer(data, dtype=dtype).reshape(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )


def _restored_array(found: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(str(found["dtype"]))
    if dtype.kind not in _NUMBERS:
        raise ValueError(f"it holds an array of {dtype}")
    data = bytearray(base64.b64decode(found["base64"], validate=True))
    return np.frombuffer(data, dtype=dtype).reshape([int(size) for size in found["shape"]])


_KINDS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "tuple": lambda found: tuple(map(_restored, found["items"])),
    "set": lambda found: set(map(_restored, found["items"])),
    "frozenset": lambda found: frozenset(map(_restored, found["items"])),
    "dict": lambda found: {_restored(key): _restored(each) for key, each in found["items"]},
    "bytes": lambda found: base64.b64decode(found["base64"], validate=True),
    "tensor": _restored_tensor,
    "array": _restored_array,
    "scalar": lambda found: _restored_array(found)[()],
}

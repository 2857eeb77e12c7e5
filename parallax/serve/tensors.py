"""Read inference requests and write responses, as JSON or with the protocol's extension for binary tensor data.

A request's tensors are checked against the model's description here, so an invalid request never shares a batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallax.errors import nearest, printable
from parallax.serve.model import BatchOutputs, ServedModel, TensorSpec

BINARY = "binary_data_size"
_LONGEST = 64  # characters of a client's text that a message repeats
_LARGEST = 2**40  # above any size that fits a body
_PIECE = 2**12  # numbers that are written as JSON in one call, which takes some milliseconds


class RequestError(Exception):
    """Raised if a request is refused. ``status``: the HTTP status. ``retry_seconds``: when to try again; 0: no hint."""

    def __init__(self, status: int, reason: str, retry_seconds: int = 0) -> None:
        super().__init__(reason)
        self.status, self.retry_seconds = status, retry_seconds


@dataclass(frozen=True)
class InferRequest:
    """A checked request.

    ``tensors``: the inputs in the model's order. ``outputs``: for each requested output its index, and whether its data
    are returned as binary data instead of JSON. ``id``: the client's own name of the request.
    """

    tensors: list[Tensor]
    outputs: list[tuple[int, bool]]
    id: str | None

    @property
    def rows(self) -> int:
        return len(self.tensors[0])


def shown(value: Any) -> str:
    """Return a value from a client as printable text of at most 64 characters, for messages."""
    text = printable(str(value)[: _LONGEST + 1])
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def bad(reason: str) -> RequestError:
    """Return the error for an invalid request, with status 400."""
    return RequestError(400, reason)


def read_request(
    body: bytes, header_bytes: str | None, model: ServedModel, max_rows: int
) -> InferRequest:
    """Return the request in ``body``.

    ``header_bytes``: the value of the header Inference-Header-Content-Length, which is the size of the body's JSON part
    in bytes; None if the whole body is JSON. ``max_rows``: the largest accepted number of rows. Raises
    :class:`RequestError` with status 400 for an invalid request.
    """
    length = len(body) if header_bytes is None else _length(header_bytes, len(body))
    keys = ("id", "parameters", "inputs", "outputs", "model_name", "model_version")
    tree = _object("the request", _parse(body[:length]), keys)
    # KServe's client repeats the address here, or sends null.
    if (name := tree.get("model_name")) not in (None, model.name):
        raise bad(f"model_name: {shown(name)}: accepted is {model.name}")
    request_id = tree.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise bad("id: accepted is text")
    flags = _parameters("the request", tree, "binary_data_output")
    tensors = _inputs(tree.get("inputs"), memoryview(body)[length:], model)
    rows = {len(tensor) for tensor in tensors}
    if len(rows) > 1:
        raise bad(f"the inputs have {', '.join(map(str, sorted(rows)))} rows; all need the same")
    if not 0 < len(tensors[0]) <= max_rows:
        raise bad(f"the inputs have {len(tensors[0])} rows; accepted are 1 to {max_rows}")
    outputs = _outputs(tree.get("outputs"), model, binary=_flag(flags, "binary_data_output", False))
    return InferRequest(tensors, outputs, request_id)


def _length(text: str, whole: int) -> int:
    # More digits than those of any body would take long to convert.
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= whole):
        raise bad(
            f"Inference-Header-Content-Length: {shown(text)}: accepted are the bytes of the JSON part of the body, "
            f"which has {whole} bytes"
        )
    return int(text)


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError:
        raise bad("the JSON part is nested too deeply") from None
    except ValueError as error:  # of UTF-8, of JSON, or of a number with too many digits
        reason = shown(str(error).splitlines()[0])
        raise bad(f"the JSON part cannot be read: {reason}") from None


def _object(what: str, value: Any, keys: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(f"{what}: accepted is a JSON object with {', '.join(keys)}")
    for key in value:
        if key not in keys:
            raise bad(f"{what} has the key {shown(key)}; accepted are {', '.join(keys)}")
    return value


def _parameters(what: str, tree: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return _object(f"parameters of {what}", tree.get("parameters", {}), keys)


def _flag(parameters: Mapping[str, Any], key: str, default: bool) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise bad(f"parameters.{key}: accepted are true and false")
    return value


# ---- inputs


def _inputs(given: Any, binary: memoryview, model: ServedModel) -> list[Tensor]:
    specs = {spec.name: spec for spec in model.inputs}
    if not isinstance(given, list):
        raise bad(f"inputs: accepted is a list of {', '.join(specs)}")
    found: dict[str, Tensor] = {}
    for entry in given:
        _object("an input", entry, ("name", "shape", "datatype", "parameters", "data"))
        name = entry.get("name")
        if not isinstance(name, str) or name not in specs:
            hint = nearest(name[:_LONGEST], specs) if isinstance(name, str) else ""
            raise bad(f"the model has no input {shown(name)}; it takes {', '.join(specs)}{hint}")
        if name in found:
            raise bad(f"the input {name} is given twice")
        shape = _checked_shape(entry, specs[name])
        size = _parameters(f"the input {name}", entry, BINARY).get(BINARY)
        if size is None:
            found[name] = _from_json(entry, specs[name], shape)
        else:
            found[name] = _from_bytes(entry, size, binary, specs[name], shape)
            binary = binary[size:]
    if missing := [name for name in specs if name not in found]:
        raise bad(f"inputs lack {', '.join(missing)}")
    if len(binary):
        raise bad(f"{len(binary)} bytes follow the data of the last input")
    return [found[name] for name in specs]


def _checked_shape(entry: Mapping[str, Any], spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape in ``entry``, the JSON object of an input in a request.

    Raises :class:`RequestError` if the input's shape or datatype does not match ``spec``.
    """
    name, datatype, shape = spec.name, entry.get("datatype"), entry.get("shape")
    if datatype != spec.datatype:
        raise bad(
            f"the input {name} has the datatype {shown(datatype)}; accepted is {spec.datatype}"
        )
    sizes = isinstance(shape, list) and all(
        type(size) is int and 0 <= size < _LARGEST for size in shape
    )
    if not sizes or not spec.accepts(shape):  # type: ignore[arg-type]
        raise bad(
            f"the input {name} has the shape {shown(shape)}; accepted is {list(spec.shape)}, -1 being any size"
        )
    return tuple(shape)  # type: ignore[arg-type]


def _from_bytes(
    entry: Mapping[str, Any],
    size: Any,
    binary: memoryview,
    spec: TensorSpec,
    shape: tuple[int, ...],
) -> Tensor:
    wanted = math.prod(shape) * spec.dtype.itemsize
    if "data" in entry:
        raise bad(f"the input {spec.name} has data and {BINARY}; accepted is one of them")
    if type(size) is not int or size != wanted:
        raise bad(
            f"the input {spec.name} has {BINARY}={shown(size)}, and {list(shape)} of {spec.datatype} takes {wanted}"
        )
    if size > len(binary):
        raise bad(
            f"the input {spec.name} needs {size} bytes after the JSON part, and {len(binary)} are left: send "
            "Inference-Header-Content-Length with the bytes of the JSON part, and all data after it"
        )
    if not size:
        return torch.empty(shape, dtype=spec.dtype)
    values = np.frombuffer(binary[:size], dtype=np.uint8)
    if spec.dtype is torch.bool and values.max() > 1:
        raise bad(f"the input {spec.name}: bytes of BOOL are 0 and 1")
    return torch.from_numpy(values.copy()).view(spec.dtype).view(shape)


def _from_json(entry: Mapping[str, Any], spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
    data, name = entry.get("data"), spec.name
    if spec.dtype is torch.bfloat16:
        raise bad(f"the input {name}: BF16 has no JSON form; send it as binary data")
    if not isinstance(data, list):
        raise bad(f"the input {name} has no data: accepted is a list, flat or nested as its shape")
    wanted = math.prod(shape)
    values = _flat(data, shape, name)
    if len(values) != wanted:
        raise bad(f"the input {name} has {len(values)} values, and {list(shape)} takes {wanted}")
    floats = spec.dtype.is_floating_point
    kinds = {bool} if spec.dtype is torch.bool else {int, float} if floats else {int}
    if wrong := set(map(type, values)) - kinds:
        names = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise bad(f"the input {name} of {spec.datatype} has values of the type {names}")
    if not floats and spec.dtype is not torch.bool and values:
        limits = torch.iinfo(spec.dtype)
        low, high = min(values), max(values)
        if low < limits.min or high > limits.max:
            raise bad(f"the input {name} has values outside of {limits.min} to {limits.max}")
    try:
        # Through float64, as numbers of JSON are read everywhere; then the nearest number of the type.
        through = torch.float64 if floats else spec.dtype
        read = torch.tensor(values, dtype=through)
    except (OverflowError, RuntimeError, ValueError):
        raise bad(f"the input {name} has values that {spec.datatype} cannot hold") from None
    found = read.to(spec.dtype)
    if floats and bool((found.isinf() & ~read.isinf()).any()):
        raise bad(f"the input {name} has values that {spec.datatype} cannot hold")
    return found.view(shape)


def _flat(data: list[Any], shape: tuple[int, ...], name: str) -> list[Any]:
    """Return the values in ``data``, which is a flat list or a list nested like ``shape``, as a flat list.

    Raises :class:`RequestError` if ``data`` is nested in another way. ``name``: the input's name, for the message.
    """
    values = data
    for size in shape[1:]:
        if not values or not isinstance(values[0], list):
            break
        if not all(isinstance(part, list) and len(part) == size for part in values):
            raise bad(f"the input {name}: its lists are not nested as the shape {list(shape)}")
        values = [value for part in values for value in part]
    return values


# ---- outputs


def _outputs(given: Any, model: ServedModel, *, binary: bool) -> list[tuple[int, bool]]:
    if given is None or given == []:
        return [(index, binary) for index in range(len(model.outputs))]
    names = [spec.name for spec in model.outputs]
    if not isinstance(given, list):
        raise bad(f"outputs: accepted is a list of {', '.join(names)}")
    found: list[tuple[int, bool]] = []
    for entry in given:
        name = _object("an output", entry, ("name", "parameters")).get("name")
        if not isinstance(name, str) or name not in names:
            hint = nearest(name[:_LONGEST], names) if isinstance(name, str) else ""
            raise bad(f"the model has no output {shown(name)}; it has {', '.join(names)}{hint}")
        if names.index(name) in dict(found):
            raise bad(f"the output {name} is requested twice")
        flags = _parameters(f"the output {name}", entry, "binary_data")
        found.append((names.index(name), _flag(flags, "binary_data", binary)))
    for index, is_binary in found:
        if model.outputs[index].dtype is torch.bfloat16 and not is_binary:
            raise bad(f"the output {names[index]}: BF16 has no JSON form; request binary_data")
    return found


def write_response(
    request: InferRequest, model: ServedModel, outputs: BatchOutputs
) -> tuple[bytes, int | None]:
    """Return the body of the response, and the size of its JSON part in bytes, or None if the whole body is JSON.

    ``outputs`` has all outputs of the model; the body contains those that ``request`` asks for.
    """
    entries, parts = list[str](), list[bytes]()
    for index, binary in request.outputs:
        spec, tensor = model.outputs[index], outputs.tensors[index].contiguous()
        entry: dict[str, Any] = {
            "name": spec.name,
            "datatype": spec.datatype,
            "shape": list(tensor.shape),
        }
        if binary or spec.dtype is torch.bfloat16:
            parts.append(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
            entry["parameters"] = {BINARY: len(parts[-1])}
            entries.append(json.dumps(entry))
        else:
            entries.append(f'{json.dumps(entry)[:-1]}, "data": [{_numbers(tensor)}]}}')
    tree: dict[str, Any] = {"model_name": model.name, "model_version": outputs.version}
    if request.id is not None:
        tree["id"] = request.id
    header = f'{json.dumps(tree)[:-1]}, "outputs": [{", ".join(entries)}]}}'.encode()
    return b"".join([header, *parts]), len(header) if parts else None


def json_numbers(request: InferRequest, outputs: BatchOutputs) -> int:
    """Return how many numbers of ``outputs`` the response contains as JSON."""
    return sum(outputs.tensors[index].numel() for index, binary in request.outputs if not binary)


def _numbers(tensor: Tensor) -> str:
    """Return the elements as comma-separated JSON numbers.

    They are converted in pieces, so that other threads can run in between.
    """
    pieces = tensor.reshape(-1).split(_PIECE)
    return ", ".join(json.dumps(piece.tolist())[1:-1] for piece in pieces)


def metadata(model: ServedModel) -> dict[str, Any]:
    """Return the description of ``model`` that the protocol defines, as plain data."""

    def listed(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [{"name": s.name, "datatype": s.datatype, "shape": list(s.shape)} for s in specs]

    return {
        "name": model.name,
        "versions": [model.version],
        "platform": "parallax",
        "inputs": listed(model.inputs),
        "outputs": listed(model.outputs),
    }

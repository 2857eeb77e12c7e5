"""Decoders for the fields of samples: each converts the encoded bytes of several samples to one tensor."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallax.common.documents import plain_json
from parallax.errors import ConfigError, DataError, printable
from parallax.train.data.decoding import SUFFIXES, ImageDecoder
from parallax.train.data.order import Seeds
from parallax.train.data.stored import Encoded
from parallax.train.data.table import timed

Where = Callable[[int], str]

_JSON = "json:"
_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")  # as WebDataset decodes them
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class SampleField(Protocol):
    """Decodes one field of several samples."""

    def __call__(self, encoded: Sequence[Encoded], seeds: Seeds, where: Where) -> Any:
        """Return the decoded values of ``encoded`` as one tensor, with one row for each value. ``seeds``: a seed for
        the random numbers of each value. ``where(i)`` returns the place of value i, for error messages."""

    def plain(self) -> SampleField:
        """Return the decoder of this field for evaluation, which does no random augmentation."""


class ImageField:
    """Decodes images."""

    def __init__(self, decoder: ImageDecoder) -> None:
        self._decoder = decoder

    def __call__(self, encoded: Sequence[Encoded], seeds: Seeds, where: Where) -> Any:
        return self._decoder.batch(encoded, seeds, where)

    def plain(self) -> SampleField:
        return ImageField(self._decoder.plain())


class ValueField:
    """Decodes values with ``decode``, which converts the bytes of one value to an array."""

    def __init__(self, decode: Callable[[bytes], NDArray[Any]]) -> None:
        self._decode = decode

    def __call__(self, encoded: Sequence[Encoded], seeds: Seeds, where: Where) -> Tensor:  # noqa: ARG002
        with timed("decode"):
            found = [self._decoded(bytes(data), place, where) for place, data in enumerate(encoded)]
        with timed("collate"):
            for place, value in enumerate(found):
                if (value.shape, value.dtype) != (found[0].shape, found[0].dtype):
                    raise DataError(
                        f"{where(place)} has shape {value.shape} and type {value.dtype}, and {where(0)} has "
                        f"{found[0].shape} and {found[0].dtype}: make them equal"
                    )
            return torch.from_numpy(np.stack(found))

    def plain(self) -> SampleField:
        return self

    def _decoded(self, data: bytes, place: int, where: Where) -> NDArray[Any]:
        try:
            found = self._decode(data)
            torch.from_numpy(found[:0] if found.ndim else found)
        except (ValueError, TypeError, OverflowError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise DataError(f"{where(place)}: {printable(reason)}") from error
        return found


@dataclass(frozen=True)
class Choice:
    """The setting of one field, which may have several alternative names. Each sample has a field with one of these
    ``names``. ``kind``: image, array, number or json. ``key``: for json, the key of the value in the JSON object."""

    names: tuple[str, ...]
    kind: str
    key: str = ""  # within JSON

    @classmethod
    def of(cls, key: str, given: Sequence[str]) -> Choice:
        """Return the choice whose fields are ``given``, the value of the setting ``key``. Raises :class:`ConfigError`
        if the fields are not all of one kind."""
        found = [cls._of_one(key, each.strip()) for each in given]
        if not found or len({(each.kind, each.key) for each in found}) > 1:
            raise ConfigError(
                f"{key}={printable(','.join(given))}: accepted are fields of one kind: images, npy, cls or json:KEY"
            )
        return cls(
            tuple(name for each in found for name in each.names), found[0].kind, found[0].key
        )

    @classmethod
    def _of_one(cls, key: str, name: str) -> Choice:
        if name.startswith(_JSON) and len(name) > len(_JSON):
            return cls(("json",), "json", name.removeprefix(_JSON))
        name = name.lower().lstrip(".")
        last = name.rpartition(".")[2]
        kinds = (
            {"npy": "array"} | dict.fromkeys(SUFFIXES, "image") | dict.fromkeys(_NUMBERS, "number")
        )
        if last not in kinds:
            raise ConfigError(
                f"{key}={printable(name)}: accepted are {', '.join((*SUFFIXES, 'npy', *_NUMBERS))} and json:KEY, also "
                "after another part, such as left.png"
            )
        return cls((name,), kinds[last])

    def field(self, decoder: ImageDecoder | None) -> SampleField:
        """Return the decoder of the field. ``decoder`` decodes images."""
        if self.kind == "image":
            assert decoder is not None
            return ImageField(decoder)
        decoders: dict[str, Callable[[bytes], NDArray[Any]]] = {
            "array": of_npy,
            "number": number,
            "json": partial(of_json, key=self.key),
        }
        return ValueField(decoders[self.kind])


def number(data: bytes) -> NDArray[Any]:
    """Return the integer that ``data`` holds as text."""
    if not re.fullmatch(rb"\s*[+-]?[0-9]{1,18}\s*", data):
        raise ValueError(f"{data[:40]!r} is no whole number")
    return np.array(int(data), np.int64)


def of_json(data: bytes, key: str) -> NDArray[Any]:
    """Return the value at ``key`` of a JSON object as an array. The value is a number or a list of numbers; the dtype
    is int64 if all of them are integers, otherwise float32."""
    tree = plain_json(data.decode("utf-8"))
    if not isinstance(tree, dict) or key not in tree:
        raise ValueError(f"it is no JSON object with the key {key}")
    found = np.array(tree[key])
    if found.dtype.kind not in "bif":
        raise ValueError(f"its {key} is no number or list of numbers of one length")
    return found.astype(np.float32 if found.dtype.kind == "f" else np.int64)


def of_npy(data: bytes) -> NDArray[Any]:
    """Return the array of .npy data, in native byte order. Object arrays, which need pickle, are refused."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"its npy format {version} is not known")
    shape, fortran, dtype = _HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects, which are not loaded")
    rest = len(data) - file.tell()
    if rest != int(np.prod(shape, dtype=object)) * dtype.itemsize:
        raise ValueError(f"its header says {shape} of {dtype}, and {rest:,} bytes follow")
    flat = np.frombuffer(data, dtype, offset=file.tell())
    found = flat.reshape(shape, order="F" if fortran else "C")
    return np.array(found, dtype=dtype.newbyteorder("="), order="C")

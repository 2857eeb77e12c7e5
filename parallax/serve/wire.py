"""Send and receive messages between the server and the ranks of a model: JSON and tensors over a socket.

::

    8 bytes   length of the JSON
    JSON      {"message": {...}, "tensors": [["float32", [4, 10]], ...]}
    bytes     the values of each tensor, in order
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LENGTH = struct.Struct(">Q")
_MOST_JSON = 1 << 26  # bytes; a longer one is no message of ours


def send(link: socket.socket, message: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
    """Send ``message`` with ``tensors``, which are on the CPU. Raises OSError if the peer has closed the connection."""
    listed = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in tensors]
    head = json.dumps({"message": message, "tensors": listed}).encode()
    link.sendall(_LENGTH.pack(len(head)) + head)
    for each in tensors:
        if each.numel():
            link.sendall(_bytes_of(each.contiguous()))


def receive(link: socket.socket) -> tuple[dict[str, Any], list[Tensor]]:
    """Wait for the next message on ``link``, and return the message and its tensors.

    Raises OSError if the peer has closed the connection.
    """
    length = bytearray(_LENGTH.size)
    _fill(link, memoryview(length))
    (size,) = _LENGTH.unpack(length)
    if size > _MOST_JSON:
        raise ConnectionError("the peer sent no message of a server")
    head = bytearray(size)
    _fill(link, memoryview(head))
    tree = json.loads(head)
    tensors = []
    for name, shape in tree["tensors"]:
        tensors.append(torch.empty(shape, dtype=getattr(torch, name)))
        if tensors[-1].numel():
            _fill(link, _bytes_of(tensors[-1]))
    return tree["message"], tensors


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A context that yields a short address for the Unix socket at ``path``.

    An address has at most 108 bytes, and a path may be longer. On Linux the address names the socket's folder by an
    open file descriptor; elsewhere it is ``path``.
    """
    if not Path("/proc/self/fd").is_dir():
        yield str(path)
        return
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{path.name}"
    finally:
        os.close(handle)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _fill(link: socket.socket, left: memoryview) -> None:
    while left:
        count = link.recv_into(left)
        if not count:
            raise ConnectionError("the peer has closed the connection")
        left = left[count:]

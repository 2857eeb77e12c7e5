"""Give each start of the ranks its own part of torchrun's store.

torchrun's agent keeps one store for all starts of its ranks. Values of an earlier start cannot be distinguished from
values of the present start: dead ranks would be counted as present, at addresses where no process listens. The number
of restarts does not identify a start either. Hosts may have different counts, and a restart after a host has joined or
left is not counted. So rank 0 chooses a random name for each start, and sends it to every rank that asks::

    rank r    appends a nonce ──> store ──> rank 0 writes the name under a key of that nonce
    rank r    reads the name  <── store

No nonce is used twice, so an answer always comes from a living rank 0. Nonces of dead ranks get answers that no rank
reads. All other values are stored under a prefix with that name.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import torch.distributed as dist

_REQUEST_LIST = "parallax requests"
_BYTES = 16  # length of a name and of a nonce
_DIGITS = 2 * _BYTES
_POLL_SECONDS = 0.05


class OpenMeeting:
    """The rendezvous of one start of the ranks, which rank 0 opens. ``part`` is the part of ``store`` that holds the
    values of this start."""

    def __init__(self, store: Any) -> None:
        self._store, self._name = store, secrets.token_hex(_BYTES)
        self._answered = 0  # digits
        self.part = _part(store, self._name)
        store.append(
            _REQUEST_LIST, ""
        )  # it is there from now on, so it can be read without waiting

    def answer(self) -> None:
        """Send the name of this rendezvous to all ranks that have requested it since the last call."""
        nonces = self._store.get(_REQUEST_LIST).decode()
        starts = range(self._answered, len(nonces), _DIGITS)
        keys = [_answer(nonces[start : start + _DIGITS]) for start in starts]
        if keys:
            self._store.multi_set(keys, [self._name] * len(keys))
        self._answered = len(nonces)


def ask(store: Any, seconds: float) -> Any:
    """Ask rank 0 for the name of the present start of the ranks, and return that start's part of ``store``.

    The part is a store itself, which holds the values of this start only. Raises :class:`TimeoutError` if rank 0 does
    not answer within ``seconds``.
    """
    nonce = secrets.token_hex(_BYTES)
    store.append(_REQUEST_LIST, nonce)
    end = time.monotonic() + seconds
    while not store.check([_answer(nonce)]):
        if time.monotonic() > end:
            raise TimeoutError(f"no rank 0 has answered within {seconds:g} s")
        time.sleep(_POLL_SECONDS)
    return _part(store, store.get(_answer(nonce)).decode())


def _answer(nonce: str) -> str:
    return f"parallax answer {nonce}"


def _part(store: Any, name: str) -> Any:
    return dist.PrefixStore(f"parallax meeting {name}", store)  # type: ignore[attr-defined]

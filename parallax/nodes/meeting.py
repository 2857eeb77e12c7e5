"""A meeting of ranks in a store that outlives them, apart from those that were there before.

torchrun's agent keeps one store for all starts of its ranks. What the ranks before have left there cannot be told from
what the present ones say: their presence is counted, and nobody listens at their addresses any more. How often torchrun
has started ranks names no meeting: hosts count differently, and a host that joins or leaves does not count. So rank 0
names each meeting at random, and tells the name to who asks, as long as ranks may come::

    rank r    appends a nonce ──> store ──> rank 0 writes the name under a key of that nonce
    rank r    reads the name  <── store

No nonce is used twice, so only a rank 0 that lives can have answered it. A rank that has died leaves nonces whose
answers nobody reads. All else is said in the part of the store that has the name.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import torch.distributed as dist

_ASKED = "parallax asked"
_BYTES = 16  # of a name and of a nonce
_DIGITS = 2 * _BYTES
_POLL_SECONDS = 0.05


class OpenMeeting:
    """Rank 0's: ``part`` is the part of ``store`` that nobody has used before."""

    def __init__(self, store: Any) -> None:
        self._store, self._name = store, secrets.token_hex(_BYTES)
        self._answered = 0  # digits
        self.part = _part(store, self._name)
        store.append(_ASKED, "")  # it is there from now on, so it can be read without waiting

    def answer(self) -> None:
        """Tell the name to all who have asked for it since the last call."""
        asked = self._store.get(_ASKED).decode()
        starts = range(self._answered, len(asked), _DIGITS)
        keys = [_answer(asked[start : start + _DIGITS]) for start in starts]
        if keys:
            self._store.multi_set(keys, [self._name] * len(keys))
        self._answered = len(asked)


def ask(store: Any, seconds: float) -> Any:
    """For another rank: what :attr:`OpenMeeting.part` is to rank 0. Raises :class:`TimeoutError` where none answers
    within ``seconds``."""
    nonce = secrets.token_hex(_BYTES)
    store.append(_ASKED, nonce)
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

"""A secret that the hosts of a run share, by which its ranks know each other.

The store at which ranks meet believes whoever connects, and Python objects travel pickled: whoever could send one to a
rank could run code there. So where the user gives a secret, ranks prove to each other that they know it, without saying
it, and from then on each object is signed and none is unpickled that is not (:mod:`parallax.nodes.objects`)::

    rank r    nonce r ──> store ──> all nonces + secret ──> key of this start ──> proof r ──> store ──> all proofs

It is given by a file or in the environment, never in settings, which are written down, or on a command line, which
others on the host can read.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallax.common.documents import read_bytes
from parallax.errors import ConfigError, printable

SECRET, SECRET_FILE = "PARALLAX_SECRET", "PARALLAX_SECRET_FILE"
_SHORTEST, _LONGEST = 16, 4096  # bytes
_NONE = b"none"
_NAMED = 5  # ranks


def run_secret() -> bytes:
    """What the user has given; nothing where nothing is. Raises :class:`ConfigError` for a file that others can read,
    and for a secret that can be guessed."""
    file, typed = os.environ.get(SECRET_FILE, ""), os.environ.get(SECRET, "")
    if file and typed:
        raise ConfigError(f"{SECRET} and {SECRET_FILE}: give only one of them")
    found = _read(Path(file)) if file else os.fsencode(typed)
    if found and len(found) < _SHORTEST:
        raise ConfigError(
            f"{SECRET_FILE if file else SECRET}: the secret has {len(found)} bytes, and {_SHORTEST} are the least: "
            "make one with `openssl rand -hex 32`"
        )
    return found


def _read(path: Path) -> bytes:
    shown = f"{SECRET_FILE}={printable(str(path))}"
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{shown}: other users can read it: chmod 600 it, and make a new one")
        found = read_bytes(path, _LONGEST).strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{shown}: it cannot be read ({printable(reason)})") from error
    if not found:
        raise ConfigError(f"{shown}: it is empty: make one with `openssl rand -hex 32`")
    return found


def agree(store: Any, rank: int, size: int, secret: bytes) -> bytes:
    """The key of this start, known to those who know ``secret``, after all have proved at ``store`` that they do; empty
    where nobody has one. Raises :class:`ConfigError` with the ranks that have none, or another."""
    own = secrets.token_hex(16) if secret else _NONE.decode()
    store.set(f"nonce {rank}", own)
    nonces = [bytes(store.get(f"nonce {each}")) for each in range(size)]
    nonces[rank] = own.encode()  # not what the store says: it may answer with those of a run before
    without = [each for each, nonce in enumerate(nonces) if nonce == _NONE]
    if len(without) == size and not secret:
        return b""
    if without or not secret:
        raise ConfigError(
            f"{ranks_in_words(without)} of {size} has no secret, and others have one: set {SECRET_FILE} on all hosts"
        )
    key = hmac.digest(secret, b"parallax start\0" + b"\0".join(nonces), "sha256")
    store.set(f"proof {rank}", _proof(key, rank, size))
    proofs = [bytes(store.get(f"proof {each}")) for each in range(size)]
    strangers = [
        each
        for each, proof in enumerate(proofs)
        if not hmac.compare_digest(proof, _proof(key, each, size).encode())
    ]
    if strangers:
        raise ConfigError(
            f"{ranks_in_words(strangers)} of {size} has another secret than rank {rank}: give all hosts the same "
            f"{SECRET_FILE}, or see who else is on the network"
        )
    return key


def _proof(key: bytes, rank: int, size: int) -> str:
    return hmac.digest(key, f"rank {rank} of {size}".encode(), "sha256").hex()


def ranks_in_words(ranks: Sequence[int]) -> str:
    """The first of them by number."""
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    shown = ", ".join(map(str, ranks[:_NAMED])) or "(unknown)"
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"

"""What is checked of a model before its first step, once for each model, loss and set of libraries on a machine."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from parallax.common.documents import SMALL_BYTES, read_json
from parallax.common.files import cache_directory, replacing
from parallax.common.units import format_bytes
from parallax.machine.host import available_memory
from parallax.model.describe import Chain
from parallax.model.verification.comparison import (
    CannotRun,
    compare_with_own_forward,
    has_own_forward,
)
from parallax.model.verification.draws import own_random_state
from parallax.model.verification.rows import Verdict, find_coupling
from parallax.model.verification.runs import BlocksInOrder, Loss, SampleRows

logger = logging.getLogger("parallax")

AUTO = "auto"
ROWS = (2, 3), (4, 6), (1,)
"""Numbers of rows to compare with; the next where the model cannot run on so few."""
_COPIES = 4  # parameters and gradients, of the model and of its chain
_MOST_OF_HOST = 0.5


def verify(
    chain: Chain,
    loss: Loss,
    batch: SampleRows,
    *,
    when: bool | str = AUTO,
    key: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Compare ``chain`` with its model's own forward on the first rows of ``batch``, and that batch with its parts.

    ``when``: ``auto`` checks what was not checked on this machine before, where it fits the host; True always; False
    never. ``key`` is what the model and its rows depend on besides their code. Raises
    :class:`~parallax.errors.DescribeError` where the chain computes something else.
    """
    if when is False:
        return Verdict()
    path = _verdict_path(chain, loss, key)
    known = _load_verdict(path) if when == AUTO else None
    if known is not None:
        return known
    if when == AUTO and (reason := _too_large(chain)):
        logger.warning("the chain was not checked against the model: %s", reason)
        return Verdict()
    progress("checking the chain against the model")
    with own_random_state():
        unchecked = _check_forward(chain, loss, batch)
        found = find_coupling(BlocksInOrder(chain), loss, batch)
    if unchecked:
        logger.warning("the chain was not checked against the model: %s", unchecked)
    else:
        _store_verdict(path, found)
    return found


def _check_forward(chain: Chain, loss: Loss, batch: SampleRows) -> str:
    """Why it was not compared in full; empty: it was, and it is right."""
    if not has_own_forward(chain):
        return ""  # its blocks are all that there is
    why = ""
    for counts in ROWS:
        fitting = [count for count in counts if count <= len(batch)]
        if not fitting:
            continue
        try:
            return compare_with_own_forward(chain, loss, batch, fitting)
        except CannotRun as error:
            why = why or f"on {fitting[0]} row(s) its own forward raises {error}"
    return why


def _too_large(chain: Chain) -> str:
    parameters = sum(p.numel() for p in chain.model.parameters()) * chain.dtype.itemsize
    needed, available = _COPIES * parameters, int(_MOST_OF_HOST * available_memory())
    if needed <= available:
        return ""
    return (
        f"both with their gradients take {format_bytes(needed)}, and half of the host's free memory is "
        f"{format_bytes(available)}; model.verify=true checks it all the same"
    )


_CACHE_VERSION = 3  # of what is checked: what another one found is checked again
_LIBRARIES = ("torch", "transformers", "timm", "peft")


def _verdict_path(chain: Chain, loss: Loss, key: str) -> Path:
    """Where a verdict on ``chain`` is kept. The fingerprint has the code that was recorded; files have the rest of the
    user's."""
    what = [
        _CACHE_VERSION,
        *map(_version, ("parallax-train", *_LIBRARIES)),
        chain.fingerprint(),
        chain.seed,
        getattr(loss, "__qualname__", type(loss).__qualname__),
        key,
        *sorted(_codes(chain, loss)),
    ]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return cache_directory() / f"verified-{digest}.json"


def _load_verdict(path: Path) -> Verdict | None:
    """What :func:`_store_verdict` wrote; None where there is nothing, or damage."""
    try:
        found = Verdict(**read_json(path, SMALL_BYTES))
    except (OSError, ValueError, TypeError):
        return None
    return found if all(isinstance(text, str) for text in asdict(found).values()) else None


def _store_verdict(path: Path, found: Verdict) -> None:
    """Write what was found where it is found again."""
    with replacing(path) as temporary:
        temporary.write(json.dumps(asdict(found)).encode())


def _codes(chain: Chain, loss: Loss) -> Iterator[str]:
    """Hashes of the files in which the model's classes and the loss are written, but those of libraries, which have a
    version."""
    kinds: list[Any] = [base for m in chain.model.modules() for base in type(m).__mro__]
    names = {getattr(kind, "__module__", None) or "" for kind in [*kinds, loss, type(loss)]}
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if name.partition(".")[0] not in (*_LIBRARIES, "parallax", "builtins") and file:
            yield hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""

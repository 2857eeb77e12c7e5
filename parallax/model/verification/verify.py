"""Verify a model before its first step. On one machine this is done once for each model, loss and library version."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from parallax.common.documents import SMALL_BYTES, read_json
from parallax.common.files import cache_directory, replacing
from parallax.common.units import format_bytes
from parallax.errors import UserError
from parallax.machine.host import available_memory
from parallax.model.describe import Chain
from parallax.model.verification.comparison import (
    CannotRun,
    compare_with_own_forward,
    has_own_forward,
)
from parallax.model.verification.draws import own_random_state
from parallax.model.verification.lookahead import find_lookahead
from parallax.model.verification.rows import Verdict, find_coupling
from parallax.model.verification.runs import BlocksInOrder, Loss, SampleRows

logger = logging.getLogger("parallax")

AUTO = "auto"
ROWS = (2, 3), (4, 6), (1,)
"""Numbers of rows with which the forwards are compared.

If the model cannot run on so few rows, the next ones are tried.
"""
_COPIES = 4  # parameters and gradients of the model and of its chain
_MOST_OF_HOST = 0.5


def verify(
    chain: Chain,
    loss: Loss,
    batch: SampleRows,
    *,
    when: bool | str = AUTO,
    key: str = "",
    padded: Callable[[], SampleRows | None] = lambda: None,
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Check that ``chain`` computes its model's own forward, and that a batch may be split; return the verdict.

    The forwards are compared on the first rows of ``batch``, and the loss of some rows is compared with that of their
    parts. ``padded()`` returns rows of which some are padded, or None; their loss must not depend on the padding.

    ``when``: ``auto`` verifies a model that has no cached verdict and fits the host's memory; True always verifies;
    False never does. ``key``: a text on everything that model and rows depend on besides their code. Raises
    :class:`~parallax.errors.DescribeError` if the chain computes something else than the model.
    """
    if when is False:
        return Verdict()
    path = _verdict_path(chain, loss, key)
    known = _load_verdict(path) if when == AUTO else None
    if known is not None:
        return known
    if when == AUTO and (reason := _too_large(chain)):
        logger.warning("it was not checked that the blocks compute what the model does: %s", reason)
        return Verdict()
    progress("checking that the blocks compute what the model does")
    with own_random_state():
        unchecked = _check_forward(chain, loss, batch)
        blocks = BlocksInOrder(chain)
        found = find_coupling(blocks, loss, batch)
        if (rows := padded()) is not None:
            found = replace(found, padded=find_lookahead(blocks, loss, rows))
    if unchecked:
        logger.warning(
            "it was not checked that the blocks compute what the model does: %s", unchecked
        )
    else:
        _store_verdict(path, found)
    return found


def _check_forward(chain: Chain, loss: Loss, batch: SampleRows) -> str:
    """Compare chain and model. Return the reason why the comparison was incomplete, or '' if all was compared.

    Raises an error if the chain is wrong. If the model or the loss fails for every number of rows that is tried, and
    the first failure is a :class:`UserError`, this error is raised.
    """
    if not has_own_forward(chain):
        return ""  # the model is defined by its blocks
    why = ""
    mistake: BaseException | None = None
    for counts in ROWS:
        fitting = [count for count in counts if count <= len(batch)]
        if not fitting:
            continue
        try:
            return compare_with_own_forward(chain, loss, batch, fitting)
        except CannotRun as error:
            why = why or f"on {fitting[0]} row(s) its own forward raises {error}"
            mistake = mistake or error.__cause__
    if isinstance(mistake, UserError):
        raise mistake
    return why


def _too_large(chain: Chain) -> str:
    parameters = sum(p.numel() for p in chain.model.parameters()) * chain.dtype.itemsize
    needed, available = _COPIES * parameters, int(_MOST_OF_HOST * available_memory())
    if needed <= available:
        return ""
    return (
        f"model, chain and gradients need {format_bytes(needed)}, and half of the host's free memory is "
        f"{format_bytes(available)}; set model.verify=true to check it anyway"
    )


_CACHE_VERSION = 4  # of the checks; verdicts of another version are not reused
_LIBRARIES = ("torch", "transformers", "timm", "peft")


def _verdict_path(chain: Chain, loss: Loss, key: str) -> Path:
    """Return the cache file for the verdict on ``chain``. ``key``: see :func:`verify`.

    The file's name contains a hash of the chain's fingerprint, which covers the recorded code, and of source files,
    which cover the rest of the user's code.
    """
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
    """Return the verdict in the cache file ``path``; None if it is missing or damaged."""
    try:
        found = Verdict(**read_json(path, SMALL_BYTES))
    except (OSError, ValueError, TypeError):
        return None
    return found if all(isinstance(text, str) for text in asdict(found).values()) else None


def _store_verdict(path: Path, found: Verdict) -> None:
    with replacing(path) as temporary:
        temporary.write(json.dumps(asdict(found)).encode())


def _codes(chain: Chain, loss: Loss) -> Iterator[str]:
    """Yield hashes of the source files of the model's classes and of the loss.

    Libraries are left out, because their versions are part of the file's name.
    """
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

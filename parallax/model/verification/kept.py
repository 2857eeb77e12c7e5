"""What was checked before on this machine, kept under what the check depends on."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from parallax.common.documents import SMALL_BYTES, read_json
from parallax.common.files import cache_directory, replacing
from parallax.model.describe import Chain
from parallax.model.verification.rows import Verdict
from parallax.model.verification.runs import Loss

EDITION = 3  # of what is checked: what another one found is checked again
_LIBRARIES = ("torch", "transformers", "timm", "peft")


def verdict_path(chain: Chain, loss: Loss, key: str) -> Path:
    """Where a verdict on ``chain`` is kept. The fingerprint has the code that was recorded; files have the rest of the
    user's."""
    what = [
        EDITION,
        *map(_version, ("parallax-train", *_LIBRARIES)),
        chain.fingerprint(),
        chain.seed,
        getattr(loss, "__qualname__", type(loss).__qualname__),
        key,
        *sorted(_codes(chain, loss)),
    ]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return cache_directory() / f"verified-{digest}.json"


def recall(path: Path) -> Verdict | None:
    """What :func:`remember` wrote; None where there is nothing, or damage."""
    try:
        found = Verdict(**read_json(path, SMALL_BYTES))
    except (OSError, ValueError, TypeError):
        return None
    return found if all(isinstance(text, str) for text in asdict(found).values()) else None


def remember(path: Path, found: Verdict) -> None:
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

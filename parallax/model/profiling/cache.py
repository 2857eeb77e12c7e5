"""Cache measured profiles, under a key of everything that the measurement depends on."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.common.files import cache_directory, replacing
from parallax.errors import PlanError
from parallax.machine.accelerators import accelerator_of
from parallax.machine.host import cpu_model
from parallax.model.describe import Chain
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling.offloads import Offloader
from parallax.plan.profile import ModelProfile

CACHE_VERSION = 16  # version of the measurement; profiles of another version are measured again
Sample = Callable[[int], tuple[tuple[Tensor, ...], Tensor]]


def profile_path(
    chain: Chain,
    loss: Callable[[Any, Tensor], Tensor],
    sample: Sample,
    rows: Sequence[int],
    *,
    device: torch.device,
    precision: PrecisionConfig,
    minimum_bytes: int,
    offloader: Offloader | None = None,
    gathered: int = 0,
    shared_norms: bool = False,
) -> Path:
    """Return the cache file that :func:`~parallax.model.profiling.measure.measure` uses for the same arguments."""
    inputs, _ = sample(1)
    shapes = [(str(tensor.dtype), list(tensor.shape)) for tensor in inputs]
    what = [
        CACHE_VERSION,
        chain.fingerprint(),
        device_name(device),
        torch.__version__,
        str(precision),
        minimum_bytes,
        torch.get_num_threads(),
        offloader.tier if offloader else "none",
        _loss_name(loss),
        *(["norms over replicas"] if shared_norms else []),
        *([f"the loss of {gathered} rows"] if gathered else []),
    ]
    key = hashlib.sha256(json.dumps([*what, sorted(rows), shapes]).encode()).hexdigest()[:16]
    return cache_directory() / f"profile-{key}.json"


def load_cached(path: Path, name: str) -> ModelProfile | None:
    """Return the profile in the cache file ``path``, renamed to ``name``; None if the file is missing or damaged."""
    with contextlib.suppress(PlanError):
        return replace(ModelProfile.load(path), model=name) if path.is_file() else None
    return None


def store_cached(profile: ModelProfile, path: Path) -> None:
    """Write ``profile`` to the cache file ``path``."""
    with replacing(path) as temporary:
        temporary.write(profile.to_json().encode())


def remove_cached(profile: ModelProfile) -> int:
    """Remove the cached profiles of the same model, device and number format as ``profile``, and return their number.

    So the next plan measures again.
    """
    count = 0
    for path in cache_directory().glob("profile-*.json"):
        with contextlib.suppress(PlanError, OSError):
            if profile.fingerprint in path.read_text(encoding="utf-8") and _are_alike(
                ModelProfile.load(path), profile
            ):
                path.unlink()
                count += 1
    return count


def _are_alike(one: ModelProfile, other: ModelProfile) -> bool:
    return (one.fingerprint, one.device, one.precision) == (
        other.fingerprint,
        other.device,
        other.precision,
    )


def device_name(device: torch.device) -> str:
    """Return the name of ``device`` that is stored in a profile."""
    if device.type == "cpu":
        return cpu_model()
    return accelerator_of(device).devices()[device.index or 0].name


def _loss_name(loss: Callable[[Any, Tensor], Tensor]) -> str:
    """Return a text that identifies a loss function across processes."""
    code = getattr(loss, "__code__", None)
    body = (code.co_code.hex(), code.co_names) if code is not None else ()
    return repr(
        (
            getattr(loss, "__module__", ""),
            getattr(loss, "__qualname__", type(loss).__qualname__),
            body,
        )
    )

"""Check the arguments of ``parallax.swap``. Each invalid value raises an error whose message is one line."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from parallax.common.units import parse_bytes
from parallax.errors import ConfigError, printable
from parallax.swap.config import usual_smallest
from parallax.swap.optimizer.chunked_step import with_inner

AUTO = "auto"
_SHOWN = 80  # characters of a value


def check_model(model: Any) -> None:
    """Raise :class:`ConfigError` unless ``model`` is a module whose parameters are all materialised."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model={_shown(model)}: accepted is an nn.Module; give several models as one nn.ModuleList"
        )
    lazy = [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if is_lazy(tensor)
    ]
    if lazy:
        raise ConfigError(
            f"model={type(model).__name__}: {lazy[0]} gets its shape in the first forward: run one before parallax.swap"
        )


def optimizers(given: Any) -> list[Optimizer]:
    """Return the torch optimizers in ``given``, the argument ``optimizer=``, each followed by the optimizers that it
    wraps."""
    several = isinstance(given, Iterable) and not isinstance(
        given, Optimizer | Tensor | nn.Module | Mapping | str
    )
    found = [*given] if several else [given]
    for each in found:
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"optimizer={_shown(each)}: accepted are an instance of torch.optim.Optimizer or several in a list; "
                "omit it to keep optimizer states on the device"
            )
    if len({id(each) for each in found}) < len(found):
        raise ConfigError(
            f"optimizer=: the same {type(found[0]).__name__} is given twice; give each once"
        )
    inner = [each for one in found for each in with_inner(one)]
    return list({id(each): each for each in inner}.values())


def size(key: str, value: Any) -> int:
    """Return ``value``, a number or a text such as 8GiB, in bytes. Errors name the argument ``key``."""
    if isinstance(value, str):
        return parse_bytes(value, key)
    count = _whole(value)
    if count is None or count <= 0:
        raise ConfigError(
            f"{key}={_shown(value)}: accepted are bytes above 0, as a whole number or text such as 8GiB"
        )
    return count


def size_or_auto(key: str, value: Any) -> int | None:
    """Return ``value`` in bytes, or None for auto. Errors name the argument ``key``."""
    return None if isinstance(value, str) and value == AUTO else size(key, value)


def whole(key: str, value: Any, *, least: int = 0) -> int:
    """Return ``value`` as a whole number.

    Raises :class:`ConfigError`, which names the argument ``key``, if ``value`` is no whole number or is below
    ``least``.
    """
    count = _whole(value)
    if count is None or count < least:
        raise ConfigError(f"{key}={_shown(value)}: accepted are whole numbers from {least}")
    return count


def smallest(value: Any, device: torch.device) -> int:
    """Return the argument ``minimum_bytes``, the bytes of the smallest tensor to offload from ``device``."""
    auto = isinstance(value, str) and value == AUTO
    return usual_smallest(device.type) if auto else whole("minimum_bytes", value)


def whole_or_none(key: str, value: Any) -> int | None:
    """Return ``value`` as a whole number, or None if it is None.

    Raises :class:`ConfigError`, which names the argument ``key``, for anything else.
    """
    return None if value is None else whole(key, value)


def flag(key: str, value: Any) -> bool:
    """Return ``value``. Raises :class:`ConfigError`, which names the argument ``key``, unless it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={_shown(value)}: accepted are True and False")
    return value


def flag_or_auto(key: str, value: Any, auto: bool) -> bool:
    """Return ``value``, or the bool ``auto`` if ``value`` is the text auto.

    Raises :class:`ConfigError`, which names the argument ``key``, unless ``value`` is True, False or auto.
    """
    return auto if isinstance(value, str) and value == AUTO else flag(key, value)


def folder(value: Any) -> Path:
    """Return ``value`` as the path of a folder."""
    name = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(
            f"directory={_shown(value)}: accepted is the name of a folder; a missing one is made"
        )
    return Path(name)


def _whole(value: Any) -> int | None:
    """Return ``value`` as a whole number, or None if it is not one. A bool is not one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value.is_integer() else None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        return None


def _shown(value: Any) -> str:
    """Return a short text that shows ``value`` in a message."""
    if isinstance(value, type):
        return f"{value.__name__} (a class)"
    if value is not None and not isinstance(value, str | bytes | int | float | os.PathLike):
        return f"{type(value).__name__} object"
    text = repr(value)
    return printable(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")

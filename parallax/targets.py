"""Functions that the user names in a configuration. Names come from the user's own configuration only, never from a
checkpoint, a plan or a profile."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from parallax.errors import ConfigError


def load_target(key: str, target: str) -> Callable[..., Any]:
    """The object named by ``package.module:factory``; ``key`` is the setting named in errors."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigError(f"{key}={target or '(empty)'}: accepted is package.module:factory")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"{key}={target}: cannot import {module} ({error}); is its folder on PYTHONPATH?") from error
    except AttributeError:
        raise ConfigError(f"{key}={target}: module {module} has no {name}") from None
    if not callable(found):
        raise ConfigError(f"{key}={target}: {name} is not callable")
    return found

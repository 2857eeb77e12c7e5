"""timm, also where torchvision is absent: its loaders of images need that, its models do not."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

_NAMES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.datasets",
    "torchvision.ops",
    "torchvision.ops.misc",
)


def timm_or_skip() -> Any:
    """timm; skips the module that asks where it is not installed."""
    with _images_stood_in():
        return pytest.importorskip("timm", reason="timm is not installed (it is an extra)")


@contextlib.contextmanager
def _images_stood_in() -> Iterator[None]:
    """Something to import under the names that timm looks for in torchvision, which no model calls, for as long as timm
    is imported."""
    if "timm" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        yield
        return
    for name in _NAMES:
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        module.__getattr__ = _anything  # type: ignore[method-assign]
        sys.modules[name] = module
    for name in _NAMES[1:]:
        owner, _, leaf = name.rpartition(".")
        setattr(sys.modules[owner], leaf, sys.modules[name])
    try:
        yield
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


class _Anything(type):
    """A class to inherit from and to take names from."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})

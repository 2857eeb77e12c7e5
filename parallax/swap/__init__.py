"""Offload tiers, and the manager that moves saved activations to them and back.

``parallax.swap`` is this package and, called, :func:`parallax.swap.lms.scope.swap`: Large Model Support in any
loop."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from parallax.swap.lms.scope import (
            swap,  # imported late: it imports this package
        )

        return swap(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage

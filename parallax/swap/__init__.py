"""Offload activations, optimizer states and parameters from the device to host memory or disk.

``parallax.swap`` is this package, and it can also be called. The call is :func:`parallax.swap.lms.scope.swap`, which
brings offloading (Large Model Support) into any training loop.
"""

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

"""The nature of an optimizer (:mod:`parallax.runtime.optim.nature`), found once in a process for equal settings.

Every engine finds it anew, by stepping small tensors, which took a tenth of the time of tests that build many engines.
"""

from __future__ import annotations

import pickle
from typing import Any

from parallax.runtime.optim import builder
from parallax.runtime.optim.nature import Nature, nature_of

_found: dict[bytes, Nature] = {}


def remember_natures() -> None:
    """From now on, builders of this process and of its forks find each nature once."""
    builder.nature_of = _nature_of  # type: ignore[attr-defined]


def _nature_of(*args: Any, **options: Any) -> Nature:
    try:
        key = pickle.dumps((args, options))
    except (pickle.PicklingError, AttributeError, TypeError):  # a class or function of a test
        return nature_of(*args, **options)
    if key not in _found:
        _found[key] = nature_of(*args, **options)
    return _found[key]

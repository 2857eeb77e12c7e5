"""Optimizers of the class and with the settings of a given one, over other parameters.

The class of an optimizer is anybody's, and its ``__init__`` may ask for anything, so a clone is made without: what the
given one holds is taken over as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer


def shallow_clone(
    optimizer: Optimizer, attributes: Mapping[str, Any], groups: list[dict[str, Any]]
) -> Optimizer:
    """A clone with ``groups``, which shares ``attributes``, states and hooks among them."""
    clone: Optimizer = object.__new__(type(optimizer))
    vars(clone).update(attributes, param_groups=groups)
    return clone


def independent_clone(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A clone with ``groups``, without states or hooks yet; those that it gets are its own."""
    clone = shallow_clone(optimizer, vars(optimizer), [])
    Optimizer.__init__(clone, groups, dict(optimizer.defaults))
    return clone

"""Flags of models of transformers that mean something else in training by stages."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

logger = logging.getLogger("parallax")


def without_caches(model: nn.Module) -> None:
    """Tell a model of transformers to return no cache of keys and values: this is training. Its modules get copies of
    their configurations, for those may be the user's own."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            copies[id(config)] = copy.copy(config)
            copies[id(config)].use_cache = False
            logger.debug("%s: use_cache is off in training", type(module).__name__)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if id(value) in copies:
                setattr(module, name, copies[id(value)])


def without_checkpointing(model: nn.Module) -> None:
    """Tell a model of transformers to compute nothing again by itself: the plan says of each block what is kept."""
    modules: Iterator[Any] = model.modules()
    flagged = [m for m in modules if getattr(m, "gradient_checkpointing", False) is True]
    for module in flagged:
        module.gradient_checkpointing = False
    if flagged:
        logger.info(
            "%s asks for gradient checkpointing: the plan decides for each block what is kept and what is computed "
            "again; plan.activations=recompute is all of it",
            type(model).__name__,
        )

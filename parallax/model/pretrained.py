"""Load weight files inside a model's constructor, so that later initializers see the loaded values."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cache, partial
from pathlib import Path

from torch import nn

from parallax.model.construction.recorder import fill
from parallax.model.construction.weights import CheckpointWeights, FileLayout, OwnLayout
from parallax.model.files.conversions import PretrainedLayout, is_pretrained
from parallax.model.private import without_function_modes, without_operator_modes

logger = logging.getLogger("parallax")


def layout_of(model: nn.Module) -> FileLayout:
    """Return the object that describes how weight files store the tensors of ``model``."""
    return PretrainedLayout(model) if is_pretrained(model) else OwnLayout()


def read_weights(
    model: nn.Module, path: Path, without: Collection[str] = (), *, incomplete: bool = False
) -> None:
    """Load the safetensors file or folder at ``path`` into ``model``, except the tensors ``without``.

    ``incomplete``: the files may lack parts such as a new head. In a constructor that is being recorded, no values are
    read yet: each stage reads its own tensors later. Raises :class:`CheckpointError` if the files do not belong to this
    model.
    """
    with without_function_modes(), without_operator_modes():
        weights = CheckpointWeights(path, layout_of(model))
        state = model.state_dict(keep_vars=True)
        aliases = tied_names(model)
        again = {name for names in aliases.values() for name in names}
        wanted = {n: t for n, t in state.items() if n not in again and n not in without}
        buffers = {name for name, _ in model.named_buffers()}
        remarks = weights.check(
            wanted, aliases, ignored={*buffers, *without}, made=wanted if incomplete else ()
        )
    for remark in remarks:
        log_once(f"weights {path}: {remark}")
    for name in wanted:
        if (found := weights.find(name, aliases)) is not None:
            fill(state[name], partial(weights.fill, name=found))


def mismatched_shapes(model: nn.Module, path: Path, names: Collection[str]) -> list[str]:
    """Return those of ``names`` whose tensor has another shape in the files at ``path`` than in ``model``."""
    with without_function_modes(), without_operator_modes():
        shapes = CheckpointWeights(path, layout_of(model)).shapes()
        state = model.state_dict(keep_vars=True)
        return [n for n in names if n in state and shapes.get(n, state[n].shape) != state[n].shape]


@cache
def log_once(line: str) -> None:
    """Log a line once per process, even if the model is built several times."""
    logger.info(line)


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Return {first name: other names} for each parameter or buffer that has several names in ``model``."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {first: others for first, *others in names.values() if others}

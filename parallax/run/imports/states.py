"""Check and convert optimizer states of another library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from parallax.errors import CheckpointError, printable
from parallax.model.files.values import as_dtype, check_finite, check_kind
from parallax.run.imports.sources import ImportSource
from parallax.runtime.optim.builder import OptimizerBuilder
from parallax.runtime.optim.config import OptimizerConfig
from parallax.swap.optimizer.averaging import AVERAGE
from parallax.swap.optimizer.buckets import MASTER
from parallax.swap.optimizer.delaying import PREVIOUS, VERSION
from parallax.swap.optimizer.outer import OUTER_STATES

_STEP = "step"
NOT_IMPORTED = frozenset((MASTER, AVERAGE, VERSION, PREVIOUS, *OUTER_STATES))
"""States that are other versions of the weights, or an outer optimizer's. A master weight is imported as the weight."""


def check_states(
    source: ImportSource, trained: Mapping[str, nn.Parameter], optimizer: OptimizerConfig
) -> list[str]:
    """Raise :class:`CheckpointError` if the optimizer states in ``source`` cannot be imported: they belong to other
    parameters than ``trained``, or a parameter's states differ from those of ``optimizer`` in name, type or shape.
    Return messages for the user, about states that ``source`` lacks and tensors in it that are not imported."""
    unknown = sorted(set(source.states) - set(trained))
    if unknown:
        raise CheckpointError(
            f"the source has optimizer states of {_listed(unknown)}, which this run does not train: {_WITHOUT}"
        )
    builder = OptimizerBuilder.over(replace(optimizer, groups=[]), trained)
    due = builder.nature.names()
    for name in source.states:
        found = source.without_values(name)
        if set(found) - NOT_IMPORTED != due:
            raise CheckpointError(
                f"the source has {printable(', '.join(sorted(found)))} of {printable(name)}, and optimizer="
                f"{optimizer.label} keeps {', '.join(sorted(due))}: name the optimizer that it was trained by, or "
                f"{_WITHOUT}"
            )
        for key, tensor in found.items():
            counts = key == _STEP and not tensor.is_floating_point()
            kind = torch.int64 if counts else trained[name].dtype
            check_kind(f"{key} of {name}", tensor.dtype, kind)
            wanted = [] if key == _STEP else list(trained[name].shape)
            one = key == _STEP or trained[name].numel() == 1
            if list(tensor.shape) != wanted and not (one and tensor.numel() == 1):
                raise CheckpointError(
                    f"{key} of {printable(name)} is {list(tensor.shape)} and must be {wanted}"
                )
    fresh = sorted(set(trained) - set(source.states)) if source.states else []
    remarks = [f"optimizer states of {_listed(fresh)} start from zero"] if fresh else []
    if source.unread:
        remarks.append(
            f"not imported, as it is neither the model's nor an optimizer's: {_listed([*source.unread])}"
        )
    return remarks


def state_as_kept(
    what: str, key: str, value: Tensor, parameter: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return ``value``, the imported optimizer state ``key`` of ``parameter``, as checkpoints hold it: the number of
    steps as a scalar in float32, any other state in ``dtype`` and in the shape of the parameter. Error messages call
    the state ``what``."""
    check_finite(what, value)
    if key == _STEP:
        return value.reshape(()).to(torch.float32)
    return as_dtype(what, value.reshape(parameter.shape), dtype)


_WITHOUT = "add --weights-only to leave its states out"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return printable(", ".join(names[:3])) + more

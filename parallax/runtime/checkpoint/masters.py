"""Convert the tensors of a checkpoint to the number format of the run that resumes.

An optimizer updates weights in full precision. For weights of two bytes, it updates fp32 copies, called master weights.
A checkpoint holds the full-precision values, either as weights or as masters. So a run can resume in another format::

    saved in     resumed in     weight                       master
    fp32         bf16, fp16     the weight, rounded          the weight
    bf16, fp16   fp32           the master                   none: fp32 weights need no master
    bf16         fp16           the master, rounded          the master

Untrained weights and buffers have no masters. They are rounded to a narrower format, and are unchanged in a wider one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallax.errors import CheckpointError, printable
from parallax.model.precision import DTYPES
from parallax.runtime.checkpoint.reading import CheckpointReader
from parallax.swap.optimizer.buckets import MASTER
from parallax.swap.weights import stepped_in


class HeldMasters:
    """Reads the tensors of a checkpoint in the number formats of the run that resumes."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def check(self, names: dict[str, Tensor]) -> None:
        """Raise :class:`CheckpointError` unless the checkpoint has undamaged values for ``names`` that this run can
        convert.

        ``names`` maps the names of all tensors that this rank needs to its own tensors. The check comes before anything
        is changed, and keeps no tensor of the checkpoint in memory.
        """
        self._reader.check(names)
        held = self._reader.model_tensors()
        for name, mine in names.items():
            found = held[name]
            if found.dtype is mine.dtype:
                continue
            if stepped_in(found.dtype) is not stepped_in(mine.dtype):
                raise CheckpointError(
                    f"{self._reader.directory}: {printable(name)} is {_format(found)}, and no master of "
                    f"{_format(mine)}: resume with precision.parameters={_format(found)}, or start a new run"
                )
            if mine.dtype is torch.float16:
                self._check_range(name, self.weight(name, mine), mine)

    def weight(self, name: str, tensor: Tensor) -> Tensor:
        """Return the checkpoint's value of ``tensor``, the tensor ``name`` of the model.

        If the checkpoint has the weight in another format than ``tensor``, and also a master weight, the result is the
        master weight. Otherwise, or if the reader returns averages, the result is the saved weight or its average. The
        caller converts the result to the format of ``tensor``.
        """
        found = self._reader.read(f"model/{name}")
        if (
            found.dtype is tensor.dtype or self._reader.averaged
        ):  # masters are of trained weights, not of averages
            return found
        master = self._reader.state_of(name, MASTER)
        return found if master is None else master

    def states(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the optimizer states of the parameter ``tensor`` by the states' names.

        The states include the parameter's master weights if this run needs them and the checkpoint has their values.
        """
        known = self._reader.states(name)
        master = known.pop(MASTER, None)
        if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
            return known
        if stepped_in(tensor.dtype) is tensor.dtype:
            return known
        if master is None:
            saved = self._reader.read(f"model/{name}")
            master = saved if saved.dtype is stepped_in(tensor.dtype) else None
        return known if master is None else {**known, MASTER: master}

    def _check_range(self, name: str, found: Tensor, tensor: Tensor) -> None:
        """Raise :class:`CheckpointError` if a finite value of ``found``, the checkpoint's value of the tensor ``name``,
        is too large for the format of ``tensor``."""
        lost = torch.isfinite(found) & ~torch.isfinite(found.to(tensor.dtype))
        if bool(lost.any()):
            value = found[lost][0].item()
            raise CheckpointError(
                f"{self._reader.directory}: {printable(name)} holds {value:g}, which is too large for "
                f"{_format(tensor)}: resume with precision.parameters=bf16 or {_format(found)}"
            )


def _format(tensor: Tensor) -> str:
    """Return the number format of a tensor as the settings call it, such as ``bf16``."""
    return {dtype: name for name, dtype in DTYPES.items()}.get(tensor.dtype, str(tensor.dtype))

"""The two computations that are compared: the model's own forward, and its blocks run in order.

Both run on the CPU with equal values of parameters and buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from parallax.errors import HangError
from parallax.model.block import transform
from parallax.model.describe import Chain, as_tuple, parameter_names
from parallax.model.materialise import materialise
from parallax.model.recording.inputs import call_arguments

_SEED = 30
_SMALL = 0.02

Loss = Callable[[Any, Any], Tensor]
AfterBlock = Callable[[int, tuple[Tensor, ...]], None]


class SampleRows(Protocol):
    """The interface that returns rows of a real batch by index."""

    def __len__(self) -> int: ...

    def inputs(self, start: int, stop: int) -> Any:
        """Return the model inputs of rows [start, stop)."""

    def targets(self, start: int, stop: int) -> Any:
        """Return the loss targets of rows [start, stop)."""


class BlockFails(Exception):
    """Raised if the block ``index`` raises ``error``."""

    def __init__(self, index: int, error: Exception) -> None:
        super().__init__(str(error))
        self.index, self.error = index, error


class ComparedModel(Protocol):
    """The interface to one of the two computations that are compared: the model's own forward or its blocks."""

    def train(self, mode: bool) -> None:
        """Set training or evaluation mode."""

    def forward(self, inputs: Any) -> Any:
        """Return the model's return value for ``inputs``."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return {name in the model: parameter}."""

    def buffers(self) -> dict[str, Tensor]:
        """Return {name in the model: buffer} for the persistent buffers."""


class BlocksInOrder:
    """Runs the chain's blocks in order.

    Parameters whose initial values are all zero have small random values instead.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
        self.after: AfterBlock = lambda index, tensors: None
        for block in self.blocks:
            _keep_to_this_process(block)
            _fill_zeros(block)
        self._names = parameter_names(chain, range(len(self.blocks)))

    def train(self, mode: bool) -> None:
        for block in self.blocks:
            block.train(mode)

    def forward(self, inputs: Any) -> Any:
        """Return the last block's outputs in the structure of the model's return value.

        Raises :class:`BlockFails` if a block raises an error.
        """
        tensors = self.chain.arguments(_copies(inputs))
        for index, block in enumerate(self.blocks):
            try:
                tensors = as_tuple(block(*tensors))
            except HangError:
                raise
            except Exception as error:  # the model's code may raise anything
                raise BlockFails(index, error) from error
            self.after(index, tensors)
        return self.chain.results(tensors)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return {name in the model: parameter}."""
        return {name: t for name, t in self._held().items() if isinstance(t, nn.Parameter)}

    def buffers(self) -> dict[str, Tensor]:
        """Return {name in the model: buffer} for the persistent buffers."""
        return {name: t for name, t in self._held().items() if not isinstance(t, nn.Parameter)}

    def _held(self) -> dict[str, Tensor]:
        """Return {name in the model: tensor} for all parameters and persistent buffers.

        They are looked up at each call, because a forward may replace buffers.
        """
        states = [block.state_dict(keep_vars=True) for block in self.blocks]
        return {name: states[i][inner] for name, (i, inner) in self._names.items()}

    def every_buffer(self) -> list[Tensor]:
        """Return all buffers, including non-persistent ones."""
        return [buffer for block in self.blocks for buffer in block.buffers()]


class OwnForward:
    """Runs the model's own forward, on copies of the parameters and buffers of ``blocks``."""

    def __init__(self, chain: Chain, blocks: BlocksInOrder) -> None:
        parts = chain.deferred.values().deepcopy_memo(chain.model, chain.dtype, {})
        self.model = copy.deepcopy(chain.model, parts)
        _keep_to_this_process(self.model)
        with torch.no_grad():  # copies weights from files too
            held = {**blocks.parameters(), **blocks.buffers()}
            for name, tensor in {**self.parameters(), **self.buffers()}.items():
                tensor.copy_(held[name])

    def train(self, mode: bool) -> None:
        self.model.train(mode)

    def forward(self, inputs: Any) -> Any:
        args, kwargs = call_arguments(_copies(inputs))
        return self.model(*args, **kwargs)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return {name in the model: parameter}."""
        return dict(self.model.named_parameters())

    def buffers(self) -> dict[str, Tensor]:
        """Return {name in the model: buffer} for the persistent buffers."""
        saved = self.model.state_dict(keep_vars=True)
        return {name: t for name, t in self.model.named_buffers() if name in saved}


def gradients(model: ComparedModel) -> dict[str, Tensor]:
    """Return {name in the model: gradient} for every parameter, and set each ``.grad`` to None.

    A parameter without a gradient has zeros.
    """
    found = {}
    for name, parameter in model.parameters().items():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
    return found


def _copies(inputs: Any) -> Any:
    """Return copies of the inputs, because a forward may change its inputs."""
    return transform(inputs, lambda part: part.clone() if isinstance(part, Tensor) else part)


def _fill_zeros(block: nn.Module) -> None:
    """Fill each parameter that is all zero with small random numbers.

    Many heads and gates start with a zero weight, which would hide differences in the layers before them.
    """
    random = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=_SMALL, generator=random)


def _keep_to_this_process(module: nn.Module) -> None:
    """Make each SyncBatchNorm compute as a BatchNorm, because its own forward would wait for other ranks."""
    for part in module.modules():
        if isinstance(part, nn.SyncBatchNorm):
            vars(part)["forward"] = nn.BatchNorm2d.forward.__get__(part)

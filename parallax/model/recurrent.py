"""Find the weights of recurrent modules, which CUDA keeps in one buffer.

cuDNN takes all weights of an nn.LSTM, nn.GRU or nn.RNN as one buffer, so torch makes them views of one buffer. If the
weights had separate memory, every forward would copy them into a new buffer, which is kept until the backward. So the
weights stay on the device even if other parameters are offloaded.
"""

from __future__ import annotations

import torch
from torch import nn

from parallax.machine.accelerators import accelerator_of


def flattens_weights(device: torch.device) -> bool:
    """Return whether torch keeps the weights of a recurrent module in one buffer on ``device``."""
    return device.type != "cpu" and accelerator_of(device).flattens_recurrent_weights


def recurrent_weights(block: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of the recurrent modules in ``block``."""
    modules = (module for module in block.modules() if isinstance(module, nn.RNNBase))
    return {parameter for module in modules for parameter in module.parameters()}

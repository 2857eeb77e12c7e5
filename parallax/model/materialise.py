"""The blocks of one stage with real, initialised parameters, so that no process holds more than its own stage.

The values are those that the model's own constructor makes (:mod:`parallax.model.construction`), made for the stage's
tensors alone and the same under every plan. Weights from a file are put in their place, block by block.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from parallax.model.construction.weights import CheckpointWeights
from parallax.model.describe import Chain


def materialise(chain: Chain, start: int, stop: int, device: torch.device) -> list[nn.Module]:
    """Blocks ``start`` to ``stop`` with real, initialised parameters on ``device``."""
    return list(materialise_each(chain, range(start, stop), device))


def materialise_each(
    chain: Chain, indices: Iterable[int], device: torch.device
) -> Iterator[nn.Module]:
    """The blocks ``indices``, in rising order, one by one, for whom all do not fit at one time.

    Values are made on the CPU, block by block, so that they depend neither on the plan nor on the device. A parameter
    that several of the blocks share is one parameter.
    """
    weights = CheckpointWeights(chain.weights, chain.rename) if chain.weights else None
    aliases = _aliases(chain.model)
    if weights:
        shapes = {n: t.shape for n, t in chain.model.state_dict(keep_vars=True).items()}
        wanted = {name: shapes[name] for names in chain.names for name in names.values()}
        weights.check(wanted, aliases, ignored={name for name, _ in chain.model.named_buffers()})
    values = chain.construction.values()
    tied = {id(chain.model.get_parameter(name)) for name in chain.ties}
    shared: dict[int, nn.Parameter] = {}
    for index in indices:
        module = chain.blocks[index].module
        state = module.state_dict(keep_vars=True)
        filled = {id(state[inner]) for inner in chain.names[index]} if weights else set()
        parts = values.parts(module, chain.dtype, shared, filled)
        shared |= {key: parts[key] for key in tied & parts.keys()}
        block = copy.deepcopy(module, parts)
        if weights:
            state = block.state_dict(keep_vars=True)
            for inner, name in chain.names[index].items():
                weights.fill(state[inner], weights.find(name, aliases) or name)
        yield block.to(device=device)


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Name of a shared parameter or buffer → its other names."""
    tensors = model.state_dict(keep_vars=True)
    by_identity: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_identity.setdefault(id(tensor), []).append(name)
    return {names[0]: names[1:] for names in by_identity.values() if len(names) > 1}

"""The blocks of one stage with real, initialised parameters, so that no process holds more than its own stage.

The values are those that the model's own constructor makes (:mod:`parallax.model.construction`), made for the stage's
tensors alone and the same under every plan. Weights from a file are put in their place, block by block.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import torch
from torch import nn

from parallax.errors import CheckpointError, printable
from parallax.model.construction.weights import CheckpointWeights
from parallax.model.describe import Chain
from parallax.model.files.values import nonfinite_kind, nonfinite_text
from parallax.model.pretrained import tied_names


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
    weights = CheckpointWeights(chain.weights, chain.layout) if chain.weights else None
    aliases = tied_names(chain.model)
    if weights:
        _check(chain, weights, aliases)
    values = chain.deferred.values()
    tied = {id(chain.model.get_parameter(name)) for name in chain.ties}
    shared: dict[int, nn.Parameter] = {}
    for index in indices:
        module = chain.blocks[index].module
        state = module.state_dict(keep_vars=True)
        saved = {
            inner: found
            for inner, name in chain.names[index].items()
            if weights and (found := weights.find(name, aliases))
        }
        filled = {id(state[inner]) for inner in saved}
        parts = values.parts(module, chain.dtype, shared, filled)
        shared |= {key: parts[key] for key in tied & parts.keys()}
        block = copy.deepcopy(module, parts)
        if weights:
            state = block.state_dict(keep_vars=True)
            for inner, name in saved.items():
                weights.fill(state[inner], name)
        _check_values(chain, index, block, saved)
        with _same_parameters(device):
            block.to(device=device)
        yield block


def _check_values(chain: Chain, index: int, block: nn.Module, saved: Mapping[str, str]) -> None:
    """Raise :class:`CheckpointError` where a parameter is NaN or infinite: nothing can be trained with it, and no
    checkpoint may hold it. Frozen infinities, such as those of masks, are let be. ``saved`` come from the weights'
    files, under those names."""
    state = block.state_dict(keep_vars=True)
    for inner, name in chain.names[index].items():
        tensor = state[inner]
        if not isinstance(tensor, nn.Parameter) or not (what := nonfinite_kind(tensor)):
            continue
        if tensor.requires_grad or (what == "nan" and (inner in saved or chain.base)):
            whose = (
                f"weights {chain.weights}: {saved[inner]}"
                if inner in saved
                else f"parameter {name}"
            )
            remedy = (
                "give others"
                if inner in saved
                else "mend the files or the constructor that it comes from"
            )
            raise CheckpointError(
                f"{printable(whose)} {nonfinite_text(tensor)}, and cannot be trained: {remedy}"
            )


@contextlib.contextmanager
def _same_parameters(device: torch.device) -> Iterator[None]:
    """What moves to ``device`` stays the parameter that it is. Between a CPU and CUDA it does by itself; to some kinds
    of devices torch makes another for every name, and a tied weight would be tied no more."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps or not _keeps_parameters(device))
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


@cache
def _keeps_parameters(device: torch.device) -> bool:
    module = nn.Linear(1, 1, device="cpu")
    weight = module.weight
    return module.to(device=device).weight is weight


def check_weights(chain: Chain) -> list[str]:
    """Raise :class:`CheckpointError` where the files of ``chain`` are not of its model; what is to be said of those
    that hold more or less than it has, a line each."""
    if chain.weights is None:
        return []
    weights, aliases = CheckpointWeights(chain.weights, chain.layout), tied_names(chain.model)
    remarks = _check(chain, weights, aliases)
    weights.check_ties(aliases)
    return [f"weights {chain.weights}: {remark}" for remark in remarks]


def _check(
    chain: Chain, weights: CheckpointWeights, aliases: Mapping[str, Iterable[str]]
) -> list[str]:
    known = chain.model.state_dict(keep_vars=True)
    wanted = {name: known[name] for names in chain.names for name in names.values()}
    buffers = {name for name, _ in chain.model.named_buffers()}
    made = set(wanted) - set(chain.deferred.unwritten) if chain.partial_weights else set()
    return weights.check(wanted, aliases, buffers, made=made)

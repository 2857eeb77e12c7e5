"""Create the blocks of one stage with initialized parameters, so that each process holds only its own stage.

The values are those that the model's own constructor creates (:mod:`parallax.model.construction`). They are computed
for the stage's tensors only, and are equal under every plan. Weights from files replace them, block by block.
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
    """Return the blocks ``start`` to ``stop`` − 1 of ``chain`` with initialized parameters on ``device``."""
    return list(materialise_each(chain, range(start, stop), device))


def materialise_each(
    chain: Chain, indices: Iterable[int], device: torch.device
) -> Iterator[nn.Module]:
    """Yield the blocks ``indices`` of ``chain``, which ascend, with initialized parameters on ``device``, one at a
    time.

    So the blocks need not all fit in memory at once. Values are created on the CPU, so that they depend neither on the
    plan nor on the device. A parameter that several of these blocks share is the same Parameter object in all of them.
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
        parts = values.deepcopy_memo(module, chain.dtype, shared, filled)
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
    """Raise :class:`CheckpointError` if a trained parameter of ``block``, the chain's block ``index``, contains NaN or
    Inf.

    Training would diverge, and no checkpoint may hold such values. A frozen parameter may contain Inf, as masks do, but
    no NaN if it comes from weight files or if ``chain.base`` is set. ``saved`` maps names inside the block to names in
    the weight files.
    """
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
                "use another file"
                if inner in saved
                else "fix the constructor or the file that makes it"
            )
            raise CheckpointError(
                f"{printable(whose)} {nonfinite_text(tensor)}, so it cannot be trained: {remedy}"
            )


@contextlib.contextmanager
def _same_parameters(device: torch.device) -> Iterator[None]:
    """A context in which ``module.to(device)`` keeps the Parameter objects of a module.

    For some device types torch creates a new parameter for each name instead, so that tied parameters would be
    separated.
    """
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
    """Return a line about tensors that the weight files of ``chain`` lack, and a line about unused tensors in these
    files.

    Each line is left out if there are no such tensors. Raises :class:`CheckpointError` if the files do not belong to
    the model.
    """
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
    wanted = {name: known[name] for names in chain.whole.names for name in names.values()}
    buffers = {name for name, _ in chain.model.named_buffers()}
    made = set(wanted) - set(chain.deferred.unwritten) if chain.partial_weights else set()
    return weights.check(wanted, aliases, buffers, made=made)

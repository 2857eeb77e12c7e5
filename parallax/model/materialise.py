"""The blocks of one stage with real, initialised parameters, so that no process holds more than its own stage.

A stage initialises each of its blocks from a seed of its own, so a block's weights are the same under every plan. The
price is that a block must know how to initialise itself: every module that owns parameters or buffers has
``reset_parameters`` (all of torch's do), or one of its parents inside the block has. Where that fails, the whole model
is built on the host from the same seed, and the stage keeps its part. Weights from a file are put over the initial
ones, block by block.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from parallax.model.describe import Chain
from parallax.model.weights import CheckpointWeights

logger = logging.getLogger("parallax")


def materialise(chain: Chain, start: int, stop: int, device: torch.device) -> list[nn.Module]:
    """Blocks ``start`` to ``stop`` with real, initialised parameters on ``device``."""
    return list(materialise_each(chain, range(start, stop), device))


def materialise_each(
    chain: Chain, indices: Iterable[int], device: torch.device
) -> Iterator[nn.Module]:
    """The blocks ``indices``, in rising order, one by one, for whom all do not fit at one time.

    Initialisation happens on the CPU, block by block, so that the weights depend neither on the plan nor on the
    device. A shared parameter takes the values of its first user, also where that user is in another stage, and is
    one parameter again within the stage.
    """
    weights = CheckpointWeights(chain.weights, chain.rename) if chain.weights else None
    aliases = _aliases(chain.model)
    if weights:
        shapes = {n: t.shape for n, t in chain.model.state_dict(keep_vars=True).items()}
        wanted = {name: shapes[name] for names in chain.names for name in names.values()}
        weights.check(wanted, aliases, ignored={name for name, _ in chain.model.named_buffers()})
    whole: list[nn.Module] | None = None
    if chain.initialise is None and not _initialises_by_block(chain, saved=weights is not None):
        logger.warning(
            "the model cannot be initialised block by block: building all of it on the host"
        )
        with torch.random.fork_rng(devices=[]):
            whole = _build_on_host(chain)
    made: dict[int, nn.Module] = {}
    for index in indices:
        with torch.random.fork_rng(devices=[]):
            made[index] = whole[index] if whole else _initialise(chain, index)
            for users in chain.ties.values():
                _tie(
                    users,
                    index,
                    made,
                    lambda other: whole[other] if whole else _initialise(chain, other),
                )
        if weights:
            state = made[index].state_dict(keep_vars=True)
            for inner, name in chain.names[index].items():
                weights.fill(state[inner], weights.find(name, aliases) or name)
        made[index] = made[index].to(device=device)
        yield made[index]


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Name of a shared parameter or buffer → its other names."""
    tensors = model.state_dict(keep_vars=True)
    by_identity: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_identity.setdefault(id(tensor), []).append(name)
    return {names[0]: names[1:] for names in by_identity.values() if len(names) > 1}


def _initialises_by_block(chain: Chain, *, saved: bool) -> bool:
    """Whether all blocks can, and no module around them wants to; ``saved``: parameters come from a file."""
    held = {id(module) for block in chain.blocks for module in block.module.modules()}
    around = [module for module in chain.model.modules() if id(module) not in held]
    if not saved and any(callable(getattr(module, "reset_parameters", None)) for module in around):
        return False
    return all(_initialises_itself(block.module, saved=saved) for block in chain.blocks)


def _initialises_itself(block: nn.Module, *, saved: bool) -> bool:
    def covered(module: nn.Module) -> bool:
        if callable(getattr(module, "reset_parameters", None)):
            return True
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        in_file = set(module.state_dict()) if saved else set()
        return all(name in in_file for name, _ in own) and all(
            covered(child) for child in module.children()
        )

    return covered(block)


def _initialise(chain: Chain, index: int) -> nn.Module:
    """One block on the CPU; children first, so that a parent's ``reset_parameters`` has the last word."""
    block = copy.deepcopy(chain.blocks[index].module).to_empty(device="cpu")
    torch.manual_seed(block_seed(chain.seed, index))
    with torch.no_grad():
        if chain.initialise is not None:
            chain.initialise(block)
        else:
            for module in reversed(list(block.modules())):
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
    return block.to(dtype=chain.dtype)


def _build_on_host(chain: Chain) -> list[nn.Module]:
    """Every block with the modules and tensors of a whole model in the place of those on the meta device."""
    torch.manual_seed(chain.seed)
    with torch.device("cpu"):
        model = chain.factory()
    model.to(dtype=chain.dtype)
    real = dict(model.named_modules(remove_duplicate=False))
    memo: dict[int, Any] = {
        id(m): real[name] for name, m in chain.model.named_modules(remove_duplicate=False)
    }
    values = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name, tensor in [*chain.model.named_parameters(), *chain.model.named_buffers()]:
        memo[id(tensor)] = values[name]
    blocks: list[nn.Module] = []
    used: set[int] = set()
    for block in chain.blocks:
        found = copy.deepcopy(block.module, memo)
        inside = {id(module) for module in found.modules()}
        # A module that runs in several blocks.
        blocks.append(copy.deepcopy(found) if inside & used else found)
        used |= inside
    return blocks


def _tie(
    users: Sequence[tuple[int, str]],
    index: int,
    made: dict[int, nn.Module],
    other: Callable[[int], nn.Module],
) -> None:
    """Give the block ``index``, the latest of those ``made``, the parameter that ``users`` share; ``other`` makes a
    block of another stage."""
    inside = [(i, name) for i, name in users if i in made]
    names = [name for i, name in inside if i == index]
    if not names:
        return
    kept = made[inside[0][0]].get_parameter(inside[0][1])
    if inside[0][0] == index and users[0][0] != index:
        with torch.no_grad():
            kept.copy_(other(users[0][0]).get_parameter(users[0][1]))
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(made[index].get_submodule(owner), leaf, kept)


def block_seed(seed: int, *where: int) -> int:
    """A 63-bit seed for one place (block, step, rows …), unrelated between places."""
    digest = hashlib.blake2b(repr((seed, *where)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1

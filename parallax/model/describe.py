"""A module becomes a chain of blocks, built so that no process holds more than its own stage.

The model is built once on the meta device (shapes, no bytes). A stage then materialises only its own blocks and
initialises each from a seed of its own, so a block's weights are the same under every plan. The price is that a
block must know how to initialise itself: every module that owns parameters or buffers has ``reset_parameters``
(all of torch's do), or one of its parents inside the block has. Where that fails, the whole model is built on the
host from the same seed, and the stage keeps its part.
"""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from parallax.errors import DescribeError

logger = logging.getLogger("parallax")

ModelFactory = Callable[[], nn.Module]

SPLIT_HELP = (
    "give the model a method blocks() that returns its parts in the order that data flows, "
    "e.g. `def blocks(self): return [self.embed, *self.layers, self.head]`, "
    "or name them: model.blocks='[embed,layers.*,head]'"
)


@dataclass(frozen=True)
class Block:
    """A piece of the model on the meta device: its name in the model and the module itself."""

    name: str
    module: nn.Module

    @property
    def prefix(self) -> str:
        """What stands before a parameter's name inside the block to give its name in the model."""
        return f"{self.name}." if self.name else ""


@dataclass(frozen=True)
class Chain:
    """The blocks of a model in order.

    ``ties`` maps the model-wide name of each parameter that several blocks share, as its first user calls it, to
    all its users as ``(block index, name inside the block)``.
    """

    factory: ModelFactory
    blocks: tuple[Block, ...]
    ties: dict[str, tuple[tuple[int, str], ...]]
    seed: int
    dtype: torch.dtype

    def fingerprint(self) -> str:
        """A hash of structure and shapes: equal for two models that cost the same and hold the same names."""
        text = [str(self.dtype)]
        for block in self.blocks:
            text.append(f"{block.name}|{block.module!r}")
            text += [f"{n}{tuple(t.shape)}" for n, t in block.module.state_dict(keep_vars=True).items()]
        return hashlib.sha256("\n".join([*text, *sorted(self.ties)]).encode()).hexdigest()[:16]


def describe(
    factory: ModelFactory, *, seed: int = 1, dtype: torch.dtype = torch.float32, blocks: Sequence[str] = ()
) -> Chain:
    """Build ``factory()`` on the meta device and cut it into blocks.

    In order: the module paths in ``blocks``; the module's own ``blocks()``; the children of an ``nn.Sequential``.
    Raises :class:`DescribeError` with the lines to write where none of them applies.
    """
    model = build_on_meta(factory)
    modules = _named_blocks(model, blocks) if blocks else _own_blocks(model)
    names = {id(module): name for name, module in model.named_modules()}
    for module in modules:
        if id(module) not in names:
            raise DescribeError(f"blocks() of {_kind(model)} returned a {_kind(module)} that is not part of the model")
    chain = tuple(Block(names[id(module)], module) for module in modules)
    _check_cover(model, chain)
    return Chain(factory, chain, _find_ties(chain), seed, dtype)


def build_on_meta(factory: ModelFactory) -> nn.Module:
    """Call the factory with the meta device as default; a factory that insists on bytes is refused."""
    try:
        with torch.device("meta"):
            model = factory()
    except RuntimeError as error:
        raise DescribeError(
            f"the model factory cannot build on the meta device, which has shapes but no values: "
            f"{str(error).splitlines()[0]}; let it compute nothing from the values of tensors"
        ) from error
    if not isinstance(model, nn.Module):
        raise DescribeError(f"the model factory returned a {type(model).__name__}; it must return an nn.Module")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_meta:
            raise DescribeError(
                f"{name} of {_kind(model)} was built on {tensor.device}: let the factory build without an explicit "
                "device, so that a stage can be built without the rest of the model"
            )
    return model


def materialise(chain: Chain, start: int, stop: int, device: torch.device) -> list[nn.Module]:
    """Blocks ``start`` to ``stop`` with real, initialised parameters on ``device``."""
    return list(materialise_each(chain, range(start, stop), device))


def materialise_each(chain: Chain, indices: Iterable[int], device: torch.device) -> Iterator[nn.Module]:
    """The blocks ``indices``, in rising order, one by one, for whom all do not fit at one time.

    Initialisation happens on the CPU, block by block, so that the weights depend neither on the plan nor on the
    device. A shared parameter takes the values of its first user, also where that user is in another stage, and is
    one parameter again within the stage.
    """
    whole: list[nn.Module] | None = None
    if not all(_initialises_itself(block.module) for block in chain.blocks):
        logger.warning("the model cannot be initialised block by block: building all of it on the host")
        with torch.random.fork_rng(devices=[]):
            whole = _build_on_host(chain)
    made: dict[int, nn.Module] = {}
    for index in indices:
        with torch.random.fork_rng(devices=[]):
            made[index] = whole[index] if whole else _initialise(chain, index)
            for users in chain.ties.values():
                _tie(users, index, made, lambda other: whole[other] if whole else _initialise(chain, other))
        made[index] = made[index].to(device=device)
        yield made[index]


def parameter_names(chain: Chain, indices: Iterable[int]) -> dict[str, tuple[int, str]]:
    """Model-wide name → (block, name inside) of each parameter and buffer of the blocks ``indices``; a shared one has
    one name."""
    shared = {user: name for name, users in chain.ties.items() for user in users}
    names: dict[str, tuple[int, str]] = {}
    for i in indices:
        block = chain.blocks[i]
        for inner in block.module.state_dict():
            names.setdefault(shared.get((i, inner), block.prefix + inner), (i, inner))
    return names


def _own_blocks(model: nn.Module) -> list[nn.Module]:
    blocks = getattr(model, "blocks", None)
    if callable(blocks):
        returned = blocks()
        found = list(returned) if isinstance(returned, Iterable) else []
        if not found or not all(isinstance(module, nn.Module) for module in found):
            raise DescribeError(f"blocks() of {_kind(model)} must return modules, at least one; got {returned!r:.80}")
        return found
    if isinstance(model, nn.Sequential) and len(model) > 0:
        return list(model)
    raise DescribeError(f"{_kind(model)} is no chain of blocks: {SPLIT_HELP}")


def _named_blocks(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    named = dict(model.named_modules())
    found: list[nn.Module] = []
    for pattern in patterns:
        depth = pattern.count(".")
        matches = [name for name in named if name.count(".") == depth and fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise DescribeError(
                f"model.blocks: {pattern} matches no module of {_kind(model)}; it has "
                f"{', '.join(name for name in named if name and '.' not in name)}"
            )
        found += [named[name] for name in matches]
    return found


def _check_cover(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Every parameter and buffer lies in a block, and no module in two."""
    seen: dict[int, str] = {}
    for block in blocks:
        for module in block.module.modules():
            if id(module) in seen:
                raise DescribeError(
                    f"{_kind(module)} is in block {seen[id(module)]} and in block {block.name}: "
                    "a module belongs to one block; share the parameter instead of the module"
                )
            seen[id(module)] = block.name
    for name, module in model.named_modules():
        own = [n for n, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]]
        if id(module) not in seen and own:
            raise DescribeError(f"{name + '.' if name else ''}{own[0]} is in no block: {SPLIT_HELP}")


def _find_ties(blocks: Sequence[Block]) -> dict[str, tuple[tuple[int, str], ...]]:
    users: dict[int, list[tuple[int, str]]] = {}
    for i, block in enumerate(blocks):
        for name, parameter in block.module.named_parameters(remove_duplicate=False):
            users.setdefault(id(parameter), []).append((i, name))
    shared = [found for found in users.values() if len(found) > 1]
    return {blocks[found[0][0]].prefix + found[0][1]: tuple(found) for found in shared}


def _initialises_itself(block: nn.Module) -> bool:
    def covered(module: nn.Module) -> bool:
        if callable(getattr(module, "reset_parameters", None)):
            return True
        owns = next(module.named_parameters(recurse=False), None) or next(module.named_buffers(recurse=False), None)
        return owns is None and all(covered(child) for child in module.children())

    return covered(block)


def _initialise(chain: Chain, index: int) -> nn.Module:
    """One block on the CPU; children first, so that a parent's ``reset_parameters`` has the last word."""
    block = copy.deepcopy(chain.blocks[index].module).to_empty(device="cpu")
    torch.manual_seed(block_seed(chain.seed, index))
    with torch.no_grad():
        for module in reversed(list(block.modules())):
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    return block.to(dtype=chain.dtype)


def _build_on_host(chain: Chain) -> list[nn.Module]:
    torch.manual_seed(chain.seed)
    with torch.device("cpu"):
        model = chain.factory()
    named = dict(model.named_modules())
    return [named[block.name].to(dtype=chain.dtype) for block in chain.blocks]


def _tie(
    users: Sequence[tuple[int, str]], index: int, made: dict[int, nn.Module], other: Callable[[int], nn.Module]
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


def as_tuple(value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a block took or returned as a tuple of tensors."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple | list) and all(isinstance(part, Tensor) for part in value):
        return tuple(value)
    raise DescribeError(f"a block returned {type(value).__name__}; it must return a tensor or a tuple of tensors")


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def tie_costs(chain: Chain) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Bytes of each parameter that several blocks share, and those blocks."""
    for users in chain.ties.values():
        blocks = tuple(sorted({index for index, _ in users}))
        if len(blocks) > 1:
            first, name = users[0]
            yield chain.blocks[first].module.get_parameter(name).numel() * chain.dtype.itemsize, blocks


class Found(Protocol):
    """What is known of a block, its outputs among it."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the next block takes."""


_Found = TypeVar("_Found", bound=Found)


def block_by_block(
    chain: Chain, entering: tuple[Tensor, ...], find: Callable[[int, tuple[Tensor, ...], bool], _Found]
) -> list[_Found]:
    """What ``find(index, entering, last)`` says of every block; the outputs of each are the inputs of the next. It is
    asked once for blocks that look the same."""
    known: dict[str, _Found] = {}
    found = []
    for index, block in enumerate(chain.blocks):
        last = index == len(chain.blocks) - 1
        seen = look(block.module, entering) + (" first" if index == 0 else "") + (" with loss" if last else "")
        if seen not in known:
            known[seen] = find(index, entering, last)
        found.append(known[seen])
        entering = known[seen].outputs
    return found


def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    """Equal for blocks that cost the same."""
    shapes = [f"{name}{tuple(tensor.shape)}" for name, tensor in module.state_dict(keep_vars=True).items()]
    entering = [f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in inputs]
    return "|".join([repr(module), *shapes, *entering])

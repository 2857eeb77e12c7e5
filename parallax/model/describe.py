"""A module becomes a chain of blocks, built so that no process holds more than its own stage.

The model is built once on the meta device (shapes, no bytes). A stage then materialises only its own blocks and
initialises each from a seed of its own, so a block's weights are the same under every plan. The price is that a
block must know how to initialise itself: every module that owns parameters or buffers has ``reset_parameters``
(all of torch's do), or one of its parents inside the block has. Where that fails, the whole model is built on the
host from the same seed, and the stage keeps its part. Weights from a file are put over the initial ones, block by
block.

A parameter is known by its name in the model. A block's module need not be part of the model, so names are found by
identity: the block holds the very tensors that the model holds.
"""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from parallax.errors import DescribeError
from parallax.model.block import Block, Cut, rebuild
from parallax.model.families import cut_family
from parallax.model.recording.cut import cut_trace
from parallax.model.recording.trace import Sample
from parallax.model.weights import CheckpointWeights

logger = logging.getLogger("parallax")

ModelFactory = Callable[[], nn.Module]

SPLIT_HELP = (
    "give the model a method blocks() that returns its parts in the order that data flows, "
    "e.g. `def blocks(self): return [self.embed, *self.layers, self.head]`, "
    "or name them: model.blocks='[embed,layers.*,head]'"
)


@dataclass(frozen=True)
class Chain:
    """The blocks of a model in order.

    ``ties`` maps the model-wide name of each parameter that several blocks share to all its users as ``(block index,
    name inside the block)``, the first one first. ``model`` is the whole on the meta device, whose tensors the
    blocks hold. ``weights`` is where values come from, a safetensors file or a folder of them; None: a seed.
    """

    factory: ModelFactory
    blocks: tuple[Block, ...]
    ties: dict[str, tuple[tuple[int, str], ...]]
    seed: int
    dtype: torch.dtype
    model: nn.Module = field(repr=False)
    inputs: tuple[str, ...] = ()
    template: Any = None
    initialise: Callable[[nn.Module], None] | None = None
    rename: Callable[[str], str] = str
    weights: Path | None = None

    def fingerprint(self) -> str:
        """A hash of structure and shapes: equal for two models that cost the same and hold the same names."""
        text = [str(self.dtype)]
        for block in self.blocks:
            text.append(f"{block.name}|{block.module!r}")
            text += [
                f"{n}{tuple(t.shape)}" for n, t in block.module.state_dict(keep_vars=True).items()
            ]
        return hashlib.sha256("\n".join([*text, *sorted(self.ties)]).encode()).hexdigest()[:16]

    def arguments(
        self, value: Tensor | Sequence[Tensor] | Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """A model's inputs as the first block takes them: a tensor, some in order, or some by name."""
        if not isinstance(value, Mapping):
            return as_tuple(value)
        names = self.inputs or tuple(inspect.signature(self.blocks[0].module.forward).parameters)
        unknown, given = sorted(set(value) - set(names)), [name for name in names if name in value]
        if unknown or given != list(names[: len(given)]) or not given:
            raise DescribeError(
                f"inputs are {', '.join(value) or 'none'}, and the model takes {', '.join(names)}: the last may be "
                "left out, none may be added; describe the model with a sample of the inputs that it is to be given"
            )
        return as_tuple([value[name] for name in given])

    def results(self, outputs: tuple[Tensor, ...]) -> Any:
        """The last block's outputs as the model returns them, which is what the loss is given."""
        if self.template is not None:
            return rebuild(self.template, outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    @cached_property
    def names(self) -> tuple[dict[str, str], ...]:
        """For each block: name inside → name in the model, of its parameters and persistent buffers."""
        found: dict[int, str] = {}
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            found.setdefault(id(tensor), name)
        return tuple(
            {
                inner: found[id(t)]
                for inner, t in block.module.state_dict(keep_vars=True).items()
                if id(t) in found
            }
            for block in self.blocks
        )


def describe(
    factory: ModelFactory,
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    blocks: Sequence[str] = (),
    sample: Sample | None = None,
    weights: str | Path | None = None,
) -> Chain:
    """Build ``factory()`` on the meta device and cut it into blocks.

    In order: the module paths in ``blocks``; the module's own ``blocks()``; the children of an ``nn.Sequential``; the
    families of transformers in :mod:`parallax.model.families`; the program of its ``forward``, recorded
    (:mod:`parallax.model.recording.trace`). ``sample(n)`` gives inputs of n rows, of which only shape and type are
    used; a recorded program is then cut where the fewest bytes pass, and it is known which tensors have no rows.

    ``weights``: a safetensors file or a folder of them, with the model's names. Raises :class:`DescribeError` with the
    lines to write where none of the ways applies.
    """
    model = build_on_meta(factory)
    cut = _cut(model, blocks, sample)
    _check_cover(model, cut.blocks)
    return Chain(
        factory=factory,
        blocks=cut.blocks,
        ties=_find_ties(model, cut.blocks),
        seed=seed,
        dtype=dtype,
        model=model,
        inputs=cut.inputs,
        template=cut.template,
        initialise=cut.initialise,
        rename=cut.rename,
        weights=Path(weights).expanduser() if weights else None,
    )


def _cut(model: nn.Module, blocks: Sequence[str], sample: Sample | None) -> Cut:
    names = {id(module): name for name, module in model.named_modules()}
    modules = _named_blocks(model, blocks) if blocks else _own_blocks(model)
    for module in modules or ():
        if id(module) not in names:
            raise DescribeError(
                f"blocks() of {_kind(model)} returned a {_kind(module)} that is not part of the model"
            )
    if modules is not None:
        _check_apart(names, modules)
        return Cut(tuple(Block(names[id(module)], module) for module in modules))
    return cut_family(model) or cut_trace(model, sample)


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
        raise DescribeError(
            f"the model factory returned a {type(model).__name__}; it must return an nn.Module"
        )
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


def parameter_names(chain: Chain, indices: Iterable[int]) -> dict[str, tuple[int, str]]:
    """Model-wide name → (block, name inside) of each parameter and buffer of the blocks ``indices``; a shared one has
    one name."""
    names: dict[str, tuple[int, str]] = {}
    for i in indices:
        for inner, name in chain.names[i].items():
            names.setdefault(name, (i, inner))
    return names


def _own_blocks(model: nn.Module) -> list[nn.Module] | None:
    blocks = getattr(model, "blocks", None)
    if callable(blocks):
        returned = blocks()
        found = list(returned) if isinstance(returned, Iterable) else []
        if not found or not all(isinstance(module, nn.Module) for module in found):
            raise DescribeError(
                f"blocks() of {_kind(model)} must return modules, at least one; got {returned!r:.80}"
            )
        return found
    if isinstance(model, nn.Sequential) and len(model) > 0:
        return list(model)
    return None


def _named_blocks(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    named = dict(model.named_modules())
    found: list[nn.Module] = []
    for pattern in patterns:
        depth = pattern.count(".")
        matches = [
            name
            for name in named
            if name.count(".") == depth and fnmatch.fnmatchcase(name, pattern)
        ]
        if not matches:
            raise DescribeError(
                f"model.blocks: {pattern} matches no module of {_kind(model)}; it has "
                f"{', '.join(name for name in named if name and '.' not in name)}"
            )
        found += [named[name] for name in matches]
    return found


def _check_apart(names: Mapping[int, str], modules: Sequence[nn.Module]) -> None:
    """No module lies in two blocks that the user named."""
    seen: dict[int, str] = {}
    for block in modules:
        for module in block.modules():
            if id(module) in seen:
                raise DescribeError(
                    f"{_kind(module)} is in block {seen[id(module)]} and in block {names[id(block)]}: "
                    "a module belongs to one block; share the parameter instead of the module"
                )
            seen[id(module)] = names[id(block)]


def _check_cover(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Every parameter and buffer lies in a block."""
    held = {id(t) for b in blocks for t in [*b.module.parameters(), *b.module.buffers()]}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in held:
            raise DescribeError(f"{name} is in no block: {SPLIT_HELP}")


def _find_ties(model: nn.Module, blocks: Sequence[Block]) -> dict[str, tuple[tuple[int, str], ...]]:
    users: dict[int, list[tuple[int, str]]] = {}
    for i, block in enumerate(blocks):
        for name, parameter in block.module.named_parameters(remove_duplicate=False):
            users.setdefault(id(parameter), []).append((i, name))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[key]: tuple(found) for key, found in users.items() if len(found) > 1}


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


def as_tuple(value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a block took or returned as a tuple of tensors."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple | list) and all(isinstance(part, Tensor) for part in value):
        return tuple(value)
    raise DescribeError(
        f"a block returned {type(value).__name__}; it must return a tensor or a tuple of tensors"
    )


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def tie_costs(chain: Chain) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Bytes of each parameter that several blocks share, and those blocks."""
    for users in chain.ties.values():
        blocks = tuple(sorted({index for index, _ in users}))
        if len(blocks) > 1:
            first, name = users[0]
            yield (
                chain.blocks[first].module.get_parameter(name).numel() * chain.dtype.itemsize,
                blocks,
            )


class BlockFindings(Protocol):
    """What is known of a block, its outputs among it."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the next block takes."""


_Found = TypeVar("_Found", bound=BlockFindings)


def block_by_block(
    chain: Chain,
    entering: tuple[Tensor, ...],
    find: Callable[[int, tuple[Tensor, ...], bool], _Found],
) -> list[_Found]:
    """What ``find(index, entering, last)`` says of every block; the outputs of each are the inputs of the next. It is
    asked once for blocks that look the same."""
    known: dict[str, _Found] = {}
    found = []
    for index, block in enumerate(chain.blocks):
        last = index == len(chain.blocks) - 1
        seen = (
            look(block.module, entering)
            + (" first" if index == 0 else "")
            + (" with loss" if last else "")
        )
        if seen not in known:
            known[seen] = find(index, entering, last)
        found.append(known[seen])
        entering = known[seen].outputs
    return found


def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    """Equal for blocks that cost the same."""
    shapes = [
        f"{name}{tuple(tensor.shape)}" for name, tensor in module.state_dict(keep_vars=True).items()
    ]
    entering = [f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in inputs]
    return "|".join([repr(module), *shapes, *entering])

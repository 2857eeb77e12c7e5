"""Describe a module as a chain of blocks on the meta device, without allocating memory.

The model's constructor runs once, on the meta device (:mod:`parallax.model.construction`).
:mod:`parallax.model.materialise` creates the blocks of one stage with values.

A parameter is identified by its name in the model. A block's module need not be part of the model, but it holds the
model's own tensors, so a tensor's name is found by object identity.
"""

from __future__ import annotations

import fnmatch
import hashlib
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from parallax.errors import ConfigError, DescribeError, printable
from parallax.model.block import RAGGED_HELP, Block, Partition, leaves, module_repr, rebuild
from parallax.model.construction.deferred import DeferredModel, ModelFactory, deferred_init
from parallax.model.construction.weights import FileLayout, OwnLayout
from parallax.model.layer import WAY_OUT, LayerOutput, layer_named
from parallax.model.pretrained import layout_of
from parallax.model.recording.inputs import Sample
from parallax.model.recording.record import FUSED, trace_and_partition
from parallax.plan.task import PlanTask

logger = logging.getLogger("parallax")

SPLIT_HELP = (
    "give the model a method blocks() that returns its parts in the order that data flows, "
    "e.g. `def blocks(self): return [self.embed, *self.layers, self.head]`, "
    "or name them: model.blocks='[embed,layers.*,head]'"
)


@dataclass(frozen=True)
class Chain:
    """The blocks of a model in order.

    ``model`` is the whole model on the meta device. The blocks hold its tensors, and ``deferred`` creates their values.
    ``ties`` describes the parameters that are used several times. It maps the name in the model to the uses, each as
    ``(block index, name inside the block)``, the first use first. ``nest``: paths of the tensors in nested inputs.

    ``weights``: a safetensors file, or a folder of such files, with initial values; None: the constructor creates all
    values. ``layout``: how these files name and store the model's tensors. ``partial_weights``: the files may lack
    tensors, whose values the constructor then creates.

    ``base``: a text that identifies the source of the frozen parameters and is equal whenever the model is built.
    Checkpoints of such a model omit its frozen parameters. If the text is empty, checkpoints hold all parameters.

    ``whole_model``: the chain that is trained, if this chain ends at the output of an inner module, or has other blocks
    for a task without training; otherwise None. ``trains``: False for a chain that was recorded in evaluation only.
    """

    deferred: DeferredModel = field(repr=False)
    blocks: tuple[Block, ...]
    ties: dict[str, tuple[tuple[int, str], ...]]
    seed: int
    dtype: torch.dtype
    inputs: tuple[str, ...] = ()
    nest: tuple[tuple[Any, ...], ...] = ()
    template: Any = None
    sizes: tuple[tuple[int | None, ...], ...] = ()
    layout: FileLayout = field(default_factory=OwnLayout, repr=False)
    weights: Path | None = None
    partial_weights: bool = False
    base: str = ""
    whole_model: Chain | None = field(default=None, repr=False)
    trains: bool = True

    @property
    def whole(self) -> Chain:
        """The chain that is trained, which has all blocks of the model."""
        return self.whole_model or self

    @property
    def model(self) -> nn.Module:
        return self.deferred.model

    def fingerprint(self) -> str:
        """Return a hash of the dtype, the blocks, the shapes of their tensors, ties and frozen parameters.

        Chains with equal hashes have equal costs and names.
        """
        text = [str(self.dtype)]
        for block in self.blocks:
            kinds = [f"{name}: {type(m).__qualname__}" for name, m in block.module.named_modules()]
            text.append(f"{block.name}|{module_repr(block.module) or kinds}")
            text += [
                f"{n}{tuple(t.shape)}" for n, t in block.module.state_dict(keep_vars=True).items()
            ]
        text += [*sorted(self.ties), *(f"{name} is frozen" for name in sorted(self.frozen))]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def structure(self) -> str:
        """Return a hash of the model's modules, the names and shapes of its weights, ties and frozen parameters.

        Unlike :meth:`fingerprint`, it does not depend on the number format. The recorded blocks, which may differ
        between number formats, are not part of it.
        """
        model = self.model
        text = [f"{name}: {type(module).__qualname__}" for name, module in model.named_modules()]
        text += [f"{n}{tuple(t.shape)}" for n, t in model.state_dict(keep_vars=True).items()]
        text += [*sorted(self.ties), *(f"{name} is frozen" for name in sorted(self.frozen))]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]

    def arguments(self, value: Any) -> tuple[Tensor, ...]:
        """Return the model's inputs as a tuple of tensors for the first block.

        ``value``: a tensor, a sequence or mapping of tensors, or a nest with the structure of the sample.
        """
        found = self._tensors(value)
        for tensor, sizes in zip(found, self.sizes):
            wrong = len(sizes) != tensor.ndim or any(
                size not in (None, have) for size, have in zip(sizes, tensor.shape)
            )
            if wrong:
                wanted = ", ".join("any" if size is None else str(size) for size in sizes)
                raise DescribeError(
                    f"an input has shape {tuple(tensor.shape)}, but the model was recorded for ({wanted}): describe it "
                    "with a sample of the inputs that you train on"
                )
        return found

    def _tensors(self, value: Any) -> tuple[Tensor, ...]:
        if self.nest:
            return self._unpacked(value)
        if not isinstance(value, Mapping):
            return _given(value)
        first = self.whole.blocks[0].module
        names = self.inputs or tuple(inspect.signature(first.forward).parameters)
        unknown, given = sorted(set(value) - set(names)), [name for name in names if name in value]
        if unknown or given != list(names[: len(given)]) or not given:
            raise DescribeError(
                f"inputs are {', '.join(value) or 'none'}, but the model takes {', '.join(names)}: you may omit the "
                "last ones and add none; describe the model with a sample of the inputs that you train on"
            )
        return _given([value[name] for name in given])

    def _unpacked(self, value: Any) -> tuple[Tensor, ...]:
        found = [(path, part) for path, part in leaves(value) if isinstance(part, Tensor)]
        if tuple(path for path, _ in found) != self.nest:
            names = [
                [".".join(map(str, path)) for path in paths] for paths in (dict(found), self.nest)
            ]
            raise DescribeError(
                f"inputs are {', '.join(names[0]) or 'none'}, but the model was described with {', '.join(names[1])}: "
                "describe it with a sample of the inputs that you train on"
            )
        return tuple(part for _, part in found)

    def results(self, outputs: tuple[Tensor, ...]) -> Any:
        """Return the last block's outputs in the structure of the model's return value, which the loss expects."""
        if self.template is not None:
            return rebuild(self.template, outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    @property
    def left_out(self) -> frozenset[str]:
        """Names of the parameters that checkpoints omit."""
        return self.frozen if self.base else frozenset()

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that are not trained."""
        return frozenset(n for n, p in self.model.named_parameters() if not p.requires_grad)

    @cached_property
    def names(self) -> tuple[dict[str, str], ...]:
        """For each block, {name inside the block: name in the model} for parameters and persistent buffers."""
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
    partial_weights: bool = False,
    base: str = "",
    layer: str = "",
    task: PlanTask = PlanTask.TRAINING,
) -> Chain:
    """Build ``factory()`` on the meta device, partition it into blocks, and return the chain.

    The blocks come from the first of these sources that applies: the module paths in ``blocks``; the model's method
    ``blocks()``; the children of an ``nn.Sequential``; the model's forward, which is recorded on fake tensors
    (:mod:`parallax.model.recording`) and partitioned at boundaries that few bytes cross. Raises :class:`DescribeError`
    with the lines to write if none applies.

    ``sample(n)``        returns inputs of n rows, of which only shapes and dtypes are used
    ``weights``          a safetensors file, or a folder of such files, whose tensors have the model's names
    ``partial_weights``  the files may lack tensors, such as those of a new head, and hold unused ones
                         (:func:`~parallax.model.materialise.check_weights` lists both)
    ``base``             see :class:`Chain`
    ``layer``            name of an inner module, at whose output the chain ends; empty: it ends at the model's output
    ``task``             for a task without training, a model whose forward differs in evaluation is recorded in
                         evaluation. For inference, attention layers that torch computes with one fused kernel are not
                         divided, so that outputs are bit-identical to those of this kernel.
    """
    deferred = deferred_init(factory, seed)
    model = deferred.model
    if deferred.unwritten and not weights:
        name, *more = deferred.unwritten
        raise DescribeError(
            f"{name}{f' and {len(more)} more' if more else ''} of {_kind(model)} was never written by its constructor; "
            "initialize it there (torch.empty has no values), or give a file of weights"
        )
    layer = layer and layer_named(model, layer)
    partition = _partition(deferred, blocks, sample, dtype, evaluates_later=not task.trains)
    _check_cover(model, partition.blocks)
    chain = Chain(
        deferred=deferred,
        blocks=partition.blocks,
        ties=_find_ties(model, partition.blocks),
        seed=seed,
        dtype=dtype,
        inputs=partition.inputs,
        nest=partition.nest,
        template=partition.template,
        sizes=partition.sizes,
        layout=layout_of(model),
        weights=Path(weights).expanduser() if weights else None,
        partial_weights=partial_weights,
        base=base,
    )
    fused = task is PlanTask.INFERENCE and any(isinstance(m, FUSED) for m in model.modules())
    if not layer and (task.trains or (partition.evaluates and not fused)):
        return chain
    return _ending(chain, _partition(deferred, blocks, sample, dtype, layer, task=task))


def _ending(chain: Chain, partition: Partition) -> Chain:
    """Return a copy of ``chain`` with the blocks in ``partition``, and with ``chain`` as its ``whole_model``.

    The blocks are the whole model, or its part up to an inner module.
    """
    return replace(
        chain,
        blocks=partition.blocks,
        ties=_find_ties(chain.model, partition.blocks),
        template=partition.template,
        sizes=partition.sizes,
        trains=partition.trains,
        whole_model=chain,
    )


def _partition(
    deferred: DeferredModel,
    blocks: Sequence[str],
    sample: Sample | None,
    dtype: torch.dtype,
    layer: str = "",
    *,
    task: PlanTask = PlanTask.TRAINING,
    evaluates_later: bool = False,
) -> Partition:
    """Return the partition of the model of ``deferred`` into blocks, up to the output of ``layer`` if it is not empty.

    The other arguments are those of :func:`describe`.
    """
    model = deferred.model
    names = {id(module): name for name, module in model.named_modules()}
    modules = _named_blocks(model, blocks) if blocks else _own_blocks(model)
    for module in modules or ():
        if id(module) not in names:
            raise DescribeError(
                f"blocks() of {_kind(model)} returned a {_kind(module)} that is not part of the model"
            )
    if modules is not None:
        _check_apart(names, modules)
        blocks_ = tuple(Block(names[id(module)], module) for module in modules)
        return Partition(_blocks_to(layer, model, blocks_) if layer else blocks_)
    value_of = partial(_value, deferred, dtype)
    return trace_and_partition(
        model, sample, dtype, value_of, layer, task=task, evaluates_later=evaluates_later
    )


def _blocks_to(layer: str, model: nn.Module, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return the blocks up to the one that contains the module ``layer``.

    This last block returns the module's output.
    """
    wanted = model.get_submodule(layer)
    for index, block in enumerate(blocks):
        for inner, part in block.module.named_modules():
            if part is wanted:
                last = LayerOutput(block.module, inner, layer, flat=True)
                return (*blocks[:index], Block(block.name, last))
    raise ConfigError(
        f"--layer {printable(layer)}: it is in no block of {_kind(model)}, which are "
        f"{', '.join(block.name for block in blocks)}: {WAY_OUT}"
    )


def _value(deferred: DeferredModel, dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return the real value of ``tensor``, a tensor of the model on the meta device, as the model's constructor
    computes it.
    """
    alone = nn.Module()
    alone.register_buffer("value", tensor)
    made: Tensor = deferred.values().deepcopy_memo(alone, dtype, {})[id(tensor)]
    return made


def parameter_names(chain: Chain, indices: Iterable[int]) -> dict[str, tuple[int, str]]:
    """Return {name in the model: (block, name inside the block)} for the parameters and buffers of the blocks
    ``indices``.

    A tensor that several of these blocks share appears once, with the first of them.
    """
    names: dict[str, tuple[int, str]] = {}
    for i in indices:
        for inner, name in chain.names[i].items():
            names.setdefault(name, (i, inner))
    return names


def _own_blocks(model: nn.Module) -> list[nn.Module] | None:
    blocks = getattr(model, "blocks", None)
    if inspect.ismethod(blocks) or inspect.isfunction(blocks):
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
    """Raise :class:`DescribeError` if a module is in two of the user-defined blocks ``modules``.

    ``names``: {id of a block's module: its name in the model}.
    """
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
    """Raise :class:`DescribeError` if a parameter or buffer of the model is in no block."""
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


def as_tuple(value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a block's inputs or outputs as a tuple of tensors. Raises :class:`DescribeError` for other values."""
    if isinstance(value, PackedSequence):
        raise DescribeError(
            f"a block returned a PackedSequence, which stores its rows time step by time step: {RAGGED_HELP}"
        )
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple | list) and all(isinstance(part, Tensor) for part in value):
        return tuple(value)
    raise DescribeError(
        f"a block returned {type(value).__name__}; it must return a tensor or a tuple of tensors"
    )


def _given(value: Any) -> tuple[Tensor, ...]:
    """Return a model's inputs as a tuple of tensors. Raises :class:`DescribeError` for other values."""
    parts = [value] if isinstance(value, Tensor) else value
    if isinstance(parts, tuple | list) and all(isinstance(part, Tensor) for part in parts):
        return tuple(parts)
    kinds = ", ".join(
        dict.fromkeys(
            type(part).__name__ for _, part in leaves(value) if not isinstance(part, Tensor)
        )
    )
    raise DescribeError(
        f"inputs are {type(value).__name__}{f' with {kinds} in it' if kinds else ''}; modules in sequence take "
        "tensors, in order or by name: leave out other values, or give a sample so that the model's forward is recorded"
    )


def _kind(module: nn.Module) -> str:
    return type(module).__name__

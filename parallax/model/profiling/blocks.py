"""Code that both profilers share: sizes of blocks, iteration over distinct blocks, and a loss over the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from parallax.model.block import module_repr
from parallax.model.describe import Chain
from parallax.model.recurrent import recurrent_weights


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a block in the chain's number format.

    ``parameters``       the number of parameters
    ``parameter_bytes``  the bytes of all parameters
    ``frozen_bytes``     the bytes of the frozen parameters
    ``largest_bytes``    the bytes of the largest trained parameter
    ``buffer_bytes``     twice the bytes of all buffers, because a copy is kept to undo a step

    Buffers that are not floating-point keep their dtype.
    """

    parameters: int
    parameter_bytes: int
    frozen_bytes: int
    largest_bytes: int
    buffer_bytes: int

    @classmethod
    def of(cls, chain: Chain, index: int) -> BlockSizes:
        module, dtype = chain.blocks[index].module, chain.dtype
        counts = [parameter.numel() for parameter in module.parameters()]
        trained = [p.numel() for p in module.parameters() if p.requires_grad]
        return cls(
            parameters=sum(counts),
            parameter_bytes=sum(counts) * dtype.itemsize,
            frozen_bytes=(sum(counts) - sum(trained)) * dtype.itemsize,
            largest_bytes=max(trained, default=0) * dtype.itemsize,
            buffer_bytes=2  # a copy from before the step, to restore if it is skipped
            * sum(
                buffer.numel() * (dtype if buffer.is_floating_point() else buffer.dtype).itemsize
                for buffer in module.buffers()
            ),
        )


def tie_costs(
    chain: Chain, *, trained: bool = True, flat: bool = False
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (bytes, block indices) for each parameter that several blocks share.

    ``trained``: yield only trained parameters if True, only frozen ones if False. ``flat``: the device keeps recurrent
    weights in one buffer; also yield (bytes, block index) for the recurrent weights of each block that has any.
    """
    tied = set()
    for users in chain.ties.values():
        blocks = tuple(sorted({index for index, _ in users}))
        first, name = users[0]
        parameter = chain.blocks[first].module.get_parameter(name)
        if len(blocks) > 1:
            tied |= {chain.blocks[index].module.get_parameter(inner) for index, inner in users}
            if parameter.requires_grad == trained:
                yield parameter.numel() * chain.dtype.itemsize, blocks
    for index, block in enumerate(chain.blocks if flat else ()):
        own = recurrent_weights(block.module) - tied
        if count := sum(p.numel() for p in own if p.requires_grad == trained):
            yield count * chain.dtype.itemsize, (index,)


class BlockFindings(Protocol):
    """The interface of the result of profiling one block."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs of the block, which are the inputs of the next one."""


_Found = TypeVar("_Found", bound=BlockFindings)


def block_by_block(
    chain: Chain,
    entering: tuple[Tensor, ...],
    find: Callable[[int, tuple[Tensor, ...], bool], _Found],
) -> list[_Found]:
    """Return ``find(index, inputs, last)`` for every block of ``chain``, in order.

    The inputs of the first block are ``entering``. The inputs of any other block are the outputs of the block before
    it. ``last``: the block is the last one. ``find`` is called once for each distinct block, and its result is used for
    all equal blocks.
    """
    known: dict[str, _Found] = {}
    found = []
    for index, block in enumerate(chain.blocks):
        last = index == len(chain.blocks) - 1
        seen = (
            cost_key(block.module, entering)
            + (" first" if index == 0 else "")
            + (" with loss" if last else "")
        )
        if seen not in known:
            known[seen] = find(index, entering, last)
        found.append(known[seen])
        entering = known[seen].outputs
    return found


def cost_key(module: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    """Return a key of the block ``module`` with these ``inputs``. Equal keys mean equal costs."""
    shapes = [
        f"{name}{tuple(tensor.shape)}{'' if _is_trained(tensor) else ' frozen'}"
        for name, tensor in module.state_dict(keep_vars=True).items()
    ]
    entering = [
        f"{tensor.dtype}{tuple(tensor.shape)}{' in graph' if tensor.requires_grad else ''}"
        for tensor in inputs
    ]
    return "|".join([module_repr(module) or f"no other than {id(module)}", *shapes, *entering])


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


Outputs = tuple[int, Sequence[Tensor]]  # number of rows, and their outputs


@dataclass(frozen=True, kw_only=True)
class BatchLoss:
    """The cost of a loss over the whole batch of ``rows`` rows.

    ``outputs``: the bytes of the model's outputs for these rows. ``work``: the additional bytes that the loss needs.
    ``seconds``: the time of the loss with its backward.
    """

    rows: int
    outputs: int
    work: int
    seconds: float


NO_LOSS = BatchLoss(rows=0, outputs=0, work=0, seconds=0.0)
"""The value for a loss that is computed for each micro-batch."""


def repeat_rows(rows: int, few: Outputs, more: Outputs) -> tuple[Tensor, ...]:
    """Return outputs of ``rows`` rows, made by repeating the rows of ``more``.

    ``few`` and ``more`` are outputs of two different numbers of rows. A tensor whose length is equal in both has no row
    dimension and is not repeated.
    """

    def whole(less: Tensor, tensor: Tensor) -> Tensor:
        has_rows = tensor.shape[:1] == (more[0],) and less.shape[:1] == (few[0],)
        found = tensor.detach()
        if has_rows:
            found = found[torch.arange(rows, device=found.device) % more[0]]
        return found.clone().requires_grad_(tensor.requires_grad)

    return tuple([whole(*pair) for pair in zip(few[1], more[1])])

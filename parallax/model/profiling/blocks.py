"""What is asked of a chain's blocks one after the other, and once of those that look the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from parallax.model.block import module_repr
from parallax.model.describe import Chain


@dataclass(frozen=True)
class BlockSizes:
    """What a block holds, in the number format that the chain trains in: parameters, their bytes, those of them that
    are not trained, those of the largest one that is, and those of buffers, of which only floating-point ones are in
    that format."""

    parameters: int
    parameter_bytes: int
    frozen_bytes: int
    largest_bytes: int
    buffer_bytes: int

    @classmethod
    def of(cls, chain: Chain, index: int) -> BlockSizes:
        """Those of one block of ``chain``."""
        module, dtype = chain.blocks[index].module, chain.dtype
        counts = [parameter.numel() for parameter in module.parameters()]
        trained = [p.numel() for p in module.parameters() if p.requires_grad]
        return cls(
            parameters=sum(counts),
            parameter_bytes=sum(counts) * dtype.itemsize,
            frozen_bytes=(sum(counts) - sum(trained)) * dtype.itemsize,
            largest_bytes=max(trained, default=0) * dtype.itemsize,
            buffer_bytes=2  # as they were before the step, too, in case that it is skipped
            * sum(
                buffer.numel() * (dtype if buffer.is_floating_point() else buffer.dtype).itemsize
                for buffer in module.buffers()
            ),
        )


def tie_costs(chain: Chain, *, trained: bool = True) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Bytes of each parameter that several blocks share, and those blocks: of those that are trained, or of the
    others."""
    for users in chain.ties.values():
        blocks = tuple(sorted({index for index, _ in users}))
        first, name = users[0]
        parameter = chain.blocks[first].module.get_parameter(name)
        if len(blocks) > 1 and parameter.requires_grad == trained:
            yield parameter.numel() * chain.dtype.itemsize, blocks


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
    """Equal for blocks that cost the same."""
    shapes = [
        f"{name}{tuple(tensor.shape)}{'' if _is_trained(tensor) else ' frozen'}"
        for name, tensor in module.state_dict(keep_vars=True).items()
    ]
    entering = [f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in inputs]
    return "|".join([module_repr(module) or f"no other than {id(module)}", *shapes, *entering])


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


Outputs = tuple[int, Sequence[Tensor]]  # of so many rows


@dataclass(frozen=True, kw_only=True)
class BatchLoss:
    """Bytes of the ``outputs`` of ``rows`` rows, what the loss needs besides (``work``), and the seconds that it
    takes, with its backward."""

    rows: int
    outputs: int
    work: int
    seconds: float


NO_LOSS = BatchLoss(rows=0, outputs=0, work=0, seconds=0.0)
"""Each micro-batch has a loss of its own."""


def repeated(rows: int, few: Outputs, more: Outputs) -> tuple[Tensor, ...]:
    """Outputs of ``rows`` rows: those of a few, over and over. What is as long for ``few`` as for ``more`` rows, where
    these differ, has none."""

    def whole(less: Tensor, tensor: Tensor) -> Tensor:
        has_rows = tensor.shape[:1] == (more[0],) and less.shape[:1] == (few[0],)
        found = tensor.detach()
        if has_rows:
            found = found[torch.arange(rows, device=found.device) % more[0]]
        return found.clone().requires_grad_(tensor.requires_grad)

    return tuple([whole(*pair) for pair in zip(few[1], more[1])])

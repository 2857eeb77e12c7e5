"""What stands for streamed parameters where none stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from parallax.swap.parameters.chunks import Chunk
from parallax.swap.parameters.streamed import StreamStatistics


class NothingStreams:
    """All parameters of ``blocks``, which are gone through, stay on the device."""

    chunks: tuple[Chunk, ...] = ()
    stall_seconds = 0.0

    def __init__(self, blocks: Iterable[Iterable[nn.Parameter]] = ()) -> None:
        for _ in blocks:
            pass

    def streams(self, parameter: nn.Parameter) -> bool:  # noqa: ARG002
        return False

    def holds(self, tensor: Tensor) -> bool:  # noqa: ARG002
        """None is of such a parameter."""
        return False

    def parameters(self, block: int) -> tuple[nn.Parameter, ...]:  # noqa: ARG002
        return ()

    def attach(self, block: int, module: nn.Module) -> None:
        """There is nothing to enter."""

    def norm_terms(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def read_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad

    def read_full(self, block: int) -> list[Tensor]:  # noqa: ARG002
        return []

    def write_full(self, block: int, tensors: Sequence[Tensor]) -> None:
        """None is below."""

    def zero_gradients(self, *, set_to_none: bool = False) -> None:
        """None is below."""

    def take_statistics(self) -> StreamStatistics:
        return StreamStatistics()

    def close(self) -> None:
        """Nothing was opened."""

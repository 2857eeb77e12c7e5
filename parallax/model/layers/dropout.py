"""Dropout whose masks do not depend on the plan.

If a mask were drawn for a whole micro-batch, it would depend on the micro-batch's first row and number of rows on this
rank, so two plans would train two different models. Here each row of the global batch has its own random numbers. While
a block runs forward, calls of torch.nn.functional.dropout and its variants are replaced. The masks are computed from
(seed, step, row, block, number of the call), and are equal on every device (:mod:`parallax.model.layers.row_noise`). A
recomputation computes the same masks again.

This requires an input whose dimension 0 is the micro-batch's rows or a multiple of them (each row then has consecutive
entries), or a nested tensor.

Other random operations are not covered: the data of a PackedSequence, whose rows are interleaved; the ``dropout_p`` of
scaled_dot_product_attention, and so nn.MultiheadAttention; dropout inside nn.LSTM and nn.GRU; compiled blocks; and a
model's own torch.rand. Their random numbers depend on (seed, step, first row, block). They are equal in every run of a
plan, and under another plan with the same rows per rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parallax.model.layers.row_noise import RowNoise

Drop = Callable[["RowDropout", Tensor, float], Tensor | None]
_MODULES = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_ALPHA = (
    1.7580993408473766  # the negative limit of SELU: scale times alpha of Klambauer et al. 2017
)


@dataclass(frozen=True, slots=True)
class Draws:
    """The source of random numbers for one forward of a block.

    ``noise``  the generator of masks on the block's device
    ``seed``   the run's seed
    ``step``   the number of the step
    ``first``  the index of the micro-batch's first row on this rank, in the global batch
    ``rows``   the number of the micro-batch's rows on this rank
    ``block``  the block's index
    """

    noise: RowNoise
    seed: int
    step: int
    first: int
    rows: int
    block: int


class RowDropout(TorchFunctionMode):
    """Replaces dropout functions during one forward of a block."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws
        self._calls = 0

    @property
    def drew(self) -> bool:
        """Whether any dropout function was called in training mode with 0 < p < 1."""
        return self._calls > 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        drop = _DROPS.get(func)
        if drop is not None:
            found = self._dropped(drop, *args, **(kwargs or {}))
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))

    def _dropped(
        self,
        drop: Drop,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        train: bool = True,
    ) -> Tensor | None:
        """Return the result that ``drop`` computes in place of a dropout function; None: torch's own function must be
        called.

        The other arguments are those of the dropout function. ``F.dropout`` calls its flag ``training``,
        ``torch.dropout`` calls it ``train``.
        """
        if not (training and train and 0 < p < 1):
            return None
        self._calls += 1
        rows = self._draws.rows
        if input.is_nested and not (drop is _drop and _is_whole(input)):
            return None
        if input.dim() == 0 or rows == 0 or input.shape[0] % rows or not input.is_floating_point():
            return None
        found = drop(self, input, p)
        return input.copy_(found) if inplace and found is not None else found

    def kept(self, shape: torch.Size | tuple[int, ...], p: float) -> Tensor:
        """Return a mask of ``shape``, whose dimension 0 is the rows. An element is True with probability 1 − p."""
        count = math.prod(shape) // self._draws.rows
        return self._draws.noise.kept(self._rows(), count, p).view(shape)

    def kept_nested(self, x: Tensor, p: float) -> Tensor:
        """Return a mask with the row lengths of the nested tensor ``x``.

        An element is 1 with probability 1 − p, otherwise 0.
        """
        jagged: Any = x
        sizes = [jagged.size(d) for d in range(1, x.dim())]
        ragged = next(d for d, size in enumerate(sizes) if not isinstance(size, int))
        shapes = [
            [*sizes[:ragged], length, *sizes[ragged + 1 :]]
            for length in jagged.offsets().diff().tolist()
        ]
        found = self._draws.noise.kept_ragged(self._rows(), [*map(math.prod, shapes)], p)
        kept = torch.cat([row.view(shape) for row, shape in zip(found, shapes)], ragged)
        return torch.nested.nested_tensor_from_jagged(
            kept.to(x.dtype), jagged.offsets(), jagged_dim=ragged + 1
        )

    def _rows(self) -> list[tuple[int, ...]]:
        """Return, for each row, the key of its random numbers in this call of dropout."""
        draws = self._draws
        rows = range(draws.first, draws.first + draws.rows)
        return [(draws.seed, draws.step, row, draws.block, self._calls) for row in rows]


def _is_whole(nested: Any) -> bool:
    """Return whether ``nested`` is jagged and has no gaps between its rows."""
    return nested.layout is torch.jagged and nested.lengths() is None


def has_dropout(block: nn.Module) -> bool:
    """Return whether ``block`` contains a dropout module with p > 0."""
    return any(isinstance(module, _MODULES) and module.p > 0 for module in block.modules())


def _drop(mode: RowDropout, x: Tensor, p: float) -> Tensor:
    if x.is_nested:
        return x * mode.kept_nested(x, p) * (1 / (1 - p))
    return (x * mode.kept(x.shape, p)).mul_(1 / (1 - p))


def _drop_channels(dimensions: int) -> Drop:
    """Return a function that drops whole channels of tensors (rows, channels, …).

    ``dimensions``: the number of dimensions after rows and channels.
    """

    def drop(mode: RowDropout, x: Tensor, p: float) -> Tensor | None:
        if x.dim() != dimensions + 2:  # a single row without a batch dimension
            return None
        return (x * mode.kept(_channels(x), p)).mul_(1 / (1 - p))

    return drop


def _drop_alpha(mode: RowDropout, x: Tensor, p: float) -> Tensor:
    return _to_alpha(x, mode.kept(x.shape, p), p)


def _drop_alpha_channels(mode: RowDropout, x: Tensor, p: float) -> Tensor | None:
    return _to_alpha(x, mode.kept(_channels(x), p), p) if x.dim() > 1 else None


def _channels(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *(1,) * (x.dim() - 2))


def _to_alpha(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Return the result of alpha dropout: ``x`` with -alpha where the mask ``kept`` is False, scaled and shifted so
    that mean 0 and variance 1 are restored (Klambauer et al. 2017, section 2). ``p``: the probability of dropping a
    number."""
    scale = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    return torch.where(kept, x, -_ALPHA) * scale + _ALPHA * scale * p


_DROPS: dict[Callable[..., Any], Drop] = {
    F.dropout: _drop,
    torch.dropout: _drop,
    F.dropout1d: _drop_channels(1),
    F.dropout2d: _drop_channels(2),
    F.dropout3d: _drop_channels(3),
    F.alpha_dropout: _drop_alpha,
    F.feature_alpha_dropout: _drop_alpha_channels,
}

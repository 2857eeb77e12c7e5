"""What a model costs, block by block: data only.

A cost is affine in the rows of a micro-batch, ``fixed + per_row · rows``: exact for storage (each saved tensor
either has the rows in it or not) and good for time beyond the rows that were measured. Between measured numbers of
rows a cost is interpolated: at one row, products are too small to run at full speed, and workspaces differ. A time may
have a ``floor`` as well: where kernels are too small to fill a device, launching them is what takes the time.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from parallax.common.documents import DOCUMENT_BYTES, LARGEST_NUMBER, plain_json, read_text
from parallax.common.typed import convert_exactly
from parallax.errors import PlanError, printable


@dataclass(frozen=True, slots=True)
class Affine:
    """``fixed + per_row · rows``, but at least ``floor``, in the unit of its owner. Up to the last of ``points``, which
    are three pairs of (rows, value) or more, with rising rows, the value is interpolated between them instead."""

    fixed: float = 0.0
    per_row: float = 0.0
    floor: float = 0.0
    points: tuple[tuple[float, float], ...] = ()

    def at(self, rows: float) -> float:
        """The value for ``rows`` rows; zero rows cost nothing."""
        if rows <= 0:
            return 0.0
        if self.points and rows <= self.points[-1][0]:
            return self._between(rows)
        return max(self.floor, self.fixed + self.per_row * rows)

    def _between(self, rows: float) -> float:
        after = max(1, bisect_left(self.points, (rows, -math.inf)))
        (x0, y0), (x1, y1) = self.points[after - 1], self.points[after]
        return max(0.0, y0 + (y1 - y0) * (rows - x0) / (x1 - x0))

    def scaled(self, ratio: float) -> Affine:
        """The cost times ``ratio``."""
        return Affine(
            self.fixed * ratio,
            self.per_row * ratio,
            self.floor * ratio,
            tuple((rows, value * ratio) for rows, value in self.points),
        )

    @property
    def numbers(self) -> tuple[float, ...]:
        """All that it is made of."""
        return (self.fixed, self.per_row, self.floor, *itertools.chain(*self.points))

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> Affine:
        """The line through two ``(rows, value)`` points, kept rising and non-negative at zero rows."""
        (x0, y0), (x1, y1) = first, second
        if x0 == x1:
            return cls(per_row=y1 / x1)
        slope = max(0.0, (y1 - y0) / (x1 - x0))
        fixed = y1 - slope * x1
        return cls(fixed, slope) if fixed >= 0 else cls(0.0, y1 / x1)

    @classmethod
    def measured(cls, points: Sequence[tuple[int, float]]) -> Affine:
        """The cost through (rows, value) ``points``, rising rows. The line beyond the last is drawn from that of a
        quarter of its rows, or of the next fewer."""
        if not points:
            return cls()
        *fewer, last = points
        far = [point for point in fewer if 4 * point[0] <= last[0]]
        line = cls.through((far or fewer or [last])[-1], last)
        return replace(line, points=tuple(points) if len(fewer) > 1 else ())


NOTHING = Affine()

NOISY = 1.5  # times as long as on a free machine: from there on seconds may be anything


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """What one block costs on one device.

    ``frozen_bytes`` those of ``parameter_bytes`` that are not trained: no gradient, no state of the optimizer and no
    full-precision copy belongs to them
    ``largest_bytes`` those of its largest parameter that is trained; 0 where nobody looked: then it may be all of them
    ``weight_seconds`` is the part of ``backward_seconds`` that computes gradients of parameters; zero-bubble schedules
    run it apart from the part that computes the gradient of the input. Running it apart takes ``split_seconds`` more
    ``skipped_seconds`` are those of a forward that a recomputation leaves out: it ends where the last tensor that
    backward needs is there again
    ``offload_seconds`` are what forward and backward together take longer where saved activations are offloaded, beside
    waiting for them
    ``moved``   bytes of saved activations that may leave the device (per micro-batch in flight)
    ``stays``   bytes saved for backward that are never moved: small tensors, casts of parameters
    ``by_loss`` bytes that the loss saves after the last block: they stay under every directive
    ``input``   bytes of the tensors that enter the block; ``output`` of those that leave it
    ``forward_work`` and ``backward_work``: bytes that live only while the block runs, beyond its input, output,
    saved activations and (backward) parameter gradients
    ``gathered_bytes`` of the last block, where the loss is computed once, of all rows: bytes of its outputs for the
    whole batch; ``gathered_work`` those that the loss needs besides, ``gathered_seconds`` what it takes
    ``deferred`` bytes that are held from the input half of a backward to its weight half, in place of the saved
    activations; ``split_work`` is ``backward_work`` of the larger of the halves
    """

    name: str
    parameters: int
    parameter_bytes: int
    frozen_bytes: int = 0
    largest_bytes: int = 0
    buffer_bytes: int = 0
    forward_seconds: Affine
    backward_seconds: Affine
    weight_seconds: Affine = NOTHING
    split_seconds: Affine = NOTHING
    offload_seconds: Affine = NOTHING
    skipped_seconds: Affine = NOTHING
    moved: Affine
    stays: Affine = NOTHING
    by_loss: Affine = NOTHING
    input: Affine
    output: Affine
    forward_work: Affine = NOTHING
    backward_work: Affine = NOTHING
    deferred: Affine = NOTHING
    split_work: Affine = NOTHING
    gathered_bytes: int = 0
    gathered_work: int = 0
    gathered_seconds: float = 0.0

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that are trained."""
        return self.parameter_bytes - self.frozen_bytes

    @property
    def trained(self) -> int:
        """How many of the parameters are trained."""
        if not self.frozen_bytes:
            return self.parameters
        return round(self.parameters * self.trained_bytes / self.parameter_bytes)

    @property
    def largest_parameter_bytes(self) -> int:
        """Bytes of its largest parameter that is trained, or more."""
        return self.largest_bytes or self.trained_bytes


_NUMBERS = tuple(field.name for field in fields(BlockCost) if field.name != "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The blocks of a model in order, the parameters they share, and what they were measured on.

    ``ties`` lists, per shared parameter that is trained, its bytes and the blocks that use it, ``frozen_ties`` those
    that are not trained. ``optimizer_bytes`` is what the optimizer keeps for each byte of parameters that it trains
    (AdamW in fp32: 2.0), ``master_bytes`` what full-precision copies take (0.0 where the parameters are in full
    precision themselves). ``optimizer_seconds`` is for one byte. The loss is that of ``gathered_rows`` rows, once in a
    step (0: it is part of the last block). Computing takes ``freeing_slowdown`` times as long where an allocator gives
    freed memory back to the system at once. ``source`` says whether the figures were measured or derived from shapes,
    ``disturbance`` how many times as long as on a free machine the work took while they were measured.
    """

    model: str
    fingerprint: str
    device: str
    precision: str
    blocks: tuple[BlockCost, ...]
    ties: tuple[tuple[int, tuple[int, ...]], ...] = ()
    frozen_ties: tuple[tuple[int, tuple[int, ...]], ...] = ()
    optimizer_bytes: float = 2.0
    optimizer_seconds: float = 0.0
    gradient_bytes: float = 1.0
    master_bytes: float = 0.0
    gathered_rows: int = 0
    freeing_slowdown: float = 1.0
    source: str = "measured"
    disturbance: float = 1.0

    def __post_init__(self) -> None:
        if not self.blocks:
            raise PlanError(
                f"profile of {self.model}: it has no blocks; describe the model as at least one block"
            )
        for block in self.blocks:
            for name in _NUMBERS:
                value = getattr(block, name)
                numbers = value.numbers if isinstance(value, Affine) else (value,)
                if not all(isinstance(n, int | float) and 0 <= n < float("inf") for n in numbers):
                    raise PlanError(
                        f"profile of {self.model}, block {block.name}: {name}={value} must be finite and ≥ 0"
                    )
            if block.frozen_bytes > block.parameter_bytes:
                raise PlanError(
                    f"profile of {self.model}, block {block.name}: {block.frozen_bytes} bytes of parameters are not "
                    f"trained, and it has {block.parameter_bytes}"
                )
        ratios = (
            "optimizer_bytes",
            "optimizer_seconds",
            "gradient_bytes",
            "master_bytes",
            "freeing_slowdown",
        )
        for name in (*ratios, "gathered_rows", "disturbance"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise PlanError(
                    f"profile of {self.model}: {name}={getattr(self, name)} must be finite and ≥ 0"
                )
        self._check_ties("ties", [block.trained_bytes for block in self.blocks])
        self._check_ties("frozen_ties", [block.frozen_bytes for block in self.blocks])

    def _check_ties(self, kind: str, held: Sequence[int]) -> None:
        """Those of one ``kind`` are of blocks that have so many bytes of such parameters."""
        tied = [0] * len(self.blocks)
        for size, users in getattr(self, kind):
            named = all(0 <= user < len(self.blocks) for user in users) and list(users) == sorted(
                set(users)
            )
            if size <= 0 or len(users) < 2 or not named:
                raise PlanError(
                    f"profile of {self.model}: tie {users} of {size} bytes must name two or more of its "
                    f"{len(self.blocks)} blocks, each once and in order"
                )
            for user in users:
                tied[user] += size
                if tied[user] > held[user]:
                    raise PlanError(
                        f"profile of {self.model}, block {self.blocks[user].name}: it shares {tied[user]} bytes of "
                        f"parameters and has {held[user]}{' that are not trained' if kind == 'frozen_ties' else ''}"
                    )

    @property
    def noisy(self) -> bool:
        """Whether other work used the machine while the profile was measured, so that its seconds may be wrong."""
        return self.disturbance >= NOISY

    @property
    def shared(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """All parameters that several blocks use, trained or not, as :attr:`ties` lists them."""
        return (*self.ties, *self.frozen_ties)

    def unique_parameter_bytes(self, blocks: Sequence[int]) -> int:
        """Bytes of parameters that a stage of ``blocks`` holds: a shared parameter counts once within the stage."""
        total = sum(self.blocks[i].parameter_bytes for i in blocks)
        return total - _repeated(self.shared, blocks)

    def unique_trained_bytes(self, blocks: Sequence[int]) -> int:
        """The same of those that are trained."""
        total = sum(self.blocks[i].trained_bytes for i in blocks)
        return total - _repeated(self.ties, blocks)

    def to_json(self) -> str:
        """The profile as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ModelProfile:
        """The profile of :meth:`to_json`; raises :class:`PlanError` for anything else."""
        try:
            return cls.from_plain(plain_json(text, largest=LARGEST_NUMBER))
        except ValueError as error:
            raise PlanError(
                f"not a model profile: {printable(str(error))}; measure it again"
            ) from error

    @classmethod
    def from_plain(cls, data: Any) -> ModelProfile:
        """The profile of plain data; raises ValueError for what is none, and PlanError for one that contradicts
        itself."""
        found: ModelProfile = convert_exactly(cls, data, "profile")
        return found

    @classmethod
    def load(cls, path: Path) -> ModelProfile:
        try:
            text = read_text(path, DOCUMENT_BYTES)
        except (OSError, ValueError) as error:
            where = printable(str(path))
            raise PlanError(
                f"cannot read profile {where}: {printable(str(error))}; measure it again"
            ) from error
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{printable(str(path))}: {error}") from error


def _repeated(ties: Sequence[tuple[int, tuple[int, ...]]], blocks: Sequence[int]) -> int:
    """Bytes that ``blocks`` count more than once."""
    inside = set(blocks)
    return sum(size * max(0, len(inside.intersection(users)) - 1) for size, users in ties)

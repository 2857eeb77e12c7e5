"""The profile: the costs of a model, block by block, as data for the planner.

A cost is affine in the rows of a micro-batch, ``fixed + per_row · rows``. For storage this is exact, because a saved
tensor either has a row dimension or not. For time it is accurate beyond the measured numbers of rows. Between measured
numbers a cost is interpolated, because matrix products of few rows do not run at full speed and because workspaces
differ. A time may also have a ``floor``, the launch time of kernels that are too small to fill a device.
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
    """A cost that depends on the number of rows: ``fixed + per_row · rows``, and at least ``floor``.

    ``points`` is empty or holds at least three pairs (rows, value) in increasing order of rows. The cost is
    interpolated between these points, and affine beyond the last one.
    """

    fixed: float = 0.0
    per_row: float = 0.0
    floor: float = 0.0
    points: tuple[tuple[float, float], ...] = ()

    def at(self, rows: float) -> float:
        """Return the value for ``rows`` rows; 0 for zero rows."""
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
        """Return the cost multiplied by ``ratio``."""
        return Affine(
            self.fixed * ratio,
            self.per_row * ratio,
            self.floor * ratio,
            tuple((rows, value * ratio) for rows, value in self.points),
        )

    def plus(self, other: Affine) -> Affine:
        """Return the sum of both costs. The result has no floor."""
        rows = sorted({rows for cost in (self, other) for rows, _ in cost.points})
        return Affine(
            self.fixed + other.fixed,
            self.per_row + other.per_row,
            points=tuple((each, self.at(each) + other.at(each)) for each in rows),
        )

    @property
    def numbers(self) -> tuple[float, ...]:
        """Return all coefficients and points."""
        return (self.fixed, self.per_row, self.floor, *itertools.chain(*self.points))

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> Affine:
        """Return a line through two ``(rows, value)`` points that does not fall and is not negative at zero rows.

        If no such line passes through both points, the result passes through ``second`` only.
        """
        (x0, y0), (x1, y1) = first, second
        if x0 == x1:
            return cls(per_row=y1 / x1)
        slope = max(0.0, (y1 - y0) / (x1 - x0))
        fixed = y1 - slope * x1
        return cls(fixed, slope) if fixed >= 0 else cls(0.0, y1 / x1)

    @classmethod
    def measured(cls, points: Sequence[tuple[int, float]]) -> Affine:
        """Return the cost that interpolates the (rows, value) ``points``, which have increasing rows.

        Beyond the last point the cost continues along a line. The line passes through the last point and through the
        largest point that has at most a quarter of its rows.
        """
        if not points:
            return cls()
        *fewer, last = points
        far = [point for point in fewer if 4 * point[0] <= last[0]]
        line = cls.through((far or fewer or [last])[-1], last)
        return replace(line, points=tuple(points) if len(fewer) > 1 else ())


NOTHING = Affine()

NOISY = 1.5  # slowdown against an idle machine above which measured seconds are unreliable


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """The costs of one block on one device. Bytes and seconds that depend on the rows are :class:`Affine`.

    ``frozen_bytes``     the part of ``parameter_bytes`` that is not trained: no gradient, no optimizer state and no
                         full-precision copy
    ``largest_bytes``    bytes of the largest trained parameter; 0 if not measured. The planner then assumes that one
                         parameter has all trained bytes.
    ``flops_per_row``    operations of matrix products of a forward and a backward without recomputation; 0 if unknown
    ``weight_seconds``   the part of ``backward_seconds`` that computes gradients of parameters (W); zero-bubble
                         schedules run it separately from the input-gradient pass (B)
    ``split_seconds``    the additional seconds of a backward that is split into B and W
    ``skipped_seconds``  the part of a forward that recomputation omits, because recomputation ends when the last tensor
                         that the backward needs is computed
    ``offload_seconds``  the slowdown of forward and backward together if activations are offloaded, without waits
    ``received_seconds`` the slowdown of forward and backward together in a stage after the first, which computes
                         gradients of all inputs that it receives, also of those that need none
    ``norms``            number of BatchNorms that compute statistics over the rows of all replicas
    ``norm_seconds``     the slowdown of forward and backward together by such statistics, without their exchange
    ``moved``            bytes of saved activations that can be offloaded, per micro-batch in flight
    ``stays``            bytes saved for backward that are never offloaded: small tensors, casts of parameters
    ``shared``           the part of ``moved`` that the block before saves, too: inputs of this block that are outputs
                         of a ReLU, for example
    ``by_loss``          bytes that the loss saves after the last block; they are resident under every directive
    ``input``            bytes of the block's input tensors
    ``output``           bytes of the block's output tensors
    ``forward_work``     bytes allocated only while the forward runs, beyond input, output and saved activations
    ``backward_work``    bytes allocated only while the backward runs, without the gradients of parameters
    ``deferred``         bytes held from the input-gradient to the weight-gradient pass, in place of saved activations
    ``split_work``       the ``backward_work`` of the larger of the two passes

    A loss over the whole batch has three more costs, on the last block:

    ``gathered_bytes``    bytes of the last block's outputs for the whole batch
    ``gathered_work``     additional bytes that are allocated while this loss runs
    ``gathered_seconds``  seconds of this loss
    """

    name: str
    parameters: int
    parameter_bytes: int
    frozen_bytes: int = 0
    largest_bytes: int = 0
    buffer_bytes: int = 0
    flops_per_row: float = 0.0
    forward_seconds: Affine
    backward_seconds: Affine
    weight_seconds: Affine = NOTHING
    split_seconds: Affine = NOTHING
    offload_seconds: Affine = NOTHING
    skipped_seconds: Affine = NOTHING
    received_seconds: Affine = NOTHING
    norms: int = 0
    norm_seconds: Affine = NOTHING
    moved: Affine
    stays: Affine = NOTHING
    shared: Affine = NOTHING
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
        """Return the bytes of the trained parameters."""
        return self.parameter_bytes - self.frozen_bytes

    @property
    def trained(self) -> int:
        """Return the number of trained parameters."""
        if not self.frozen_bytes:
            return self.parameters
        return round(self.parameters * self.trained_bytes / self.parameter_bytes)

    @property
    def largest_parameter_bytes(self) -> int:
        """Return an upper bound on the bytes of the largest trained parameter."""
        return self.largest_bytes or self.trained_bytes


_NUMBERS = tuple(field.name for field in fields(BlockCost) if field.name != "name")


@dataclass(frozen=True, slots=True)
class Utilization:
    """Model FLOP utilization (Chowdhery et al. 2022, appendix B).

    It is the rate of the matrix-product operations that the model needs, as a fraction of the devices' peak rate.
    ``flops_per_row`` is the number of these operations for a row, forward and backward, without recomputation.
    ``peak_flops`` is the peak of one device in operations per second.
    """

    flops_per_row: float = 0.0
    peak_flops: float = 0.0
    peak_source: str = ""

    def share(self, rows_per_second: float, ranks: int) -> float | None:
        """Return the utilization of ``ranks`` devices that together compute ``rows_per_second``, from 0 to 1; None if
        the operations or the peak are unknown."""
        if not self.flops_per_row or not self.peak_flops:
            return None
        return self.flops_per_row * rows_per_second / (ranks * self.peak_flops)


def summing(replicas: int, alone: bool, local_groups: int) -> int:
    """Return how many of ``replicas`` replicas sum their gradients with each other in every step.

    These are all replicas or, if they step ``alone`` or are asynchronous, the replicas of one of ``local_groups`` equal
    groups. With 0 groups each replica is alone, and the result is 1.
    """
    if not alone:
        return replicas
    return replicas // local_groups if local_groups else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The blocks of a model in order, the parameters they share, and the device and precision of the costs.

    ``fingerprint``        hash of the model; models with equal hashes have equal blocks and equal costs
    ``ties``               for each trained parameter that several blocks use: its bytes and the indices of these
                           blocks. An entry with one block stands for parameters that cannot be offloaded for another
                           reason.
    ``frozen_ties``        entries as in ``ties`` for parameters that are not trained
    ``reads``              for each block, the earlier blocks whose results it uses, with the bytes of each result for
                           one row; empty if unknown, which the planner treats as a chain of blocks
    ``optimizer_bytes``    bytes of optimizer state per byte of trained parameters (AdamW in fp32: 2.0)
    ``optimizer_seconds``  seconds of an update per byte of trained parameters
    ``gradient_bytes``     bytes of gradients per byte of trained parameters
    ``master_bytes``       bytes of full-precision copies per byte of trained parameters; 0.0 if the parameters
                           themselves are in full precision
    ``divides``            whether the optimizer may step a part of a parameter
    ``continues``          whether a step may begin before the previous step has ended: updates are delayed, and
                           nothing else forbids it
    ``local_steps``        number of steps of a round of local steps, after which replicas exchange weights; 0 if
                           replicas sum their gradients in every step
    ``local_groups``       with local steps, number of groups of replicas; 0 if each replica steps alone
    ``fragments``          with local steps, number of parts of the weights that are exchanged at different steps
    ``fragment_delay``     number of local steps that run while one part is exchanged
    ``synced_bytes``       bytes of one exchange of all weights per byte of trained parameters
    ``staleness``          the updates by which the weights of asynchronous replicas may be older than the newest; 0 if
                           replicas are not asynchronous
    ``gathered_rows``      number of rows over which one loss is computed per step; 0 if each micro-batch has its own
                           loss
    ``freeing_slowdown``   factors by which computing slows down if the allocator returns freed memory to the system at
                           once, for micro-batches of 1, 2, 4, ... rows; the last one holds for all larger ones
    ``peak_flops``         peak operations of matrix products per second of one device in this precision; 0 if unknown
    ``peak_source``        the source of ``peak_flops``
    ``source``             how the costs were found: measured, or derived from shapes
    ``disturbance``        measured time relative to the time on an idle machine
    """

    model: str
    fingerprint: str
    device: str
    precision: str
    blocks: tuple[BlockCost, ...]
    ties: tuple[tuple[int, tuple[int, ...]], ...] = ()
    frozen_ties: tuple[tuple[int, tuple[int, ...]], ...] = ()
    reads: tuple[tuple[tuple[int, float], ...], ...] = ()
    optimizer_bytes: float = 2.0
    optimizer_seconds: float = 0.0
    divides: bool = True
    continues: bool = False
    gradient_bytes: float = 1.0
    master_bytes: float = 0.0
    local_steps: int = 0
    local_groups: int = 0
    fragments: int = 1
    fragment_delay: int = 0
    synced_bytes: float = 1.0
    staleness: int = 0
    gathered_rows: int = 0
    freeing_slowdown: tuple[float, ...] = (1.0,)
    peak_flops: float = 0.0
    peak_source: str = ""
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
            "peak_flops",
        )
        for name in (
            *ratios,
            "local_steps",
            "local_groups",
            "fragment_delay",
            "synced_bytes",
            "staleness",
            "gathered_rows",
            "disturbance",
        ):
            if not 0 <= getattr(self, name) < float("inf"):
                raise PlanError(
                    f"profile of {self.model}: {name}={getattr(self, name)} must be finite and ≥ 0"
                )
        if not self.freeing_slowdown or not all(1 <= f < math.inf for f in self.freeing_slowdown):
            raise PlanError(
                f"profile of {self.model}: freeing_slowdown={self.freeing_slowdown} must be one or more finite factors "
                "≥ 1"
            )
        known = all(
            0 <= b < i and 0 <= n < math.inf for i, r in enumerate(self.reads) for b, n in r
        )
        if not known or len(self.reads) not in (0, len(self.blocks)):
            raise PlanError(
                f"profile of {self.model}: reads must name earlier blocks, with bytes, for each of its "
                f"{len(self.blocks)} blocks"
            )
        self._check_ties("ties", [block.trained_bytes for block in self.blocks])
        self._check_ties("frozen_ties", [block.frozen_bytes for block in self.blocks])

    def _check_ties(self, kind: str, held: Sequence[int]) -> None:
        """Raise :class:`PlanError` unless all ties of one ``kind`` are valid.

        Ties must name existing blocks, and each of these blocks must hold at least the bytes of its ties. ``held`` has
        the bytes of each block.
        """
        tied = [0] * len(self.blocks)
        for size, users in getattr(self, kind):
            named = all(0 <= user < len(self.blocks) for user in users) and list(users) == sorted(
                set(users)
            )
            if size <= 0 or not users or not named:
                raise PlanError(
                    f"profile of {self.model}: tie {users} of {size} bytes must name one or more of its "
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
        """Return whether other processes used the machine during the measurement, so that the seconds may be wrong."""
        return self.disturbance >= NOISY

    @property
    def utilization(self) -> Utilization:
        """Return an object that computes the model FLOP utilization, from the operations of all blocks for a row and
        the peak of the device."""
        flops = sum(block.flops_per_row for block in self.blocks)
        return Utilization(flops, self.peak_flops, self.peak_source)

    @property
    def shared(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return all parameters that cannot be offloaded, trained and frozen, in the format of :attr:`ties`."""
        return (*self.ties, *self.frozen_ties)

    def slowdown(self, rows: int) -> float:
        """Return the entry of ``freeing_slowdown`` for a micro-batch of ``rows`` rows."""
        return self.freeing_slowdown[min(rows.bit_length(), len(self.freeing_slowdown)) - 1]

    def summing(self, replicas: int) -> int:
        """Return how many of ``replicas`` replicas sum their gradients with each other in every step (:func:`summing`).
        Only these replicas can share optimizer states."""
        return summing(replicas, self.local_steps + self.staleness > 0, self.local_groups)

    def unique_parameter_bytes(self, blocks: Sequence[int]) -> int:
        """Return the parameter bytes of a stage of ``blocks``. A parameter that several of them share counts once."""
        total = sum(self.blocks[i].parameter_bytes for i in blocks)
        return total - _repeated(self.shared, blocks)

    def unique_trained_bytes(self, blocks: Sequence[int]) -> int:
        """Return the trained parameter bytes of a stage of ``blocks``.

        A parameter that several of them share counts once.
        """
        total = sum(self.blocks[i].trained_bytes for i in blocks)
        return total - _repeated(self.ties, blocks)

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the model. A shared parameter counts once."""
        repeated = sum(self._repeated_numbers(ties) for ties in (self.ties, self.frozen_ties))
        return sum(block.parameters for block in self.blocks) - repeated

    @property
    def trained(self) -> int:
        """Return the number of trained parameters of the model. A shared parameter counts once."""
        return sum(block.trained for block in self.blocks) - self._repeated_numbers(self.ties)

    def _repeated_numbers(self, ties: Sequence[tuple[int, tuple[int, ...]]]) -> int:
        """Return how many parameters the sum over all blocks counts more than once because several blocks share them.

        ``ties`` has the bytes of each shared parameter and the indices of its blocks.
        """
        users = [(size, blocks, self.blocks[blocks[0]]) for size, blocks in ties if blocks]
        return sum(
            round(size * block.parameters / block.parameter_bytes) * (len(blocks) - 1)
            for size, blocks, block in users
            if block.parameter_bytes
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ModelProfile:
        """Return the profile from text that :meth:`to_json` returned. Raises :class:`PlanError` for other text."""
        try:
            return cls.from_plain(plain_json(text, largest=LARGEST_NUMBER))
        except ValueError as error:
            raise PlanError(
                f"not a model profile: {printable(str(error))}; measure it again"
            ) from error

    @classmethod
    def from_plain(cls, data: Any) -> ModelProfile:
        """Return the profile from plain data.

        Raises ValueError for malformed data, and :class:`PlanError` for contradictory data.
        """
        if isinstance(data, dict) and isinstance(data.get("freeing_slowdown"), int | float):
            data = {
                **data,
                "freeing_slowdown": [max(1.0, data["freeing_slowdown"])],
            }  # of earlier versions
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
    """Return the bytes of shared parameters that the sum over ``blocks`` counts more than once.

    ``ties`` has, for each shared parameter, its bytes and the indices of its blocks.
    """
    inside = set(blocks)
    return sum(size * max(0, len(inside.intersection(users)) - 1) for size, users in ties)

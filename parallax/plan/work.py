"""The work of a model, independent of the device: floating-point operations, bytes and kernels of each block.

Work follows from shapes alone; :mod:`parallax.plan.analytic.efficiency` converts it into seconds on a kind of device.
It is counted from a module on the meta device (``model/profiling/count.py``) or computed from a model's sizes
(:mod:`parallax.plan.analytic.transformer`).
"""

from __future__ import annotations

from dataclasses import dataclass

from parallax.plan.profile import NOTHING, Affine


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one pass of one block over one micro-batch. All fields except ``kernels`` are affine in the rows.

    ``flops``            operations of matrix products
    ``attention_flops``  the part of ``flops`` in the two products of attention: the scores, and the scores times the
                         values
    ``operands``         number of activations that the matrix products outside attention read and write
    ``bytes``            bytes of memory traffic of all operators that are not matrix products
    ``kernels``          number of kernels launched, independent of the rows
    """

    flops: Affine = NOTHING
    bytes: Affine = NOTHING
    kernels: float = 0.0
    attention_flops: Affine = NOTHING
    operands: Affine = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """The work of one block. :class:`~parallax.plan.profile.BlockCost` explains the byte fields.

    ``gathered`` is the work of a loss over the whole batch, if the model has one.
    """

    name: str
    parameters: int
    parameter_bytes: int
    frozen_bytes: int = 0
    largest_bytes: int = 0
    buffer_bytes: int = 0
    forward: Work
    input_gradient: Work
    weight_gradient: Work
    moved: Affine
    stays: Affine = NOTHING
    by_loss: Affine = NOTHING
    input: Affine
    output: Affine
    forward_work: Affine = NOTHING
    backward_work: Affine = NOTHING
    deferred: Affine = NOTHING
    gathered_bytes: int = 0
    gathered_work: int = 0
    gathered: Work = Work()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """The work of the blocks of a model, in order.

    ``dtype`` is the dtype of matrix products (fp32, tf32, bf16, fp16, fp64). The other fields are explained in
    :class:`~parallax.plan.profile.ModelProfile`.
    """

    model: str
    fingerprint: str
    precision: str
    dtype: str
    blocks: tuple[BlockWork, ...]
    ties: tuple[tuple[int, tuple[int, ...]], ...] = ()
    frozen_ties: tuple[tuple[int, tuple[int, ...]], ...] = ()
    reads: tuple[tuple[tuple[int, float], ...], ...] = ()
    optimizer_bytes: float = 2.0
    gradient_bytes: float = 1.0
    master_bytes: float = 0.0
    gathered_rows: int = 0

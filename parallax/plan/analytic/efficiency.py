"""Convert a model's work into seconds on a kind of device, with a few coefficients that measurements can refine.

A device reaches a share of its peaks: ``matmul`` of its operations per second in large matrix products, ``attention``
of them in attention, and ``bandwidth`` of its memory's bytes per second in everything else.

Products of narrow matrices reach a smaller share. They are computed in tiles. The last tile in each direction is partly
empty, and each tile fills and drains a pipeline. A product of ``inner`` numbers per token into ``outer`` reaches the
share matmul / (1 + tile · (1/inner + 1/outer)). Its operations are 2 · tokens · inner · outer, and its ``operands`` are
its tokens · (inner + outer) input and output activations. So the smaller share has the same effect as 2 · tile
additional operations for each operand. The time of several products is therefore linear in their operations and
operands.

Small kernels also reach less than large ones. Let ``kernel_seconds`` be the time to start and end a kernel, and let w₀
be the work that the device does in that time. A kernel with work w reaches e(w) = w / (w + w₀) of the rate of large
kernels. Since w / e(w) = w + w₀, its time is affine in w (Hockney's half-performance length, 1988). The host needs
``launch_seconds`` to issue each kernel, which bounds a block's time from below. So a block's seconds are exactly an
:class:`~parallax.plan.profile.Affine` of its rows::

    seconds(rows) = max(kernels · launch_seconds,
                        kernels · kernel_seconds + (flops(rows) + 2 · tile · operands(rows)) / (matmul · peak)
                        + attention flops(rows) / (attention · peak) + bytes(rows) / (bandwidth · peak))

:func:`calibrate` fits these coefficients to measurements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from parallax.errors import ConfigError, check_choice, printable
from parallax.plan.analytic.hardware import DeviceKind
from parallax.plan.profile import Affine, BlockCost, ModelProfile
from parallax.plan.work import BlockWork, ModelWork, Work


def _share(default: float, *, spread: float, most: float = 1.0) -> float:
    """Return a dataclass field for a fraction of a peak rate.

    ``spread`` is the standard deviation of the fraction's logarithm before any measurement. ``most`` is the largest
    fraction that software reaches.
    """
    return field(default=default, metadata={"spread": spread, "most": most, "share": True})


def _seconds(default: float) -> float:
    """Return a dataclass field for seconds of software overhead, whose default is only an order of magnitude."""
    return field(default=default, metadata={"spread": 1.0, "most": math.inf, "share": False})


def _size(default: float) -> float:
    """Return a dataclass field for a matrix size, in elements."""
    return field(default=default, metadata={"spread": 0.3, "most": math.inf, "share": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The fractions of a device's peak rates that software reaches, and the overheads in seconds.

    ``matmul``            share of peak operations per second in large matrix products
    ``tile``              width, in elements, of the square matrices whose product reaches a third of ``matmul``
    ``attention``         share of peak operations per second in the products of attention
    ``logits``            share of ``matmul`` in the model's last block. One of its matrices is as wide as the
                          vocabulary, which suits tensor cores only if the vocabulary is padded.
    ``bandwidth``         share of peak memory bytes per second in all work of a block that is not a matrix product
    ``kernel_seconds``    seconds of starting and ending a kernel on the device
    ``launch_seconds``    seconds of the host to issue a kernel
    ``update``            share of peak memory bytes per second in the optimizer's step
    ``network``           share of a link's bytes per second in all-reduces
    ``exchange_seconds``  seconds of launches and waits, on both sides, of a transfer between stages; its bytes take
                          further time
    ``step_seconds``      seconds of a step outside its blocks, transfers, reductions and update

    The defaults assume eager PyTorch on a server. An operation that :class:`~parallax.plan.work.Work` counts as one
    kernel launches two or three, and the host needs 10 µs for each. Optimizers are fused, and all-reduces are as fast
    as in nccl-tests.
    """

    matmul: float = _share(0.7, spread=0.1, most=0.9)
    tile: float = _size(400.0)
    attention: float = _share(0.5, spread=0.3)
    logits: float = _share(0.8, spread=0.7)
    bandwidth: float = _share(0.8, spread=0.7, most=0.95)
    kernel_seconds: float = _seconds(4e-6)
    launch_seconds: float = _seconds(25e-6)
    update: float = _share(0.7, spread=0.5, most=0.95)
    network: float = _share(0.85, spread=0.3)
    exchange_seconds: float = _seconds(100e-6)
    step_seconds: float = _seconds(3e-3)

    def __post_init__(self) -> None:
        for known in fields(self):
            value = getattr(self, known.name)
            text = f"efficiency: {known.name}={printable(str(value))}"
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{text}: a number is wanted")
            if known.metadata["share"] and not 0 < value <= 1:
                raise ConfigError(f"{text}: accepted are shares above 0, up to 1")
            if not 0 <= value < math.inf:
                unit = "numbers" if known.name == "tile" else "seconds"
                raise ConfigError(f"{text}: accepted are finite {unit} from 0")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Efficiency:
        """Return the coefficients in the JSON ``text``, with defaults for missing ones.

        Raises :class:`ConfigError` for invalid text.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"not an efficiency file: {printable(str(error))}; write one with Efficiency.to_json"
            ) from error
        if not isinstance(data, dict):
            raise ConfigError(
                f"not an efficiency file: an object of numbers is wanted, not {type(data).__name__}"
            )
        for name in data:
            check_choice("efficiency", name, FIELDS)
        return cls(**data)


FIELDS = tuple(known.name for known in fields(Efficiency))
_KNOWN = {known.name: known.metadata for known in fields(Efficiency)}

# Fitted to the steps of a decoder with flash attention, as `parallax plan` prices it, that Megatron-LM measured on
# A100s (Bang et al. 2024, vTrain): 64 single-node runs at hidden 1,024 and 2,048, and multi-node runs with full
# recomputation at 3,072 and 6,144. The runs keep the scores of attention, which `tile` absorbs where it is fitted to
# them.
_A100 = Efficiency(
    matmul=0.87,
    tile=1400.0,
    attention=0.35,
    logits=0.6,
    bandwidth=0.80,
    kernel_seconds=2e-6,
    launch_seconds=90e-6,
)
# Fitted to torchtitan's 5,762 tokens per second and device in eager PyTorch for Llama 3.1 8B at sequence 8,192 on eight
# H100s of 500 W (benchmarks/llama3_h100_202412_torchtitan.md, table 1); torch.compile reaches 6,667 there. Attention:
# FlashAttention-2 reaches about 300 of 989 TFLOP/s on an H100 (Shah et al. 2024, FlashAttention-3, figure 5).
_H100 = Efficiency(
    matmul=0.57,
    tile=1400.0,
    attention=0.30,
    logits=0.6,
    bandwidth=0.50,
    kernel_seconds=3e-6,
)

DEFAULTS: dict[str, Efficiency] = {
    # 90 of 125 TFLOP/s in large fp16 products; 780 of 900 GB/s in streaming kernels (Jia et al. 2018, Volta by
    # microbenchmarks).
    "v100": Efficiency(matmul=0.70, tile=0.0, attention=0.70, bandwidth=0.80),
    "a100-40": _A100,
    "a100-80": _A100,
    "h100": _H100,
    "h200": _H100,
    # 72 W hold the clock at about half of its maximum under tensor load.
    "l4": Efficiency(matmul=0.50, tile=0.0, attention=0.50, bandwidth=0.80),
    # 450 W hold the clock near its maximum; a 72 MB cache helps streaming kernels.
    "rtx4090": Efficiency(matmul=0.80, tile=0.0, attention=0.80, bandwidth=0.85),
    # Derived: the shares of h100, whose power limit grew as its peak did.
    "b200": _H100,
    # 105 of 160 GFLOP/s in fp32 products, 12 of 20 GB/s in copies; operators run as they are issued, so their
    # overhead is counted once, in kernel_seconds.
    "cpu-core": Efficiency(
        matmul=0.65,
        tile=0.0,
        attention=0.65,
        logits=1.0,
        bandwidth=0.60,
        kernel_seconds=10e-6,
        launch_seconds=0.0,
        step_seconds=1e-3,
    ),
}
"""The default coefficients of a kind of device, before any measurement on it."""


_A100_SAYS = (
    "fitted to published Megatron-LM steps (fp16, fused kernels, without torch.compile; flash attention assumed): "
    "error 7% on average and at most 17% on one node, at most 10% on several"
)
_H100_SAYS = (
    "fitted to torchtitan's published steps in eager PyTorch with flash attention, without torch.compile, which is 16% "
    "faster there: error at most 20%"
)
_SAYS = {"a100-40": _A100_SAYS, "a100-80": _A100_SAYS, "h100": _H100_SAYS}


def describe_figures(kind: str) -> str:
    """Return one sentence about the default coefficients of a kind of device: the software that they assume, and how
    large their error may be.
    """
    usual = (
        "typical of eager PyTorch, without torch.compile, and fitted to no published step of this device: they may be "
        "off by a third"
    )
    return f"seconds are computed from the catalog's figures of {kind}, {_SAYS.get(kind, usual)}."


def explain_figures(profile: ModelProfile | None) -> list[str]:
    """Return sentences on the assumptions and the error of a profile that was computed from the catalog.

    The list is empty if the profile was measured.
    """
    if profile is None or profile.source != "analytic":
        return []
    return [describe_figures(profile.device)]


def default_efficiency(kind: DeviceKind) -> Efficiency:
    """Return the coefficients in :data:`DEFAULTS` for a kind of device, or :class:`Efficiency`'s defaults for other
    kinds."""
    return DEFAULTS.get(kind.name, Efficiency())


def price(work: ModelWork, kind: DeviceKind, efficiency: Efficiency | None = None) -> ModelProfile:
    """Return the profile of a model on a kind of device, computed from the model's work without running anything.

    Without ``efficiency``, the default coefficients of the kind of device are used.
    """
    reached = efficiency or default_efficiency(kind)
    peak = kind.peak(work.dtype)
    rate = _Rate(
        flops=peak * reached.matmul,
        attention=peak * reached.attention,
        bytes=kind.bytes_per_second * reached.bandwidth,
        reached=reached,
    )
    last = replace(rate, flops=rate.flops * reached.logits)
    return ModelProfile(
        model=work.model,
        fingerprint=work.fingerprint,
        device=kind.name,
        precision=work.precision,
        blocks=(*(_cost(block, rate) for block in work.blocks[:-1]), _cost(work.blocks[-1], last)),
        ties=work.ties,
        frozen_ties=work.frozen_ties,
        reads=work.reads,
        optimizer_bytes=work.optimizer_bytes,
        gradient_bytes=work.gradient_bytes,
        master_bytes=work.master_bytes,
        optimizer_seconds=_update_traffic(work) / (kind.bytes_per_second * reached.update),
        gathered_rows=work.gathered_rows,
        peak_flops=peak,
        peak_source=f"the data sheet of {kind.name} in {work.dtype}",
        source="analytic",
    )


@dataclass(frozen=True, slots=True)
class _Rate:
    """The rates that a device reaches, in operations and bytes per second, and the coefficients that give them."""

    flops: float
    attention: float
    bytes: float
    reached: Efficiency

    def seconds(self, *works: Work) -> Affine:
        """Return the total seconds of several pieces of work that run one after another, as a function of the rows."""
        kernels = sum(work.kernels for work in works)
        return Affine(
            fixed=kernels * self.reached.kernel_seconds
            + sum(self._busy(work, "fixed") for work in works),
            per_row=sum(self._busy(work, "per_row") for work in works),
            floor=kernels * self.reached.launch_seconds,
        )

    def _busy(self, work: Work, part: str) -> float:
        """Return one coefficient of the seconds for which ``work`` keeps the device computing or moving bytes.

        These seconds are affine in the rows. ``part`` names the coefficient: ``fixed`` for the seconds at zero rows, or
        ``per_row`` for the seconds of each row.
        """
        flops, attention, operands, moved = (
            getattr(figure, part)
            for figure in (work.flops, work.attention_flops, work.operands, work.bytes)
        )
        products = flops - attention + 2.0 * self.reached.tile * operands
        return float(products / self.flops + attention / self.attention + moved / self.bytes)


def _cost(block: BlockWork, rate: _Rate) -> BlockCost:
    return BlockCost(
        name=block.name,
        parameters=block.parameters,
        parameter_bytes=block.parameter_bytes,
        frozen_bytes=block.frozen_bytes,
        largest_bytes=block.largest_bytes,
        buffer_bytes=block.buffer_bytes,
        flops_per_row=_needed_flops(block),
        forward_seconds=rate.seconds(block.forward),
        backward_seconds=rate.seconds(block.input_gradient, block.weight_gradient),
        weight_seconds=rate.seconds(block.weight_gradient),
        moved=block.moved,
        stays=block.stays,
        by_loss=block.by_loss,
        input=block.input,
        output=block.output,
        forward_work=block.forward_work,
        backward_work=block.backward_work,
        deferred=block.deferred,
        gathered_bytes=block.gathered_bytes,
        gathered_work=block.gathered_work,
        gathered_seconds=rate.seconds(block.gathered).at(1),
    )


def _needed_flops(block: BlockWork) -> float:
    """Return the operations per row that the model needs, forward and backward.

    For attention this is three times its forward, because its backward needs twice as many operations as its forward.
    Kernels that compute the scores again execute more operations. These are not counted.
    """
    forward, inner = block.forward, block.input_gradient
    again = max(0.0, inner.attention_flops.per_row - 2 * forward.attention_flops.per_row)
    weights = block.weight_gradient.flops.per_row
    return forward.flops.per_row + inner.flops.per_row - again + weights


def _update_traffic(work: ModelWork) -> float:
    """Return the bytes that an optimizer moves per byte of parameters.

    It reads and writes its states and master copies, reads the gradients, and writes the parameters. Without master
    copies it also reads the parameters.
    """
    parameters = 1.0 if work.master_bytes > 0 else 2.0
    return 2 * (work.optimizer_bytes + work.master_bytes) + work.gradient_bytes + parameters


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured time, and a function that predicts it from coefficients. ``seconds`` is above zero."""

    predict: Callable[[Efficiency], float]
    seconds: float


NOISE = 0.03
"""Standard deviation of the logarithm of a measurement around the best prediction of it."""
OUTLIER = 2.0
"""Standard deviations beyond which the weight of a measurement falls (Huber 1964)."""
STARTS: tuple[dict[str, float], ...] = ({}, {"launch_seconds": 5.0}, {"kernel_seconds": 4.0})
"""Multiples of coefficients from which descents start. A time is the maximum of launches and kernels, so while one of
them does not determine it, the loss does not depend on that one's coefficient, and a descent with small values would
never find an optimum with larger ones."""
STEP = 1e-4
"""Change of a logarithm by which derivatives are taken."""
LONGEST = 1.0
"""The most by which a logarithm changes at once."""
ITERATIONS = 40
ENOUGH = 1e-7
"""Relative improvement below which the search ends."""


def calibrate(
    start: Efficiency, observations: Sequence[Observation], fields: Sequence[str] | None = None
) -> Efficiency:
    """Return the coefficients that predict ``observations`` best and are close to ``start``.

    ``fields`` names the coefficients to fit; by default all that are above zero. The result minimises Σ
    huber(log(predicted / measured) / noise) + Σ (log(number / start) / spread)². The first sum is over the
    observations, and the second one is over the fitted coefficients. Logarithms are used because errors of times and of
    rates are relative. The second sum, a log-normal prior, determines coefficients that the observations do not
    determine, so a single measurement is enough.

    The method is damped Gauss–Newton steps (Levenberg 1944, Marquardt 1963) with Huber's weights.

    Raises :class:`ConfigError` for measurements or predictions that are not above zero and for coefficients that cannot
    be fitted.
    """
    chosen = (
        tuple(fields)
        if fields is not None
        else tuple(name for name in FIELDS if getattr(start, name) > 0)
    )
    for name in chosen:
        check_choice("efficiency", name, FIELDS)
        if getattr(start, name) <= 0:
            raise ConfigError(
                f"efficiency: {name}=0 cannot be fitted: start from a small number above zero"
            )
    for observation in observations:
        if not 0 < observation.seconds < math.inf:
            raise ConfigError(
                f"calibration: a measurement of {observation.seconds} s must be above zero and finite"
            )
    if not observations or not chosen:
        return start
    return _Fit(start, observations, chosen).solve()


Vector = NDArray[np.float64]


class _Fit:
    """One calibration by least squares.

    A point is a vector that holds, for each coefficient, the logarithm of its ratio to the start value.
    """

    def __init__(
        self, start: Efficiency, observations: Sequence[Observation], names: tuple[str, ...]
    ) -> None:
        self.start, self.observations, self.names = start, observations, names
        self.origin = np.array([math.log(getattr(start, name)) for name in names])
        self.most = np.array([max(_KNOWN[name]["most"], getattr(start, name)) for name in names])
        self.highest = np.log(self.most) - self.origin
        self.precision = np.array([_KNOWN[name]["spread"] ** -2 for name in names])
        self.measured = np.log([observation.seconds for observation in observations])

    def at(self, point: Vector) -> Efficiency:
        """Return the coefficients at ``point``.

        ``point`` has, for each fitted coefficient, the logarithm of its ratio to its start value.
        """
        values = np.minimum(np.exp(self.origin + point), self.most)
        return replace(
            self.start, **{name: float(value) for name, value in zip(self.names, values)}
        )

    def residuals(self, point: Vector) -> Vector:
        """Return, for each observation, the logarithm of predicted / measured seconds, in standard deviations."""
        efficiency = self.at(point)
        predicted = np.array([observation.predict(efficiency) for observation in self.observations])
        if not np.all((predicted > 0) & np.isfinite(predicted)):
            raise ConfigError(
                f"calibration: a prediction of {predicted.min()} s must be above zero and finite"
            )
        return np.asarray((np.log(predicted) - self.measured) / NOISE)

    def jacobian(self, point: Vector) -> Vector:
        """Return the derivatives of the residuals by the coordinates of ``point``, with shape (observations,
        coefficients).

        For a coefficient at its bound, the derivative is one-sided.
        """
        columns = []
        for index in range(len(point)):
            step = np.zeros_like(point)
            step[index] = STEP
            ahead, behind = np.minimum(point + step, self.highest), point - step
            columns.append(
                (self.residuals(ahead) - self.residuals(behind)) / (ahead - behind)[index]
            )
        return np.stack(columns, axis=1)

    def loss(self, point: Vector, residuals: Vector) -> float:
        size = np.abs(residuals)
        huber = np.where(size <= OUTLIER, residuals**2, OUTLIER * (2 * size - OUTLIER))
        return float(huber.sum() + (self.precision * point**2).sum())

    def solve(self) -> Efficiency:
        """Return the coefficients with the smallest loss that :meth:`descend` reaches.

        :meth:`descend` starts once from each entry of :data:`STARTS` that changes only coefficients to be fitted.
        """
        starts = [
            np.array([math.log(multiples.get(name, 1.0)) for name in self.names])
            for multiples in STARTS
            if set(multiples) <= set(self.names)
        ]
        ends = [self.descend(start) for start in starts]
        return self.at(min(ends, key=lambda end: end[0])[1])

    def descend(self, point: Vector) -> tuple[float, Vector]:
        """Take damped steps until none improves the loss; return the loss and the point.

        A step that does not improve the loss is repeated with more damping.
        """
        residuals, damping = self.residuals(point), 1e-2
        loss = self.loss(point, residuals)
        for _ in range(ITERATIONS):
            curvature, gradient = self.slope(point, residuals)
            while damping < 1e8:
                trial = self.step(point, curvature, gradient, damping)
                trial_residuals = self.residuals(trial)
                trial_loss = self.loss(trial, trial_residuals)
                if trial_loss < loss:
                    break
                damping *= 4.0
            else:
                break
            gain, damping = loss - trial_loss, damping * 0.3
            point, residuals, loss = trial, trial_residuals, trial_loss
            if gain < ENOUGH * loss:
                break
        return loss, point

    def slope(self, point: Vector, residuals: Vector) -> tuple[Vector, Vector]:
        """Return half of the loss's Hessian, in the Gauss–Newton approximation, and half of the loss's gradient, both
        at ``point``.

        ``residuals`` are those at ``point``.
        """
        slopes = self.jacobian(point)
        weights = OUTLIER / np.maximum(OUTLIER, np.abs(residuals))
        curvature = slopes.T @ (weights[:, None] * slopes) + np.diag(self.precision)
        return curvature, slopes.T @ (weights * residuals) + self.precision * point

    def step(self, point: Vector, curvature: Vector, gradient: Vector, damping: float) -> Vector:
        """Return the point that one damped step from ``point`` leads to.

        ``curvature`` and ``gradient`` are the results of :meth:`slope`. More ``damping`` makes the step smaller. A
        coefficient at its bound stays there if its gradient points outward.
        """
        free = (point < self.highest) | (gradient > 0)
        system = (curvature + damping * np.diag(np.diag(curvature)))[np.ix_(free, free)]
        step = np.zeros_like(point)
        step[free] = np.linalg.solve(system, -gradient[free])
        return np.minimum(point + np.clip(step, -LONGEST, LONGEST), self.highest)

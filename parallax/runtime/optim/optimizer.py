"""A stage's optimizer: what is stepped on the device, what below it, and how fast the rate falls."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallax.errors import ConfigError, check_choice, check_positive
from parallax.machine.device import CopyEngine
from parallax.model.private import (
    add_to_each,
    lerp_each,
    lerp_each_in_place,
    multiply_each,
    sign_of_each,
)
from parallax.plan.plan import STATE_BUCKET_BYTES
from parallax.runtime.optim.resident import DeviceOptimizer
from parallax.runtime.optim.scaling import GradientCorrection, by_kind
from parallax.runtime.optim.uncompiled import SGD, AdamW, Uncompiled
from parallax.runtime.stage import Stream, first_offloaded
from parallax.swap.optimizer.host import Exchange, HostOptimizer, owns
from parallax.swap.statistics import SwapStatistics
from parallax.swap.stores.store import Store
from parallax.swap.weights import stepped_in

Deal = Callable[[Sequence[nn.Parameter]], Exchange]
# Given the bytes of states and the places they lie in; None where states stay in host memory.
OpenStore = Callable[[int, int], Store | None]

# Lion makes a direction for each number. Of a run of small parameters all are there at one time, beside which the
# largest parameter's alone are counted, and the reserve of a device, twice as much.
_RUN_BYTES = 4 * 2**20


class Lion(Uncompiled):
    """Evolved sign momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2): one
    state per parameter, steps of one size in every direction."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; ``closure``, if given, computes the loss first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _together(group["params"]):
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Five kernels, which know nothing of each other's numbers."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        first, second = group["betas"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        averages = [self.state[parameter]["exp_avg"] for parameter in parameters]
        weights: list[Tensor] = [*parameters]
        directions = lerp_each(gradients, averages, first)
        sign_of_each(directions)
        multiply_each(weights, 1 - group["lr"] * group["weight_decay"])
        add_to_each(weights, directions, alpha=-group["lr"])
        lerp_each_in_place(averages, gradients, 1 - second)


def _together(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Those with gradients, in runs of one type and place and at most ``_RUN_BYTES``; a larger parameter is a run of
    its own."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    for alike in by_kind(given):
        run: list[nn.Parameter] = []
        size = 0
        for parameter in alike:
            if run and size + parameter.nbytes > _RUN_BYTES:
                yield run
                run, size = [], 0
            run.append(parameter)
            size += parameter.nbytes
        yield run


class Momentum(SGD):
    """SGD with momentum, whose parameters may have their first gradients at different steps: torch's fused kernel asks
    of one parameter whether it is the first step of all. Zeros as the velocity before the first step are the same."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
        return super().step(closure)


# Habits of each. AdamW: of decoders (Brown et al. 2020, appendix B; Touvron et al. 2023, section 2.3). SGD: of torch's
# own examples; a constant rate, and nothing that changes the gradient. Lion: a third of AdamW's rate and three times
# its decay, so that their product is the same (Chen et al. 2023, section 5), and the betas of its algorithm 2.
_ADAMW = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "weight_decay": 0.1,
    "warmup_steps": 10,
    "final_rate": 0.1,
    "clip_norm": 1.0,
}
_SGD = {"lr": 0.01, "weight_decay": 0.0, "warmup_steps": 0, "final_rate": 1.0, "clip_norm": 0.0}
_LION = {"lr": 3e-4, "betas": (0.9, 0.99), "weight_decay": 0.3}
DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": _ADAMW,
    "sgd": _ADAMW | _SGD,
    "lion": _ADAMW | _LION,
}
_OF_NAME: Any = "auto"  # the value that DEFAULTS has for the optimizer's name


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer. ``weight_decay`` acts on matrices, not on vectors, and not through the gradient (Loshchilov and
    Hutter 2019); sgd's does.

    ``name``: adamw, sgd (with ``momentum``) or lion; what is auto depends on it. adamw: ``lr`` 0.001, ``betas`` 0.9 and
    0.95, ``weight_decay`` 0.1, ten ``warmup_steps``, ``final_rate`` 0.1, ``clip_norm`` 1. sgd: ``lr`` 0.01, constant,
    without decay, warm-up and clipping. lion: as adamw, but ``lr`` 0.0003, ``betas`` 0.9 and 0.99, ``weight_decay``
    0.3. ``eps`` is AdamW's. The learning rate rises linearly over ``warmup_steps`` and falls along a cosine to
    ``final_rate`` × ``lr`` at the last step. ``clip_norm`` bounds the global gradient norm over all stages; 0 leaves
    gradients as they are.
    """

    name: str = "adamw"
    lr: float = _OF_NAME
    betas: tuple[float, float] = _OF_NAME
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = _OF_NAME
    warmup_steps: int = _OF_NAME
    final_rate: float = _OF_NAME
    clip_norm: float = _OF_NAME

    def __post_init__(self) -> None:
        check_choice("optimizer.name", self.name, list(DEFAULTS))
        for key, usual in DEFAULTS[self.name].items():
            if getattr(self, key) == _OF_NAME:
                object.__setattr__(self, key, usual)
        check_positive("optimizer.lr", self.lr)
        check_positive("optimizer.eps", self.eps)
        for key in ("weight_decay", "warmup_steps", "final_rate", "clip_norm", "momentum"):
            check_positive(f"optimizer.{key}", getattr(self, key), zero=True)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"optimizer.betas={list(self.betas)}: accepted are two numbers in [0, 1)"
            )
        if self.momentum >= 1:
            raise ConfigError(f"optimizer.momentum={self.momentum}: accepted are numbers in [0, 1)")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of ``step`` (from 0) in a run of ``steps``."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return self.lr * (
            self.final_rate + (1 - self.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        )

    @property
    def states(self) -> int:
        """Numbers that are kept for each weight."""
        return {"adamw": 2, "sgd": int(self.momentum > 0), "lion": 1}[self.name]

    def build(
        self, parameters: Iterable[nn.Parameter], device: torch.device
    ) -> torch.optim.Optimizer:
        """The optimizer over the trainable ``parameters`` of one stage, in two weight-decay groups; over an empty one
        on ``device`` where a stage trains nothing, which torch would refuse."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        trained = trained or [nn.Parameter(torch.empty(0, device=device))]
        decaying = {
            "params": [p for p in trained if p.dim() >= 2],
            "weight_decay": self.weight_decay,
        }
        others = {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}
        groups = [group for group in (decaying, others) if group["params"]]
        fused = not any(
            parameter.is_complex() for parameter in trained
        )  # there are no such kernels
        match self.name:
            case "sgd":
                kind = Momentum if self.momentum else SGD
                return kind(groups, lr=self.lr, momentum=self.momentum, fused=fused)
            case "lion":
                return Lion(groups, lr=self.lr, betas=self.betas)
        return AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)


class StageOptimizer:
    """Steps one stage's parameters: the first ones on the device, at once; the last ones, a share ``below`` of their
    bytes, on the host, beside the next forward (:mod:`parallax.swap.optimizer.host`). ``lowest`` are among the latter
    in any case: other stages have them too, and step them there, with kernels that may round otherwise than the
    device's. Where replicas ``share`` what is below, or ``shard`` what is on the device, each parameter is stepped by
    one of them; both functions deal out the parameters they are given."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        config: OptimizerConfig,
        device: torch.device,
        *,
        below: float,
        lowest: Collection[Tensor],
        copies: CopyEngine,
        open_store: OpenStore,
        share: Deal | None,
        streamed: Stream,
        shard: Deal | None = None,
    ) -> None:
        self._config, self._streamed = config, streamed
        self._counted = 0.0  # seconds of stalls that were told
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        falling = sorted(trained, key=lambda parameter: parameter in lowest)
        first = first_offloaded([parameter.nbytes for parameter in falling], below)
        self._below: set[Tensor] = {*falling[first:], *(p for p in falling if p in lowest)}
        upper = [parameter for parameter in trained if parameter not in self._below]
        lower = [parameter for parameter in trained if parameter in self._below]
        spread = shard(upper) if shard is not None and upper else None
        self._device = device
        self._on_device = DeviceOptimizer(config.build(upper, device), upper, spread)
        self._sharded = frozenset(upper if spread is not None else ())
        self._shared = frozenset(lower if share is not None else ())
        self._exchange = share(lower) if share is not None else None
        chunks = streamed.chunks
        streaming = list(dict.fromkeys(s.parameter for chunk in chunks for s in chunk.segments))
        self._below |= set(streaming)
        owned = [p for p in lower if owns(self._exchange, p)]
        needed = _state_bytes(config, owned) + _state_bytes(config, streaming, masters=False)
        stepped = [*lower, *streaming]  # where there are none, the host optimizer steps nothing
        self._host = HostOptimizer(
            config.build(stepped, device) if stepped else SGD([torch.empty(0)], lr=config.lr),
            lower,
            copies=copies,
            store=open_store(needed, _places([*owned, *streaming])) if stepped else None,
            exchange=self._exchange,
            extra=chunks,
        )

    @property
    def waiting(self) -> tuple[HostOptimizer, Stream]:
        """Those whose ``stall_seconds`` are how long forwards and backwards have waited for weights."""
        return self._host, self._streamed

    def zero_grad(self) -> None:
        """Gradients are zero, or will be before a backward adds to them."""
        self._on_device.zero_grad()
        self._streamed.zero_gradients()
        self._host.zero_grad()

    def reduced(self, parameter: Tensor) -> None:
        """The gradient of ``parameter`` is final."""
        self._host.reduced(parameter)

    def step(self, norm: Tensor, rate: float, scale: float = 1.0) -> None:
        """Update everything, at learning rate ``rate``. Gradients are ``scale`` times too large; without that their
        global norm is ``norm``, on the host, by which they are clipped."""
        self._on_device.set_rate(rate, self._config.lr)
        # Not a copy, for which the host would wait.
        there = torch.full((), norm.item(), dtype=norm.dtype, device=self._device)
        self._on_device.step(GradientCorrection(there, self._config.clip_norm, scale))
        self._host.set_rate(rate, self._config.lr)
        if self._below:
            self._host.commit(GradientCorrection(norm, self._config.clip_norm, scale).coefficient)

    def skip(self) -> None:
        """Update nothing: the gradients, which overflowed, are dropped."""
        self._host.skip()
        self.zero_grad()

    def ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Return when ``parameters`` may be used."""
        self._host.ready(parameters)

    def finish(self) -> None:
        """Return when all may be used."""
        self._host.finish()

    def states(self, parameter: Tensor) -> dict[str, Tensor]:
        """What is known of ``parameter``; nothing where another replica steps it."""
        if parameter in self._below:
            return self._host.states(parameter)
        return self._on_device.states(parameter)

    @property
    def state_bytes(self) -> int:
        """Of all states on this rank, in whatever tier."""
        return self._on_device.state_bytes + self._host.state_bytes

    def alone_knows(self, parameter: Tensor) -> bool:
        """Whether replicas share the states of ``parameter``, and this one has them."""
        if parameter in self._sharded:
            return self._on_device.owns(parameter)
        return parameter in self._shared and owns(self._exchange, parameter)

    def bytes_of_states(self, tensor: Tensor) -> int:
        """What the states of a parameter take, once there are any; its full-precision weights among them."""
        if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
            return 0
        return _state_bytes(self._config, [tensor])

    def reset(self) -> None:
        """Forget all states, and a step that failed: everything is about to be set."""
        self._on_device.reset()
        self._host.reset()
        self._streamed.zero_gradients()

    @property
    def name(self) -> str:
        """Which optimizer the states are of: a name of :data:`DEFAULTS`, or the class that a subclass of the settings
        builds."""
        if type(self._config).build is OptimizerConfig.build:
            return self._config.name
        return type(self._on_device.optimizer).__name__

    def restore(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        """``parameter`` has been set; what is known of it is ``states``."""
        if parameter in self._below:
            self._host.restore(parameter, states)
        elif isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            self._on_device.restore(parameter, states)

    def close(self) -> None:
        """End the threads; a step that has begun is let end."""
        self._host.close()

    def add_statistics(self, statistics: SwapStatistics) -> None:
        """Count what parameters moved, and how long training waited for weights, among what the swap did."""
        streamed = self._streamed.take_statistics()
        statistics.bytes_out += streamed.bytes_out
        statistics.bytes_in += streamed.bytes_in
        statistics.stall_seconds += streamed.stall_seconds
        statistics.stall_seconds += self._host.stall_seconds - self._counted
        self._counted = self._host.stall_seconds


def _state_bytes(
    config: OptimizerConfig, parameters: Sequence[nn.Parameter], *, masters: bool = True
) -> int:
    """Bytes of the states of ``parameters``; ``masters`` says whether full-precision copies lie with them."""
    wide = [(parameter, stepped_in(parameter.dtype)) for parameter in parameters]
    return sum(
        (config.states + (masters and p.dtype is not dtype)) * p.numel() * dtype.itemsize
        for p, dtype in wide
    )


def _places(parameters: Sequence[nn.Parameter]) -> int:
    """The most buckets that ``parameters`` are in, and one that is written while the old one is there."""
    return 1 + sum(parameter.nbytes // STATE_BUCKET_BYTES + 1 for parameter in parameters)

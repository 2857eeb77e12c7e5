"""A stage's optimizer: its settings, its learning rate, and the parameters that it steps on the device and on the
host."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallax.errors import ConfigError, check_choice, check_positive
from parallax.machine.device import CopyEngine
from parallax.plan.plan import STATE_BUCKET_BYTES
from parallax.runtime.optim.algorithms import SGD, AdamW, Lion, Momentum
from parallax.runtime.optim.resident import DeviceOptimizer
from parallax.runtime.optim.scaling import GradientCorrection
from parallax.runtime.stage import Stream, first_offloaded
from parallax.swap.optimizer.host import Exchange, HostOptimizer, owns
from parallax.swap.statistics import SwapStatistics
from parallax.swap.stores.store import Store
from parallax.swap.weights import stepped_in

OpenExchange = Callable[[Sequence[nn.Parameter]], Exchange]
# From the bytes of states and the number of their slots; None where the tier steps them in place.
OpenStore = Callable[[int, int], Store | None]

# Usual values. AdamW: of decoders (Brown et al. 2020, appendix B; Touvron et al. 2023, section 2.3). SGD: of torch's
# own examples; a constant rate, no decay and no clipping. Lion: a third of AdamW's rate and three times
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
_OF_NAME: Any = "auto"  # replaced by the value in DEFAULTS for the optimizer's name


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer. ``weight_decay`` applies to matrices only, and is decoupled from the gradient (Loshchilov and
    Hutter 2019), except for sgd.

    ``name``: adamw, sgd (with ``momentum``) or lion; the values of auto depend on it. adamw: ``lr`` 0.001, ``betas``
    0.9 and 0.95, ``weight_decay`` 0.1, ten ``warmup_steps``, ``final_rate`` 0.1, ``clip_norm`` 1. sgd: ``lr`` 0.01,
    constant, without decay, warm-up and clipping. lion: as adamw, but ``lr`` 0.0003, ``betas`` 0.9 and 0.99,
    ``weight_decay`` 0.3. ``eps`` is AdamW's. The learning rate rises linearly over ``warmup_steps`` and decays along a
    cosine to ``final_rate`` × ``lr`` at the last step. ``clip_norm`` bounds the global gradient norm over all stages;
    0: no clipping.
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
        """Return the learning rate of ``step`` (from 0) in a run of ``steps``."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return self.lr * (
            self.final_rate + (1 - self.final_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        )

    @property
    def states(self) -> int:
        """Number of state tensors for each weight."""
        return {"adamw": 2, "sgd": int(self.momentum > 0), "lion": 1}[self.name]

    def build(
        self, parameters: Iterable[nn.Parameter], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return the optimizer over the trainable ``parameters`` of one stage, in two weight-decay groups. If the stage
        trains nothing, it steps an empty parameter on ``device``, because torch refuses an empty list."""
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
        )  # no fused kernels for complex types
        match self.name:
            case "sgd":
                kind = Momentum if self.momentum else SGD
                return kind(groups, lr=self.lr, momentum=self.momentum, fused=fused)
            case "lion":
                return Lion(groups, lr=self.lr, betas=self.betas)
        return AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)


class StageOptimizer:
    """Steps one stage's parameters. The first ones are stepped on the device at once. The last ones, a share
    ``offload`` of their bytes, are stepped on the host while the next forward runs
    (:mod:`parallax.swap.optimizer.host`). ``always_offloaded`` parameters are always stepped on the host, because other
    stages hold them too and step them there, with kernels that may round differently from the device's. If replicas
    ``share`` offloaded states, or ``shard`` those on the device, one replica steps each parameter; these functions
    assign parameters to replicas."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        config: OptimizerConfig,
        device: torch.device,
        *,
        offload: float,
        always_offloaded: Collection[Tensor],
        copies: CopyEngine,
        open_store: OpenStore,
        share: OpenExchange | None,
        streamed: Stream,
        shard: OpenExchange | None = None,
    ) -> None:
        self._config, self._streamed = config, streamed
        self._counted = 0.0  # seconds of stalls that were reported
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        ordered = sorted(trained, key=lambda parameter: parameter in always_offloaded)
        first = first_offloaded([parameter.nbytes for parameter in ordered], offload)
        self._offloaded: set[Tensor] = {
            *ordered[first:],
            *(p for p in ordered if p in always_offloaded),
        }
        resident = [parameter for parameter in trained if parameter not in self._offloaded]
        offloaded = [parameter for parameter in trained if parameter in self._offloaded]
        sharded = shard(resident) if shard is not None and resident else None
        self._device = device
        self._on_device = DeviceOptimizer(config.build(resident, device), resident, sharded)
        self._sharded = frozenset(resident if sharded is not None else ())
        self._shared = frozenset(offloaded if share is not None else ())
        self._exchange = share(offloaded) if share is not None else None
        chunks = streamed.chunks
        chunked = list(dict.fromkeys(s.parameter for chunk in chunks for s in chunk.segments))
        self._offloaded |= set(chunked)
        owned = [p for p in offloaded if owns(self._exchange, p)]
        needed = _state_bytes(config, owned) + _state_bytes(config, chunked, masters=False)
        stepped = [*offloaded, *chunked]  # where it is empty, the host optimizer steps nothing
        self._host = HostOptimizer(
            config.build(stepped, device) if stepped else SGD([torch.empty(0)], lr=config.lr),
            offloaded,
            copies=copies,
            store=open_store(needed, _places([*owned, *chunked])) if stepped else None,
            exchange=self._exchange,
            extra=chunks,
        )

    @property
    def waiting(self) -> tuple[HostOptimizer, Stream]:
        """The host optimizer and the parameter stream. Their ``stall_seconds`` count how long forwards and backwards
        have waited for weights."""
        return self._host, self._streamed

    def zero_grad(self) -> None:
        """Set resident gradients to zero; mark offloaded ones to be overwritten by the next backward."""
        self._on_device.zero_grad()
        self._streamed.zero_gradients()
        self._host.zero_grad()

    def reduced(self, parameter: Tensor) -> None:
        """Accept the final gradient of ``parameter``."""
        self._host.reduced(parameter)

    def step(self, norm: Tensor, rate: float, scale: float = 1.0) -> None:
        """Update all parameters at learning rate ``rate``. Gradients are ``scale`` times too large. ``norm``, a host
        tensor, is their global norm divided by ``scale``; gradients are clipped by it."""
        self._on_device.set_rate(rate, self._config.lr)
        # Filled on the device: a copy would synchronize.
        there = torch.full((), norm.item(), dtype=norm.dtype, device=self._device)
        self._on_device.step(GradientCorrection(there, self._config.clip_norm, scale))
        self._host.set_rate(rate, self._config.lr)
        if self._offloaded:
            self._host.commit(GradientCorrection(norm, self._config.clip_norm, scale).coefficient)

    def skip(self) -> None:
        """Drop the gradients without an update."""
        self._host.skip()
        self.zero_grad()

    def ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait until ``parameters`` are updated."""
        self._host.ready(parameters)

    def finish(self) -> None:
        """Wait until all parameters are updated."""
        self._host.finish()

    def states(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the optimizer states of ``parameter``; empty if another replica steps it."""
        if parameter in self._offloaded:
            return self._host.states(parameter)
        return self._on_device.states(parameter)

    @property
    def state_bytes(self) -> int:
        """Bytes of all optimizer states on this rank, in all tiers."""
        return self._on_device.state_bytes + self._host.state_bytes

    def alone_knows(self, parameter: Tensor) -> bool:
        """Whether replicas shard the states of ``parameter``, and this replica holds them."""
        if parameter in self._sharded:
            return self._on_device.owns(parameter)
        return parameter in self._shared and owns(self._exchange, parameter)

    def bytes_of_states(self, tensor: Tensor) -> int:
        """Return the bytes of a parameter's optimizer states after its first step, master weights included."""
        if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
            return 0
        return _state_bytes(self._config, [tensor])

    def reset(self) -> None:
        """Drop all optimizer states and the record of a failed step. The caller then sets weights and states anew."""
        self._on_device.reset()
        self._host.reset()
        self._streamed.zero_gradients()

    @property
    def name(self) -> str:
        """Name of the optimizer that the states belong to: a key of :data:`DEFAULTS`, or the class that a subclass of
        the settings builds."""
        if type(self._config).build is OptimizerConfig.build:
            return self._config.name
        return type(self._on_device.optimizer).__name__

    def restore(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        """Set the optimizer states of ``parameter``; the caller has already set its value."""
        if parameter in self._offloaded:
            self._host.restore(parameter, states)
        elif isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            self._on_device.restore(parameter, states)

    def close(self) -> None:
        """Wait for a running step, then end the threads."""
        self._host.close()

    def add_statistics(self, statistics: SwapStatistics) -> None:
        """Add the traffic of offloaded parameters, and the time that training waited for weights."""
        streamed = self._streamed.take_statistics()
        statistics.bytes_out += streamed.bytes_out
        statistics.bytes_in += streamed.bytes_in
        statistics.stall_seconds += streamed.stall_seconds
        statistics.stall_seconds += self._host.stall_seconds - self._counted
        self._counted = self._host.stall_seconds


def _state_bytes(
    config: OptimizerConfig, parameters: Sequence[nn.Parameter], *, masters: bool = True
) -> int:
    """Return the bytes of the optimizer states of ``parameters``; with ``masters`` also those of the master weights."""
    wide = [(parameter, stepped_in(parameter.dtype)) for parameter in parameters]
    return sum(
        (config.states + (masters and p.dtype is not dtype)) * p.numel() * dtype.itemsize
        for p, dtype in wide
    )


def _places(parameters: Sequence[nn.Parameter]) -> int:
    """Return the most tier slots that the states of ``parameters`` use: one for each bucket, and one for a bucket that
    is being rewritten."""
    return 1 + sum(parameter.nbytes // STATE_BUCKET_BYTES + 1 for parameter in parameters)

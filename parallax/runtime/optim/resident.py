"""The optimizer on the device: torch's own step, or a step bucket by bucket for two-byte weights and sharded states.

torch's step updates all parameters at once, with states beside each. Two cases need more. Weights of two bytes are
stepped as fp32 copies, the masters: their gradients are converted to fp32 bucket by bucket, so never all at one time.
And replicas may shard the states: each steps the parameters that it owns and broadcasts the new weights (ZeRO stage 1;
Rajbhandari et al. 2020, section 5.1), so each of ``r`` replicas holds 1/r of states and masters.

::

    replica 0    step A ─▶ step B ─▶┐ broadcast A, B ─▶ receive C, D           (A … D: buckets, of one owner each)
    replica 1    step C ─▶ step D ─▶┘ receive A, B ──▶ broadcast C, D

Both are bit-identical to the plain step: the buckets are those of the offloaded optimizer
(:mod:`parallax.swap.optimizer.buckets`), whose result does not depend on bucket boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from parallax.runtime.optim.scaling import GradientCorrection
from parallax.swap.optimizer.buckets import MASTER, Bucket, GroupRates, joined, settings_of
from parallax.swap.optimizer.host import Exchange, owner_of, owns
from parallax.swap.weights import ResidentWeights, aligned_runs, stepped_in

# Bytes of weights of a bucket: gradients are widened, and new weights broadcast, bucket by bucket.
UPDATE_BUCKET_BYTES = 32 * 2**20


class DeviceOptimizer:
    """Steps ``parameters`` in the groups of ``optimizer``. ``exchange`` assigns states to the replicas that shard
    them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        exchange: Exchange | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._parameters, self._exchange = parameters, exchange
        self._rates = GroupRates(optimizer)
        self._buckets: list[Bucket] = []
        if exchange is not None or any(_is_short(parameter) for parameter in parameters):
            groups = {
                p: index
                for index, group in enumerate(optimizer.param_groups)
                for p in group["params"]
            }
            ordered = sorted(parameters, key=lambda p: owner_of(exchange, p))

            def alike(parameter: nn.Parameter) -> object:
                return parameter.dtype, owner_of(exchange, parameter)

            for run in aligned_runs(ordered, UPDATE_BUCKET_BYTES, alike, split=True):
                owner = owner_of(exchange, run[0].parameter)
                self._buckets.append(Bucket(ResidentWeights(run), optimizer, groups, owner))

    def set_rate(self, rate: float, whole: float) -> None:
        """Set the learning rate of the next step; see :class:`~parallax.swap.optimizer.buckets.GroupRates`."""
        self._rates.set(rate, whole)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def step(self, correction: GradientCorrection) -> None:
        """Update all parameters with corrected gradients. All replicas that shard states call it."""
        if not self._buckets:
            correction.apply(self._parameters)
            self.optimizer.step()
            return
        coefficient = correction.coefficient
        settings = [
            settings_of(self.optimizer, index) for index in range(len(self.optimizer.param_groups))
        ]
        with torch.no_grad():
            for bucket in self._buckets:
                if self.owns(bucket.segments[0].parameter):
                    bucket.step(settings, coefficient)
            if self._exchange is not None:  # otherwise the views would be made in vain
                for bucket in self._buckets:
                    self._exchange.broadcast(
                        bucket.segments[0].parameter, bucket.weights.exchange_tensors()
                    )

    def owns(self, parameter: Tensor) -> bool:
        """Whether this replica steps ``parameter``."""
        return owns(self._exchange, parameter)

    def states(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the states of ``parameter``, with its full-precision weights (``master``) if its own are shorter;
        empty if another replica steps it."""
        if self._buckets:
            return joined(
                (part for bucket in self._buckets for part in bucket.copies(parameter)), parameter
            )
        found = self.optimizer.state.get(parameter, {})
        return {key: value for key, value in found.items() if isinstance(value, Tensor)}

    def restore(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        """Set the optimizer states of ``parameter``; the caller has already set its value."""
        if self._buckets and self.owns(parameter):
            for bucket in self._buckets:
                bucket.restore(parameter, states)
        elif states and parameter.requires_grad and not self._buckets:
            known = {key: _like(parameter, value) for key, value in states.items() if key != MASTER}
            self.optimizer.state[parameter] = known

    @property
    def state_bytes(self) -> int:
        if self._buckets:
            return sum(bucket.state_bytes for bucket in self._buckets)
        states = (value for each in self.optimizer.state.values() for value in each.values())
        return sum(value.nbytes for value in states if isinstance(value, Tensor))

    def reset(self) -> None:
        """Drop all optimizer states. The caller then sets weights and states anew."""
        self.optimizer.state.clear()
        for bucket in self._buckets:
            bucket.reset()


def _is_short(parameter: Tensor) -> bool:
    """Whether the parameter's type is too short for optimizer steps (two bytes)."""
    return stepped_in(parameter.dtype) is not parameter.dtype


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a copy of the state ``value`` on the parameter's device, with the parameter's strides, because fused
    kernels traverse both in memory order."""
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype).detach().copy_(value)

"""The optimizer on the device: torch's own step, or a step bucket by bucket for two-byte weights and sharded states.

torch's step updates all parameters at once. Two cases need buckets. Two-byte weights are stepped as fp32 copies, the
master weights, and their gradients are converted to fp32 one bucket at a time, to save memory. And replicas may shard
the states: each replica steps some of the parameters and broadcasts their new weights (ZeRO stage 1; Rajbhandari et al.
2020, section 5.1), so each of ``r`` replicas holds 1/r of the states and master weights.

::

    replica 0    step A ─▶ step B ─▶┐ broadcast A, B ─▶ receive C, D           (A … D: buckets, each of one replica)
    replica 1    step C ─▶ step D ─▶┘ receive A, B ──▶ broadcast C, D

The offloaded optimizer uses the same buckets (:mod:`parallax.swap.optimizer.buckets`). A step by buckets gives the same
bits as torch's step, wherever the boundaries of the buckets are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from parallax.model.private import copy_to_each, same_versions
from parallax.plan.plan import UPDATE_BUCKET_BYTES
from parallax.runtime.optim.scaling import GradientCorrection
from parallax.swap.optimizer.buckets import (
    CLIP_GROUP,
    MASTER,
    Bucket,
    GroupRates,
    joined,
    settings_of,
)
from parallax.swap.optimizer.counters import GroupCounters, as_tensors
from parallax.swap.optimizer.delaying import (
    exchange_buffers,
    mirrored,
    swap_buffers,
    weights_after,
)
from parallax.swap.optimizer.host import Exchange, owner_of, owns
from parallax.swap.weights import ResidentWeights, aligned_runs, part_of, stepped_in


class DeviceOptimizer:
    """Steps ``parameters`` on the device, in the parameter groups of ``optimizer``.

    ``exchange`` assigns each parameter to the replica that holds its states. ``divides`` is True if a bucket may hold a
    part of a parameter. If ``overlaps`` is True, passes of the next training step may run before :meth:`step`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        exchange: Exchange | None = None,
        *,
        divides: bool = True,
        overlaps: bool = False,
    ) -> None:
        short = any(_is_short(parameter) for parameter in parameters)
        if overlaps and not short:
            swap_buffers(optimizer)
        self._overlaps = overlaps
        # Weights of two bytes with which the next step computes.
        self._following: dict[nn.Parameter, Tensor] = {}
        self.optimizer = optimizer
        self._parameters, self._exchange = parameters, exchange
        self._rates, self._counters = GroupRates(optimizer), GroupCounters(optimizer)
        self._held: dict[
            nn.Parameter, Tensor
        ] = {}  # gradients of a step that the next one overlaps
        self._holds: tuple[nn.Parameter, ...] | None = None
        self._buckets: list[Bucket] = []
        if exchange is not None or short:
            groups = {
                p: index
                for index, group in enumerate(optimizer.param_groups)
                for p in group["params"]
            }
            ordered = sorted(parameters, key=lambda p: owner_of(exchange, p))

            def alike(parameter: nn.Parameter) -> object:
                return parameter.dtype, owner_of(exchange, parameter)

            for run in aligned_runs(ordered, UPDATE_BUCKET_BYTES, alike, split=divides):
                owner = owner_of(exchange, run[0].parameter)
                self._buckets.append(Bucket(ResidentWeights(run), optimizer, groups, owner))
                if self.owns(run[0].parameter):
                    self._buckets[-1].take_states(optimizer)
            optimizer.state.clear()

    def hold_gradients(self) -> None:
        """Copy the gradients for the next call of :meth:`step`, and set them to zero, because backwards of the next
        training step run before that call."""
        found = {p: p.grad for p in self._parameters if p.grad is not None}
        for parameter, gradient in found.items():
            if parameter not in self._held:
                self._held[parameter] = torch.empty_like(gradient)
        copy_to_each([self._held[p] for p in found], list(found.values()))
        self._holds = tuple(found)
        self.zero_grad()

    @contextmanager
    def held_gradients(self) -> Iterator[None]:
        """A context in which parameters have the gradients that :meth:`hold_gradients` has copied. If it was not
        called, they keep their gradients."""
        if self._holds is None:
            yield
            return
        held, self._holds = set(self._holds), None
        newer = [(parameter, parameter.grad) for parameter in self._parameters]
        try:
            for parameter in self._parameters:
                parameter.grad = self._held[parameter] if parameter in held else None
            yield
        finally:
            for parameter, gradient in newer:
                parameter.grad = gradient

    def exchange_buffers(self) -> None:
        """Exchange the model's weights with the weights of the next training step, without a copy. A second call undoes
        the exchange."""
        if not self._following:
            self._round_following()  # after a resume
        self._exchange_following()
        exchange_buffers(self.optimizer)

    def _exchange_following(self) -> None:
        for parameter, weights in self._following.items():
            parameter.data, self._following[parameter] = weights, parameter.data

    def _round_following(self) -> None:
        """Round the weights with which the next step computes, if they are stepped as master weights."""
        for bucket in self._buckets:
            for index, segment in enumerate(bucket.segments):
                parameter, weights = segment.parameter, weights_after(bucket.states(index))
                if weights is not None:
                    if parameter not in self._following:
                        self._following[parameter] = torch.empty_like(parameter).detach()
                    part_of(self._following[parameter], segment).copy_(weights)

    def set_factor(self, factor: float) -> None:
        """Set the factor by which the next step multiplies all learning rates."""
        self._rates.set(factor)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def step(self, corrections: Sequence[GradientCorrection]) -> None:
        """Correct the gradients, and then update all parameters. The gradient of a parameter is corrected (scaled and
        clipped) by the entry of ``corrections`` whose index is the ``clip_group`` of the parameter's group.

        If replicas shard the states, all replicas call this method.
        """
        if not self._buckets:
            self._correct(corrections)
            self.optimizer.step()
            return
        of_buckets = [correction.of_bucket for correction in corrections]
        settings = [
            settings_of(self.optimizer, index) for index in range(len(self.optimizer.param_groups))
        ]
        with torch.no_grad(), same_versions(self._parameters if self._overlaps else ()):
            for bucket in self._buckets:
                if self.owns(bucket.segments[0].parameter):
                    bucket.step(settings, of_buckets)
            if self._exchange is not None:  # otherwise no views are needed
                for bucket in self._buckets:
                    self._exchange.broadcast(
                        bucket.segments[0].parameter, bucket.weights.exchange_tensors()
                    )
            if self._overlaps and corrections:
                # Passes of the next step have used the memory of its weights, so the model takes it over.
                self._exchange_following()
                self._round_following()

    def _correct(self, corrections: Sequence[GradientCorrection]) -> None:
        if len(corrections) == 1:
            corrections[0].apply(self._parameters)
        elif corrections:
            for group in self.optimizer.param_groups:
                corrections[group.get(CLIP_GROUP, 0)].apply(group["params"])

    def owns(self, parameter: Tensor) -> bool:
        """Whether this replica steps ``parameter``."""
        return owns(self._exchange, parameter)

    def states(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the optimizer states of ``parameter``, including its fp32 weights (``master``) if it has two bytes per
        element; empty if another replica steps it."""
        if self._buckets:
            return joined(
                (part for bucket in self._buckets for part in bucket.copies(parameter)), parameter
            )
        found = mirrored(parameter, self.optimizer.state.get(parameter, {}), overlaps=False)
        return as_tensors(found, self._counters.of(parameter))

    def restore(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        """Set the optimizer states of ``parameter``, whose value is already set."""
        if self._buckets and self.owns(parameter):
            for bucket in self._buckets:
                bucket.restore(parameter, states)
        elif states and parameter.requires_grad and not self._buckets:
            kept = {key: value for key, value in states.items() if key != MASTER}
            if self._overlaps:
                kept = mirrored(parameter, kept, overlaps=True)
            known = self._counters.restored(parameter, kept)
            self.optimizer.state[parameter] = {
                k: _like(parameter, v) if isinstance(v, Tensor) else v for k, v in known.items()
            }

    @property
    def state_bytes(self) -> int:
        if self._buckets:
            return sum(bucket.state_bytes for bucket in self._buckets)
        states = (value for each in self.optimizer.state.values() for value in each.values())
        return sum(value.nbytes for value in states if isinstance(value, Tensor))

    def reset(self) -> None:
        """Drop all optimizer states. The caller then sets new weights and states."""
        self.optimizer.state.clear()
        self._held, self._holds, self._following = {}, None, {}
        self._counters.reset()
        for bucket in self._buckets:
            bucket.reset()


def _is_short(parameter: Tensor) -> bool:
    """Whether the parameter has a two-byte type, which is too short for optimizer steps."""
    return stepped_in(parameter.dtype) is not parameter.dtype


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return a copy of the state ``value`` with the device and the strides of ``parameter``: fused kernels traverse
    both in memory order."""
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype).detach().copy_(value)

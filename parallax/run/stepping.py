"""The costs of a run's optimizer. The profile is measured with AdamW, and then converted to the optimizer of the
run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from parallax.model.describe import Chain
from parallax.model.profiling.clock import Clock
from parallax.plan.profile import ModelProfile
from parallax.plan.work import ModelWork
from parallax.runtime.optim.builder import OptimizerBuilder
from parallax.runtime.optim.config import OptimizerConfig
from parallax.runtime.optim.groups import ParameterGroups
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.places import ParameterPlace
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.swap.weights import stepped_in

ADAMW_STATES = 2
_TIMED_BYTES = 16 * 2**20  # bytes of parameters: more than caches hold
_STEPS = 3
_Costs = TypeVar("_Costs", ModelProfile, ModelWork)


def stepped_by(
    costs: _Costs,
    optimizer: OptimizerConfig,
    chain: Chain | None = None,
    device: torch.device | None = None,
    *,
    averages: bool = False,
    replicas: ReplicasConfig | None = None,
    delays: bool = False,
) -> _Costs:
    """Return ``costs``, measured with AdamW and its two states per weight, converted to ``optimizer``.

    ``averages``: whether the optimizer also averages the weights. ``replicas``: the settings of the replicas, which may
    take local steps or be asynchronous. ``delays``: whether updates are delayed by one step. Raises
    :class:`~parallax.errors.ConfigError` for an optimizer that no plan can step.

    The bytes of states per byte of parameters are those of the block of ``chain`` with the highest ratio; without a
    chain, they are those of a large matrix or embedding. The seconds of an elementwise step are computed from its
    memory traffic: it reads weight, gradient and states, and writes weight and states. Any other step is timed on
    ``device``, relative to AdamW's, on parameters of the chain.
    """
    outer = None if replicas is None else replicas.outer
    if chain is None:
        matrix = nn.Parameter(torch.empty(4096, 4096, device="meta"))
        plain = dataclasses.replace(optimizer, groups=[], layer_decay=1.0)
        kinds, shape = ("Linear", "Embedding"), tuple(matrix.shape)
        groups = ParameterGroups(plain, [ParameterPlace((k,), (k,), shape) for k in kinds])
        builder = OptimizerBuilder(plain, groups, averages=averages, outer=outer, delays=delays)
        states = builder.largest_ratio({kind: matrix} for kind in kinds)
    else:
        builder = OptimizerBuilder.of(
            optimizer, chain.model, averages=averages, outer=outer, delays=delays
        )
        states = builder.largest_ratio(_blocks(chain))
    optimizer_bytes = costs.optimizer_bytes * states / ADAMW_STATES
    if not isinstance(costs, ModelProfile):
        return dataclasses.replace(costs, optimizer_bytes=optimizer_bytes)
    once = 0 if outer is None else len(outer.states)  # they change only at the end of a round
    moved = (3 + 2 * (states - once)) / (3 + 2 * ADAMW_STATES)
    if chain is not None and device is not None and not optimizer.moves_bytes_only:
        moved = max(moved, _relative_seconds(builder, chain, device))
    return dataclasses.replace(
        costs,
        optimizer_bytes=optimizer_bytes,
        optimizer_seconds=costs.optimizer_seconds * moved,
        divides=builder.nature.divides,
        continues=delays and not once and "fp16" not in costs.precision,
        **_exchanged(costs, replicas),
    )


def _exchanged(costs: ModelProfile, replicas: ReplicasConfig | None) -> dict[str, Any]:
    """Return the fields of a profile for local steps or asynchronous replicas; none if replicas sum their
    gradients in every step."""
    if replicas is None:
        return {}
    if replicas.asynchronous:  # gradients to the owner, and weights back
        return {"staleness": replicas.staleness, "synced_bytes": costs.gradient_bytes + 1}
    if not replicas.local_steps:
        return {}
    # Weights are averaged in the type in which they are stepped.
    wide = max(1.0, costs.master_bytes)
    return {
        "local_steps": replicas.local_steps,
        "local_groups": replicas.local_groups,
        "fragments": replicas.fragments,
        "fragment_delay": replicas.fragment_delay,
        "synced_bytes": wide * replicas.exchanged,
    }


def _blocks(chain: Chain) -> Iterator[dict[str, Tensor]]:
    for block, names in zip(chain.blocks, chain.names):
        held = block.module.state_dict(keep_vars=True)
        yield {names[inner]: tensor for inner, tensor in held.items() if inner in names}


def _relative_seconds(builder: OptimizerBuilder, chain: Chain, device: torch.device) -> float:
    """Return the duration of an optimizer step as a multiple of AdamW's. Both are timed on some MiB of the chain's
    parameters."""
    named: dict[str, nn.Parameter] = {}
    size = 0
    for name, parameter in chain.model.named_parameters():
        if name in builder.groups and size < _TIMED_BYTES:
            shape, dtype = parameter.shape, stepped_in(parameter.dtype)
            if named and shape.numel() * dtype.itemsize > _TIMED_BYTES:
                continue
            named[name] = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
            named[name].grad = torch.full_like(named[name], 1e-3)
            size += named[name].nbytes
    adamw = AdamWConfig().create([{"params": [*named.values()]}]) if named else None
    return (
        1.0 if adamw is None else _seconds(builder.build(named), device) / _seconds(adamw, device)
    )


def _seconds(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    clock, seconds = Clock(device), []
    for _ in range(1 + _STEPS):
        start = clock.now()
        optimizer.step()
        seconds.append(clock.now() - start)
    return min(seconds[1:])

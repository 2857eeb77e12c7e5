"""A stage's optimizer: the parameters that it steps on the device and on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.machine.device import CopyEngine
from parallax.machine.host import relieve_memory
from parallax.plan.plan import STATE_BUCKET_BYTES
from parallax.runtime.optim.builder import Named, OptimizerBuilder
from parallax.runtime.optim.resident import DeviceOptimizer
from parallax.runtime.stage import Stream, first_offloaded
from parallax.swap.optimizer.averaging import AVERAGE, set_share
from parallax.swap.optimizer.delaying import PREVIOUS, VERSION, set_exchanges
from parallax.swap.optimizer.host import Exchange, HostOptimizer, owns
from parallax.swap.optimizer.outer import OUTER_STATES, FragmentExchanges, Mean, set_exchanged
from parallax.swap.statistics import SwapStatistics
from parallax.swap.stores.store import Store

OpenExchange = Callable[[Sequence[nn.Parameter]], Exchange]
# From the bytes of states and the number of their slots; None where the tier steps them in place.
OpenStore = Callable[[int, int], Store | None]


class StageOptimizer:
    """Steps the parameters ``named`` of one stage, on the device or on the host.

    The last parameters, with a fraction ``offload`` of all bytes, are stepped on the host while the next forward runs
    (:mod:`parallax.swap.optimizer.host`). All others are stepped on the device, before the next forward.

    ``builder``           builds the optimizers
    ``always_offloaded``  parameters that are always stepped on the host, because other stages hold and step them too,
                          and device kernels may round differently
    ``open_store``        opens the store for offloaded states
    ``share``             assigns each parameter with offloaded states to the replica that steps it; None: every replica
                          steps all of them
    ``shard``             the same for parameters whose states are on the device
    ``streamed``          gives access to offloaded parameters, which are stepped on the host too
    ``overlaps``          passes of the next training step may run before :meth:`step` (:meth:`hold_gradients`,
                          :meth:`exchange_buffers`)
    """

    def __init__(
        self,
        named: Named,
        builder: OptimizerBuilder,
        device: torch.device,
        *,
        offload: float,
        always_offloaded: Collection[Tensor],
        copies: CopyEngine,
        open_store: OpenStore,
        share: OpenExchange | None,
        streamed: Stream,
        shard: OpenExchange | None = None,
        overlaps: bool = False,
    ) -> None:
        self._builder, self._streamed, self._copies = builder, streamed, copies
        self._names = {parameter: name for name, parameter in named.items()}
        self._clips, divides = builder.groups.clips, builder.nature.divides
        self._counted = 0.0  # seconds of stalls reported so far
        trained = [p for p in named.values() if p.requires_grad and not streamed.is_offloaded(p)]
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
        means = builder.means
        mean = means and (means.resident if sharded is None else means.shards)
        built = self._built(resident, mean)
        self._on_device = DeviceOptimizer(
            built, resident, sharded, divides=divides, overlaps=overlaps
        )
        # bytes of the states that the next step on the device creates
        self._resident_bytes = self._uncreated_bytes = builder.state_bytes(
            self._named([p for p in resident if owns(sharded, p)])
        )
        self._sharded = frozenset(resident if sharded is not None else ())
        self._shared = frozenset(offloaded if share is not None else ())
        self._exchange = share(offloaded) if share is not None else None
        chunks = streamed.chunks
        chunked = list(dict.fromkeys(s.parameter for chunk in chunks for s in chunk.segments))
        self._offloaded |= set(chunked)
        owned = [p for p in offloaded if owns(self._exchange, p)]
        needed = builder.state_bytes(self._named(owned))
        needed += builder.state_bytes(self._named(chunked), masters=False)
        stepped = [*offloaded, *chunked]  # if it is empty, the host optimizer has nothing to step
        self._host = HostOptimizer(
            self._built(stepped, means and means.host),
            offloaded,
            copies=copies,
            store=open_store(needed, _places([*owned, *chunked])) if stepped else None,
            exchange=self._exchange,
            extra=chunks,
            divides=divides,
        )

    def _built(self, parameters: Sequence[nn.Parameter], mean: Mean | None) -> Optimizer:
        return self._builder.build(self._named(parameters), mean)

    def _named(self, parameters: Sequence[nn.Parameter]) -> Named:
        return {self._names[parameter]: parameter for parameter in parameters}

    @property
    def waiting(self) -> tuple[HostOptimizer, Stream]:
        """The host optimizer, and the access to the offloaded parameters. ``stall_seconds`` of each is the time that
        forwards and backwards have waited for weights from it."""
        return self._host, self._streamed

    def zero_grad(self) -> None:
        """Set resident gradients to zero. The next backward overwrites offloaded gradients."""
        self._on_device.zero_grad()
        self._streamed.zero_gradients()
        self._host.zero_grad()

    def reduced(self, parameter: Tensor) -> None:
        """Note that the gradient of ``parameter`` is final in this step. If the host steps the parameter, the gradient
        may be copied there now."""
        self._host.reduced(parameter)

    def step(
        self, norm: Tensor, factor: float, scale: float = 1.0, *, average: float = 0.0
    ) -> None:
        """Update all parameters at ``factor`` times their learning rates.

        ``norm``     the global gradient norm for clipping, already divided by ``scale``, as a host tensor
        ``scale``    the number by which gradients must be divided
        ``average``  the weight of the new values in the averaged weights

        If some parameter groups have their own ``clip_norm``, ``norm`` has several elements: the norm of all other
        gradients, followed by one norm for each such group
        (:attr:`~parallax.runtime.optim.groups.ParameterGroups.clips`).
        """
        norms = norm.reshape(-1)
        relieve_memory(coming=self._uncreated_bytes)
        self._uncreated_bytes = 0
        self._set_share(average)
        self._on_device.set_factor(factor)
        # Filled on the device: a copy would synchronize.
        there = [
            torch.full((), value, dtype=norm.dtype, device=self._device) for value in norms.tolist()
        ]
        self._on_device.step([clip.correction(there, scale) for clip in self._clips])
        self._host.set_factor(factor)
        if self._offloaded:
            self._host.commit([clip.correction(norms, scale).of_bucket for clip in self._clips])

    def hold_gradients(self) -> None:
        """Copy the gradients for the next call of :meth:`step`, and set them to zero, because backwards of the next
        training step run before that call."""
        self._on_device.hold_gradients()

    def held_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which parameters have the gradients that :meth:`hold_gradients` has copied. If it was not
        called, they keep their gradients."""
        return self._on_device.held_gradients()

    def exchange_buffers(self) -> None:
        """Exchange the model's weights with the weights of the next training step, between passes of the two steps. No
        value is copied. A second call undoes the exchange."""
        self._on_device.exchange_buffers()

    def exchange_averages(self) -> None:
        """Exchange the weights with their averages, on the device or offloaded; a second call undoes the exchange.

        Gradients are dropped. All replicas call this method.
        """
        self._set_share(None)
        self._step_without_gradients()

    @property
    def delays(self) -> bool:
        """Whether the model's weights are one version behind the newest weights."""
        return self._builder.delays

    def exchange_versions(self) -> None:
        """Exchange the model's weights with the newest weights; a second call undoes the exchange. Without delayed
        updates, or before the first step, both are equal and nothing changes.

        Gradients are dropped. All replicas call this method.
        """
        if self.delays:
            for optimizer in (self._on_device.optimizer, self._host.optimizer):
                set_exchanges(optimizer, True)
            self._step_without_gradients()
            for optimizer in (self._on_device.optimizer, self._host.optimizer):
                set_exchanges(optimizer, False)

    def _step_without_gradients(self) -> None:
        """Call ``step`` of the optimizers, which updates no weights here but only exchanges them: with the newest
        weights after :func:`set_exchanges`, or with other replicas after :func:`set_exchanged`."""
        self._host.finish()
        self._copies.synchronize()  # the host's copies of weights are written next
        self._on_device.step(())
        if self._offloaded:
            self._host.commit()

    def exchange_fragments(self, exchanges: FragmentExchanges) -> None:
        """Average weights over the replicas, or step them by the outer optimizer.

        Fragments are parts of the model whose rounds of local steps end at different steps. ``exchanges`` lists the
        fragments whose exchange between the replicas begins or ends after this step.
        """
        for optimizer in (self._on_device.optimizer, self._host.optimizer):
            set_exchanged(optimizer, exchanges)
        self._step_without_gradients()
        for optimizer in (self._on_device.optimizer, self._host.optimizer):
            set_exchanged(optimizer, None)

    def _set_share(self, share: float | None) -> None:
        if self._builder.averages:
            set_share(self._on_device.optimizer, share)
            set_share(self._host.optimizer, share)

    def skip(self) -> None:
        """Drop the gradients without an update."""
        self._host.skip()
        self.zero_grad()

    def ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait until the host, which may still be stepping, has updated ``parameters``."""
        self._host.ready(parameters)

    def finish(self) -> None:
        """Wait until the host, which may still be stepping, has updated all its parameters."""
        self._host.finish()

    def states(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the optimizer states of ``parameter``; empty if another replica steps it."""
        if parameter in self._offloaded:
            return self._host.states(parameter)
        return self._on_device.states(parameter)

    @property
    def state_bytes(self) -> int:
        """Bytes of all optimizer states of this rank, resident and offloaded."""
        return self._on_device.state_bytes + self._host.state_bytes

    def alone_knows(self, parameter: Tensor) -> bool:
        """Whether only this replica has the optimizer states of ``parameter``, because replicas shard the states."""
        if parameter in self._sharded:
            return self._on_device.owns(parameter)
        return parameter in self._shared and owns(self._exchange, parameter)

    def bytes_of_states(self, tensor: Tensor) -> int:
        """Return the bytes that the optimizer states of ``tensor`` have after the first step, including master
        weights."""
        if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
            return 0
        return self._builder.state_bytes(self._named([tensor]))

    def reset(self) -> None:
        """Drop all optimizer states, and the record of a failed step. The caller must then set new weights and
        states."""
        self._on_device.reset()
        self._uncreated_bytes = self._resident_bytes
        self._host.reset()
        self._streamed.zero_gradients()

    @property
    def name(self) -> str:
        """The name of the optimizer to which the states belong."""
        return self._builder.config.label

    def restore(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        """Set the optimizer states of ``parameter``, whose value is already set.

        States that this run does not keep are dropped: averages, other versions of the weights, and those of an outer
        optimizer.
        """
        outer = () if self._builder.outer is None else self._builder.outer.states
        kept = {
            AVERAGE: self._builder.averages,
            VERSION: self._builder.delays,
            PREVIOUS: self._builder.delays and self._builder.config.delay_correction,
            **{key: key in outer for key in OUTER_STATES},
        }
        states = {key: value for key, value in states.items() if kept.get(key, True)}
        if parameter in self._offloaded:
            self._host.restore(parameter, states)
        elif isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            self._on_device.restore(parameter, states)

    def close(self) -> None:
        """Wait for a running step, then end the threads."""
        self._host.close()

    def add_statistics(self, statistics: SwapStatistics) -> None:
        """Add to ``statistics`` the bytes moved for offloaded parameters, and the time that training waited for
        weights."""
        streamed = self._streamed.take_statistics()
        statistics.bytes_out += streamed.bytes_out
        statistics.bytes_in += streamed.bytes_in
        statistics.stall_seconds += streamed.stall_seconds
        statistics.stall_seconds += self._host.stall_seconds - self._counted
        self._counted = self._host.stall_seconds


def _places(parameters: Sequence[nn.Parameter]) -> int:
    """Return an upper bound of the slots in the offload tier for the states of ``parameters``: one for each bucket, and
    one for a bucket that is being rewritten."""
    return 1 + sum(parameter.nbytes // STATE_BUCKET_BYTES + 1 for parameter in parameters)

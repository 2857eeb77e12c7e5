"""Rounds of local steps: groups of replicas of a stage step alone, and exchange their weights once in a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from parallax.mesh import Mesh
from parallax.model.layers.norms import BatchNorms
from parallax.runtime.replicas.compress import SHORT
from parallax.runtime.replicas.config import ReplicasConfig
from parallax.swap.optimizer.outer import FragmentExchanges, Means


class ReplicaMean:
    """Averages weights over the groups of replicas of this rank's stage. ``compress``: the number format in which they
    are sent.

    The replicas of a group have equal weights on the device. So each of them averages a part with its counterparts in
    the other groups, and they gather the parts. A shard, and weights that are stepped on the host, are averaged by the
    replicas that step them. ``sent_bytes`` counts the bytes that this rank has contributed to averages.
    """

    def __init__(self, mesh: Mesh, compress: str) -> None:
        self._mesh, self._short = mesh, SHORT.get(compress)
        self.sent_bytes = 0

    @property
    def means(self) -> Means:
        mesh = self._mesh
        shards, host = (partial(self._average, group) for group in (mesh.outer, mesh.outer_host))
        return Means(shards if mesh.summing == 1 else self._average_in_parts, shards, host)

    def _average_in_parts(self, flat: Tensor) -> Callable[[], None]:
        mesh = self._mesh
        size = -(-flat.numel() // mesh.summing)
        whole = flat.new_zeros(size * mesh.summing)
        whole[: flat.numel()] = flat
        parts = [*whole.split(size)]
        mine = parts[mesh.member].clone()
        wait = self._average(mesh.outer, mine)

        def gather() -> None:
            wait()
            dist.all_gather(parts, mine, group=mesh.summed)
            flat.copy_(whole[: flat.numel()])

        return gather

    def _average(self, group: dist.ProcessGroup | None, flat: Tensor) -> Callable[[], None]:
        flat.div_(self._mesh.groups)  # first, so that a sum of rounded numbers does not overflow
        sent = flat if self._short is None else flat.to(self._short)
        work = dist.all_reduce(sent, group=group, async_op=True)
        self.sent_bytes += sent.nbytes

        def wait() -> None:
            work.wait()
            if sent is not flat:
                flat.copy_(sent)

        return wait


class Rounds:
    """Counts the local steps of one rank, and exchanges weights with the other replicas as ``config`` says.

    Fragment ``k`` of ``F`` is exchanged once in a round of ``H`` steps, after step ``⌊(k + 1) · H / F⌋`` of it. Its
    exchange ends after ``fragment_delay`` more steps::

        after step    1      2      3      4      5      6      7      …      H = 6, F = 2, fragment_delay = 1
        fragment 0                  begins ends
        fragment 1                                       begins ends

    ``exchange`` makes exchanges, and ``norms`` are the BatchNorms whose running statistics are averaged at the end of a
    round. ``averages``: whether the run keeps averaged weights, whose mean over the replicas is formed by :meth:`end`.
    Without local steps, replicas are always equal, and nothing is exchanged.
    """

    def __init__(
        self,
        config: ReplicasConfig,
        exchange: Callable[[FragmentExchanges], None],
        norms: BatchNorms,
        *,
        averages: bool = False,
    ) -> None:
        self.local_steps, self._delay = config.local_steps, config.fragment_delay
        self._exchange, self._norms, self._count = exchange, norms, config.fragments
        self._averages = averages
        self.reset()

    def reset(self) -> None:
        """Reset the counters of steps, because all replicas have equal weights."""
        self._steps = [0] * self._count  # since the last exchange of each fragment began
        self._under_way: set[int] = set()
        self._share = 0.0  # of the weights after the last step in the averages
        self._averages_differ = False

    @property
    def differ(self) -> bool:
        """Whether replicas may have different weights."""
        return any(self._steps) or bool(self._under_way)

    def stepped(self, step: int, share: float = 0.0) -> None:
        """Count the step with the index ``step``, and make the exchanges that are due after it. ``share``: the share of
        the new weights in the averaged weights; 0 if the step has not updated them."""
        if not self.local_steps:
            return
        self._share, self._averages_differ = share, self._averages
        self._steps = [steps + 1 for steps in self._steps]
        begun = self._due(step + 1)
        self._under_way.update(begun)
        ended = [k for k in self._due(step + 1 - self._delay) if k in self._under_way]
        self._make(begun, ended)
        if (step + 1) % self.local_steps == 0:
            self._average_statistics()

    def end(self) -> None:
        """End the exchanges under way now, and exchange all fragments that were stepped since. Then all replicas take
        the mean of their averaged weights. All ranks call this method."""
        if self.differ:
            self._make((), sorted(self._under_way))
            stepped = [k for k, steps in enumerate(self._steps) if steps]
            self._make(stepped, stepped)
            self._average_statistics()
        if self._averages_differ:
            self._exchange(FragmentExchanges(averages=True))
            self._averages_differ = False

    def _due(self, steps: int) -> list[int]:
        every, count = self.local_steps, self._count
        return [k for k in range(count) if (steps - (k + 1) * every // count) % every == 0]

    def _make(self, begun: Sequence[int], ended: Sequence[int]) -> None:
        if begun or ended:
            self._exchange(FragmentExchanges(begun, ended, self._share))
        for fragment in begun:
            self._steps[fragment] = 0
        self._under_way.difference_update(ended)

    def _average_statistics(self) -> None:
        if self._norms.statistics_differ:
            self._norms.average_statistics()

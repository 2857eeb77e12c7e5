"""Rounds of local steps: groups of replicas of a stage step alone, and take common weights at the end of each round."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor

from parallax.mesh import Mesh
from parallax.model.layers.norms import BatchNorms
from parallax.runtime.replicas.compress import SHORT
from parallax.swap.optimizer.outer import Means


class ReplicaMean:
    """Means of weights over the groups of replicas of this rank's stage, which are exchanged in the form ``compress``.

    The replicas of a group have equal weights on the device. So each of them averages a part with its counterparts in
    the other groups, and they gather the parts. Shards and weights that are stepped on the host are averaged by those
    that step them. ``sent_bytes`` counts the bytes that this rank has contributed to averages.
    """

    def __init__(self, mesh: Mesh, compress: str) -> None:
        self._mesh, self._short = mesh, SHORT.get(compress)
        self.sent_bytes = 0

    @property
    def means(self) -> Means:
        mesh = self._mesh
        shards, host = (partial(self._average, group) for group in (mesh.outer, mesh.outer_host))
        return Means(shards if mesh.summing == 1 else self._average_in_parts, shards, host)

    def _average_in_parts(self, flat: Tensor) -> None:
        mesh = self._mesh
        size = -(-flat.numel() // mesh.summing)
        whole = flat.new_zeros(size * mesh.summing)
        whole[: flat.numel()] = flat
        parts = [*whole.split(size)]
        mine = parts[mesh.member].clone()
        self._average(mesh.outer, mine)
        dist.all_gather(parts, mine, group=mesh.summed)
        flat.copy_(whole[: flat.numel()])

    def _average(self, group: dist.ProcessGroup | None, flat: Tensor) -> None:
        flat.div_(self._mesh.groups)  # first, so that a sum of rounded numbers does not overflow
        sent = flat if self._short is None else flat.to(self._short)
        dist.all_reduce(sent, group=group)
        self.sent_bytes += sent.nbytes
        if sent is not flat:
            flat.copy_(sent)


class Rounds:
    """Counts the local steps of one rank, and ends each round after ``local_steps`` steps.

    ``end_round`` gives the weights of all replicas the same values, and ``norms`` are the BatchNorms whose running
    statistics are averaged with them. With ``local_steps`` of 0, replicas are always equal, and no round ends.
    """

    def __init__(self, local_steps: int, end_round: Callable[[], None], norms: BatchNorms) -> None:
        self.local_steps, self._end_round, self._norms = local_steps, end_round, norms
        self.steps = 0
        """The steps since the last round ended."""

    def stepped(self, step: int) -> None:
        """Count the step with the index ``step``, and end the round after every ``local_steps`` steps of the run."""
        if self.local_steps:
            self.steps += 1
            if (step + 1) % self.local_steps == 0:
                self.end()

    def end(self) -> None:
        """End the round now, unless it has no steps. All ranks call this method."""
        if self.steps:
            self._end_round()
            if self._norms.statistics_differ:
                self._norms.average_statistics()
            self.steps = 0

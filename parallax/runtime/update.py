"""The end of a step: all ranks agree on loss and gradient norm. Then either all ranks update their weights, or no rank
does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallax.machine.device import CopyEngine
from parallax.mesh import Mesh
from parallax.runtime.batch import Rows
from parallax.runtime.health import nonfinite
from parallax.runtime.health.nonfinite import Losses, NamedValue, StepVerdict
from parallax.runtime.health.row_comparison import RowComparison
from parallax.runtime.optim.builder import OptimizerBuilder
from parallax.runtime.optim.ema import Averages
from parallax.runtime.optim.groups import ParameterGroups
from parallax.runtime.optim.optimizer import OpenExchange, StageOptimizer
from parallax.runtime.optim.scaling import LossScale, gradient_norm, numbers
from parallax.runtime.optim.tiers import Tiers
from parallax.runtime.replicas.replicate import SharedStates
from parallax.runtime.replicas.rounds import Rounds
from parallax.runtime.stage import Stage


@dataclass
class _Announced:
    """The sums of a step over all ranks, which ``wait`` returns: the loss, ``squares`` squares of norms, and the row
    digests. ``owned`` are the tensors whose gradients this rank includes in the norm, by name."""

    wait: Callable[[], Tensor]
    owned: dict[str, Tensor]
    squares: int
    losses: Losses


class Update:
    """Updates one rank's ``stage`` with ``optimizer`` at the end of a step.

    ``scale``         the loss scale
    ``factor(step)``  returns the factor of all learning rates; ``rate`` is ``lr`` times this factor
    ``averages``      counts the updates of averaged weights
    ``groups``        the parameter groups
    ``later``         names of shared parameters that another rank includes in the gradient norm
    ``losses()``      returns the losses that this rank has computed
    ``read()``        is called before the host reads the loss from the device, so that other numbers can be copied at
                      the same time
    ``rounds``        counts local steps. With local steps, the gradients of each group of replicas are clipped by their
                      own norm, and ``norm`` is the root of the mean square over the groups.
    ``rows``          checks that the batches of all ranks have the same rows

    After each :meth:`run`, ``loss``, ``norm``, ``verdict`` and ``rate`` describe the step, and are equal on all ranks.

    If replicas are asynchronous, only the owners of the stages' states call :meth:`run`, without :meth:`begin`, with
    the gradients and losses of all replicas. ``mesh`` then has these owners as its ``world``.
    """

    def __init__(
        self,
        mesh: Mesh,
        stage: Stage,
        optimizer: StageOptimizer,
        scale: LossScale,
        factor: Callable[[int], float],
        lr: float,
        averages: Averages,
        *,
        groups: ParameterGroups,
        later: Collection[str],
        losses: Losses,
        read: Callable[[], None],
        dtype: torch.dtype,
        rounds: Rounds,
        rows: RowComparison,
    ) -> None:
        self._rounds = rounds
        self._mesh, self._stage, self._optimizer = mesh, stage, optimizer
        self._scale, self._factor, self._lr, self._groups = scale, factor, lr, groups
        self._averages, self._read = averages, read
        self._losses, self._later, self._dtype = (
            losses,
            later,
            torch.promote_types(dtype, torch.float32),
        )
        self.loss = self.norm = self.rate = 0.0
        self._norms: list[float] = []  # one for each norm that gradients are clipped by
        self.verdict = StepVerdict()
        self._announced: _Announced | None = None
        self._zeroes = False  # the gradients after the update
        self.rows = rows
        self._batch: Rows | None = None
        self._numbers: list[float] = []

    def begin(self, batch: Rows) -> None:
        """Keep the batch of the step and digest its rows, before anything else reads them."""
        self._batch, self._numbers = batch, self.rows.numbers(batch)

    def announce(self, loss: Tensor, *, continues: bool = False, accumulates: bool = False) -> None:
        """Begin three sums over all ranks: of ``loss``, which is this rank's part of the loss, of the squares of the
        gradient norm, and of the row digests.

        ``continues``: the next step has begun when :meth:`run` ends, so :meth:`run` leaves gradients of zero.
        ``accumulates``: the next step adds to the gradients before :meth:`run`, so those of this step are copied.
        """
        self._optimizer.finish()  # raises an error of the previous step before the all-reduce
        tensors = self._stage.named_tensors() if self._mesh.member == 0 else {}
        owned = {name: tensor for name, tensor in tensors.items() if name not in self._later}
        # The only synchronization of host and device in a step.
        parts = self._groups.by_norm(owned)
        norms = [gradient_norm(self._stage.norm_terms(tensors)) for tensors in parts]
        self._read()
        loss_share, *found = numbers(loss, *norms)
        mine = [each / self._divisor for each in found]
        # each ** 2 would raise OverflowError where each * each is inf.
        squares = [0.0] * (len(mine) * self._mesh.groups)
        first = len(mine) * self._mesh.group
        squares[first : first + len(mine)] = [each * each for each in mine]
        values = torch.tensor([loss_share, *squares, *self._numbers], dtype=torch.float64)
        self._announced = _Announced(
            self._mesh.begin_sum(values), owned, len(squares), self._losses
        )
        if continues:
            losses = self._losses()  # the next step overwrites them
            self._announced.losses = lambda: losses
        if accumulates:
            self._optimizer.hold_gradients()
        self._zeroes = continues and not accumulates

    def exchange_buffers(self) -> None:
        """Exchange the model's weights with the weights of the next step, without a copy, between passes of the two
        steps."""
        self._optimizer.exchange_buffers()

    def _agree(self, announced: _Announced) -> list[float]:
        """Set the attributes ``loss`` and ``norm`` to the loss and the gradient norm over all ranks, and return the
        sums of the row digests."""
        self.loss, *sums = announced.wait().tolist()
        totals, rest = sums[: announced.squares], sums[announced.squares :]
        each = announced.squares // self._mesh.groups
        first = each * self._mesh.group
        self._norms = [total**0.5 for total in totals[first : first + each]]
        self.norm = (sum(totals) / self._mesh.groups) ** 0.5
        return rest

    @property
    def _divisor(self) -> float:
        """The number by which gradients are divided before the step. With local steps, the gradient of one group is
        multiplied by the number of groups, so that the mean over the groups is the gradient of the batch."""
        return self._scale.factor / self._mesh.groups

    def run(self, step: int) -> None:
        """Update the weights after ``step``, or drop the gradients. All ranks make the same decision.

        :meth:`announce` was called before. Raises :class:`~parallax.errors.DataError` if ranks have different batches.
        """
        with self._optimizer.held_gradients():
            self._run(step)
        if self._zeroes:
            self._optimizer.zero_grad()

    def _run(self, step: int) -> None:
        batch, self._batch = self._batch, None
        announced, self._announced = self._announced, None
        assert announced is not None
        divisor, owned = self._divisor, announced.owned
        self.rows.check(self._agree(announced), f"the batch of step {step}")
        rates = self._factor(step)
        self.rate = self._lr * rates

        def find() -> str:
            if batch is None:
                return "in the rows of some asynchronous replica; lower optimizer.lr, or raise schedule.warmup"
            parts = (
                NamedValue(
                    name, value, self._stage.gradient(tensor), isinstance(tensor, nn.Parameter)
                )
                for name, tensor, value in self._stage.values()
                if name in owned
            )
            return nonfinite.find(self._mesh, batch, announced.losses, parts)

        self.verdict = nonfinite.judge(self._scale, self.loss, self.norm, find)
        share = 0.0
        if self.verdict.accepted:
            norms = torch.tensor(self._norms, dtype=self._dtype)
            share = self._averages.share(step + 1)
            self._optimizer.step(norms, rates, divisor, average=share)
        else:
            self._optimizer.skip()
        self._rounds.stepped(step, share)


def agreed_sum(mesh: Mesh, *values: float) -> list[float]:
    """Return the sum of each of ``values`` over all ranks."""
    found: list[float] = mesh.sum(torch.tensor(values, dtype=torch.float64)).tolist()
    return found


def open_optimizer(
    stage: Stage,
    mesh: Mesh,
    shared: Mapping[str, Sequence[int]],
    builder: OptimizerBuilder,
    tiers: Tiers,
    copies: CopyEngine,
) -> StageOptimizer:
    """Return the optimizer of ``stage`` under the plan.

    ``shared`` maps the name of each parameter that several pipeline ranks hold to these pipeline ranks.
    """
    plans = mesh.plan.stages

    def shards(group: dist.ProcessGroup | None) -> OpenExchange | None:
        if group is None:
            return None
        return partial(SharedStates, group, mesh.member, mesh.summing)

    tensors = stage.named_tensors()
    # These shared parameters are stepped on the host, because other stages that hold them do so.
    owns = mesh.owns_state
    elsewhere = [n for n, users in shared.items() if any(plans[u].optimizer_offload for u in users)]
    return StageOptimizer(
        {n: t for n, t in tensors.items() if isinstance(t, nn.Parameter)},
        builder,
        mesh.device,
        offload=max(plans[each].optimizer_offload for each in mesh.stages) if owns else 0.0,
        always_offloaded={tensors[name] for name in elsewhere if owns and name in tensors},
        copies=copies,
        open_store=tiers.open_states,
        share=shards(mesh.updates),
        shard=shards(mesh.summed if plans[mesh.pipeline_rank].shard_optimizer else None),
        streamed=stage.offloaded,
        overlaps=mesh.plan.schedule.continues,
    )

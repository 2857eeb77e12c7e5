"""Builds the optimizers of a run from the run's settings and the groups of the model's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.errors import ConfigError
from parallax.runtime.optim.algorithms import SGD
from parallax.runtime.optim.config import Group, OptimizerConfig, OptimizerFactory
from parallax.runtime.optim.groups import ParameterGroups, group_key
from parallax.runtime.optim.nature import Nature, nature_of
from parallax.runtime.optim.places import ParameterPlace
from parallax.swap.optimizer.averaging import averaging
from parallax.swap.optimizer.delaying import delaying
from parallax.swap.optimizer.outer import FRAGMENT, Mean, Means, OuterRule, in_rounds
from parallax.swap.weights import stepped_in

Named = Mapping[str, nn.Parameter]


class OptimizerBuilder:
    """Builds optimizers of ``config`` for parts of a model.

    ``groups``     the settings of all parameters, by name
    ``dtype``      the type in which parameters are stepped
    ``averages``   the optimizers also average the weights (:mod:`parallax.swap.optimizer.averaging`)
    ``outer``      if given, the steps of the optimizers are local steps (:mod:`parallax.swap.optimizer.outer`). If
                   there are several replicas, the attribute ``means`` must then have the functions that average
                   weights.
    ``fragments``  the number of parts of the model whose rounds of local steps end at different steps
    ``delays``     the optimizers delay updates by one step (:mod:`parallax.swap.optimizer.delaying`)
    """

    def __init__(
        self,
        config: OptimizerConfig,
        groups: ParameterGroups,
        dtype: torch.dtype = torch.float32,
        *,
        averages: bool = False,
        outer: OuterRule | None = None,
        fragments: int = 1,
        delays: bool = False,
    ) -> None:
        self.config, self.groups, self._dtype = config, groups, dtype
        self.averages, self.outer, self.delays = averages, outer, delays
        self.means: Means | None = None
        self._fragments = groups.fragments(fragments)
        self._numbers = {group_key(s): n for n, (s, _) in enumerate(groups.shapes())}

    @classmethod
    def of(
        cls,
        config: OptimizerConfig,
        model: nn.Module,
        *,
        averages: bool = False,
        outer: OuterRule | None = None,
        fragments: int = 1,
        delays: bool = False,
    ) -> OptimizerBuilder:
        """Return the builder for the trained parameters of ``model``. The other arguments are those of the
        constructor."""
        dtypes = [p.dtype for p in model.parameters() if p.requires_grad]
        dtype = stepped_in(dtypes[0]) if dtypes else torch.float32
        groups = ParameterGroups.of(config, model)
        return cls(
            config,
            groups,
            dtype,
            averages=averages,
            outer=outer,
            fragments=fragments,
            delays=delays,
        )

    @classmethod
    def over(
        cls, config: OptimizerConfig, named: Named, *, averages: bool = False
    ) -> OptimizerBuilder:
        """Return the builder of optimizers for the parameters ``named``, which are not part of a module: patterns can
        select them only by name and by dimensions."""
        places = [
            ParameterPlace((n,), (), tuple(p.shape)) for n, p in named.items() if p.requires_grad
        ]
        dtypes = [p.dtype for p in named.values()]
        dtype = stepped_in(dtypes[0]) if dtypes else torch.float32
        return cls(config, ParameterGroups(config, places), dtype, averages=averages)

    def build(self, named: Named, mean: Mean | None = None) -> Optimizer:
        """Return the optimizer of those parameters in ``named`` that are trained. ``mean``: the entry of :attr:`means`
        for these parameters.

        If none is trained, the optimizer steps an empty parameter instead, because torch refuses an empty list of
        parameters.
        """
        groups: dict[str, Group] = {}
        for name, parameter in named.items():
            if parameter.requires_grad:
                settings = self.groups.settings(name)
                if fragment := self._fragments[name]:
                    settings = {**settings, FRAGMENT: fragment}
                group = groups.setdefault(group_key(settings), {**settings, "params": []})
                group["params"].append(parameter)
        if not groups:
            return SGD([torch.empty(0)], lr=self.config.lr)
        made = self.config.create([*groups.values()])
        made = averaging(made) if self.averages else made
        made = delaying(made, corrects=self.config.delay_correction) if self.delays else made
        return in_rounds(made, self.outer, mean) if self.outer else made

    @cached_property
    def nature(self) -> Nature:
        """The properties of the optimizer that a plan depends on. Raises :class:`~parallax.errors.ConfigError` if no
        plan can use the optimizer."""
        shapes = self.groups.shapes()
        if not shapes:
            raise ConfigError(
                "no parameter of the model is trained: optimizer.groups or the model itself freezes all of them; for a "
                "run without training, use parallax export or Engine.predict"
            )
        groups = [(settings, [len(shape) for shape in found]) for settings, found in shapes]
        return nature_of(
            self.config,
            groups,
            self._dtype,
            averages=self.averages,
            outer=self.outer,
            delays=self.delays,
        )

    @property
    def lr(self) -> float:
        """The learning rate before the schedule's factor: that of the settings or, if a user's function builds the
        optimizer, the highest learning rate of any parameter group."""
        own = isinstance(self.config, OptimizerFactory)
        return self.nature.lr if own else self.config.lr

    def state_bytes(self, named: Named, *, masters: bool = True) -> int:
        """Return the bytes of the optimizer states of the parameters ``named``, with their master weights if
        ``masters`` is True."""
        return sum(self._bytes_of(name, p, masters) for name, p in named.items() if p.requires_grad)

    def largest_ratio(self, blocks: Iterable[Mapping[str, Tensor]]) -> float:
        """Return the largest ratio of optimizer-state bytes to trained-parameter bytes among ``blocks``. Parameters are
        counted in the type in which they are stepped."""
        most = 0.0
        for block in blocks:
            trained = {n: p for n, p in block.items() if n in self.groups}
            size = sum(p.numel() * stepped_in(p.dtype).itemsize for p in trained.values())
            states = sum(self._bytes_of(n, p, False) for n, p in trained.items())
            most = max(most, states / size if size else 0.0)
        return most

    def _bytes_of(self, name: str, parameter: Tensor, masters: bool) -> int:
        wide = stepped_in(parameter.dtype)
        group = self._numbers[group_key(self.groups.settings(name))]
        states = self.nature.state_bytes(group, tuple(parameter.shape), wide.itemsize)
        master = masters and wide is not parameter.dtype
        return states + master * parameter.numel() * wide.itemsize

"""Find out how an optimizer treats parameters, by stepping small tensors.

The result says whether the optimizer steps each parameter independently, whether it steps each element independently,
and which states it keeps.

Every plan steps the parameters of a stage without those of other stages, so an optimizer is refused if its step needs
all gradients at the same time. It is also refused if it continues differently after a resume, because it keeps values
outside of the states that a checkpoint holds.

Offloaded and sharded states are stepped in buckets, which may divide a parameter. If an optimizer treats a parameter as
a whole, as Muon and Adafactor do, its buckets hold undivided parameters.

None of this follows from the name of an optimizer. So the optimizer is tried with the buckets of a real step, on
parameters with the model's settings and numbers of dimensions, and the results are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.errors import ConfigError, printable
from parallax.runtime.optim.config import CLIPS, Group, OptimizerConfig
from parallax.swap.optimizer.averaging import averaging
from parallax.swap.optimizer.buckets import CLIP_GROUP, Bucket, settings_of
from parallax.swap.optimizer.counters import GroupCounters, as_tensors
from parallax.swap.optimizer.delaying import delaying
from parallax.swap.optimizer.outer import OuterRule, in_rounds
from parallax.swap.weights import ResidentWeights, aligned_runs

_STEPS = 12  # some optimizers act in every fifth or tenth step
_SCALES = 1e-3, 1.0, 1e3  # of gradients: different scales reveal clipping inside a step
_RUN_BYTES = 64 * 8  # parameters of more than 64 elements are divided
# The sizes of small parameters by their number of dimensions; all different, so that a state's sizes name the
# dimension that they belong to.
_SHAPES: dict[int, tuple[int, ...]] = {
    0: (),
    1: (131,),
    2: (11, 13),
    3: (3, 7, 11),
    4: (5, 7, 3, 2),
    5: (5, 3, 7, 2, 1),
}
StateSizes = tuple[tuple[tuple[int | None, int], ...], int | None]
"""Sizes of a state as (dimension of the parameter, or None, and number), and its bytes per element (None: those of the
parameter)."""


@dataclass(frozen=True)
class Nature:
    """The properties of an optimizer that a plan depends on.

    ``divides`` is True if parameters may be stepped in parts. ``states`` maps (index of the parameter group, number of
    dimensions) to the names and sizes of the optimizer states of such a parameter. ``lr`` is the highest learning rate
    of any group.
    """

    divides: bool
    states: Mapping[tuple[int, int], Mapping[str, StateSizes]]
    lr: float

    def names(self) -> frozenset[str]:
        """The names of all states."""
        return frozenset(name for found in self.states.values() for name in found)

    def state_bytes(self, group: int, shape: Sequence[int], itemsize: int) -> int:
        """Return the bytes of the optimizer states of a parameter of ``shape`` in the parameter group with the index
        ``group``. ``itemsize``: the bytes per element in the type of the step. A scalar state counts as 0, because
        buckets do not store it."""
        total = 0
        for sizes, own in self.states[group, len(shape)].values():
            if sizes:
                elements = 1
                for index, number in sizes:
                    elements *= number if index is None else shape[index]
                total += elements * (own or itemsize)
        return total


def nature_of(
    config: OptimizerConfig,
    groups: Sequence[tuple[Group, Sequence[int]]],
    dtype: torch.dtype,
    *,
    averages: bool = False,
    outer: OuterRule | None = None,
    delays: bool = False,
) -> Nature:
    """Return the properties of the optimizer of ``config`` that a plan depends on.

    ``groups`` holds the settings of each parameter group, with the numbers of dimensions of its parameters. ``dtype``
    is the type in which parameters are stepped. If ``averages`` is True, the optimizer also averages the weights;
    with ``outer``, its steps are local steps; if ``delays`` is True, it delays updates by one step. Raises
    :class:`ConfigError`, with the reason, for an optimizer that no plan can step.
    """
    with torch.random.fork_rng(devices=[]):
        trial = _Trial(config, groups, dtype, averages, outer, delays)
        plain = trial.plain()
        alone = trial.in_buckets(split=False)
        if not _same(plain, alone):
            raise ConfigError(
                f"optimizer={config.label}: it does not step each parameter by itself (small parameters stepped one by "
                "one end elsewhere than stepped together), so no stage can step its own; accepted are optimizers that "
                "do, without a norm over all parameters in their step: optimizer.clip_norm clips for them"
            )
        if not _same(plain, trial.in_buckets(split=False, resumes=True)):
            raise ConfigError(
                f"optimizer={config.label}: it keeps something outside of the states of its parameters, so a run that "
                "resumes from a checkpoint would go on differently; use an optimizer with all of its state there"
            )
        divides = _same(plain, trial.in_buckets(split=True))
    return Nature(divides, trial.states, trial.lr)


class _Trial:
    """Small parameters on which an optimizer is tried, one for each parameter group and number of dimensions."""

    def __init__(
        self,
        config: OptimizerConfig,
        groups: Sequence[tuple[Group, Sequence[int]]],
        dtype: torch.dtype,
        averages: bool,
        outer: OuterRule | None,
        delays: bool,
    ) -> None:
        self._config, self._dtype, self._averages = config, dtype, averages
        self._outer, self._delays = outer, delays
        self._settings = [settings for settings, _ in groups]
        self._kinds = [
            (group, dims) for group, (_, found) in enumerate(groups) for dims in sorted(set(found))
        ]
        self.lr = 0.0
        self.states: dict[tuple[int, int], dict[str, StateSizes]] = {}

    def plain(self) -> list[Any]:
        """Step all parameters together; return parameters and states. Raises :class:`ConfigError` if a step fails."""
        parameters, optimizer = self._made()
        self.lr = max(float(group.get("lr") or 0.0) for group in optimizer.param_groups)
        counters, generator = GroupCounters(optimizer), torch.get_rng_state()
        for step in range(_STEPS):
            _set_gradients(parameters, step)
            self._stepped(optimizer)
        if not torch.equal(generator, torch.get_rng_state()):
            raise ConfigError(
                f"optimizer={self._config.label}: its step draws random numbers, which depend on the plan; use an "
                "optimizer that draws none"
            )
        for kind, parameter in zip(self._kinds, parameters):
            self.states[kind] = {
                name: _sizes(value, parameter)
                for name, value in optimizer.state[parameter].items()
                if isinstance(value, Tensor)
            }
        states = [as_tensors(optimizer.state[p], counters.of(p)) for p in parameters]
        return list(zip([p.detach() for p in parameters], states))

    def in_buckets(self, *, split: bool, resumes: bool = False) -> list[Any]:
        """Step each parameter in its own bucket; return parameters and states.

        If ``split`` is True, each parameter is divided into several buckets. If ``resumes`` is True, the optimizer is
        replaced after half of the steps by a new one, which continues from the saved states.
        """
        parameters, optimizer = self._made()
        buckets, settings = self._buckets(parameters, optimizer, split=split)
        try:
            for step in range(_STEPS):
                if resumes and step == _STEPS // 2:
                    saved = [_joined([b.copies(p) for b in buckets], p) for p in parameters]
                    weights = [parameter.detach() for parameter in parameters]
                    parameters, optimizer = self._made()
                    buckets, settings = self._buckets(parameters, optimizer, split=split)
                    for parameter, weight, states in zip(parameters, weights, saved):
                        parameter.detach().copy_(weight)
                        for bucket in buckets:
                            bucket.restore(parameter, states)
                _set_gradients(parameters, step)
                for bucket in buckets:
                    with torch.no_grad():
                        bucket.step(settings, ())
        except Exception as error:  # a foreign class may raise anything on a part of a parameter
            if not (split or resumes):
                raise ConfigError(
                    f"optimizer={self._config.label}: its step fails over one parameter alone, and every stage steps "
                    f"its own: {printable(str(error))}"
                ) from error
            return []
        found = [_joined([b.copies(p) for b in buckets], p) for p in parameters]
        return list(zip([p.detach() for p in parameters], found))

    def _buckets(
        self, parameters: Sequence[nn.Parameter], optimizer: Optimizer, *, split: bool
    ) -> tuple[list[Bucket], list[Group]]:
        index = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
        runs = (
            aligned_runs(parameters, _RUN_BYTES, lambda p: p.dtype, split=True)
            if split
            else (next(iter(aligned_runs([p], p.nbytes, id, split=False))) for p in parameters)
        )
        buckets = [Bucket(ResidentWeights(run), optimizer, index, None) for run in runs]
        for bucket in buckets:
            bucket.take_states(optimizer)
        return buckets, [settings_of(optimizer, g) for g in range(len(optimizer.param_groups))]

    def _made(self) -> tuple[list[nn.Parameter], Optimizer]:
        # Not those of devices, which fork_rng does not restore.
        torch.default_generator.manual_seed(0)
        parameters = [_parameter(dims, n, self._dtype) for n, (_, dims) in enumerate(self._kinds)]
        groups = [
            {**settings, "params": [p for p, (g, _) in zip(parameters, self._kinds) if g == group]}
            for group, settings in enumerate(self._settings)
        ]
        try:
            optimizer = self._config.create(groups)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"optimizer={self._config.label}: it cannot be built over this model's parameters: "
                f"{printable(str(error))}"
            ) from error
        self._check_settings(optimizer)
        if callable(getattr(optimizer, "eval", None)):
            raise ConfigError(
                f"optimizer={self._config.label}: it trains with other weights than those of its eval(), which "
                "would be evaluated and saved; use an optimizer without one"
            )
        optimizer = averaging(optimizer) if self._averages else optimizer
        if self._delays:
            delaying(optimizer, corrects=self._config.delay_correction)
        return parameters, in_rounds(optimizer, self._outer) if self._outer else optimizer

    def _check_settings(self, optimizer: Optimizer) -> None:
        """Raise :class:`ConfigError` if a group has a setting that the optimizer does not know."""
        known = {*optimizer.defaults, "muon", *CLIPS, CLIP_GROUP, "params"}
        for settings in self._settings:
            for key in settings:
                if key not in known:
                    raise ConfigError(
                        f"optimizer.groups: {self._config.label} has no {key}; accepted are "
                        f"{', '.join(sorted(known - {'params', CLIP_GROUP}))}"
                    )

    def _stepped(self, optimizer: Optimizer) -> None:
        try:
            optimizer.step()
        except Exception as error:
            raise ConfigError(
                f"optimizer={self._config.label}: its step fails on small dense tensors without a closure: "
                f"{printable(str(error))}"
            ) from error


def _parameter(dims: int, number: int, dtype: torch.dtype) -> nn.Parameter:
    shape = torch.Size(_SHAPES.get(dims, (*_SHAPES[5], *(1,) * (dims - 5))))
    values = torch.sin(torch.arange(shape.numel(), dtype=torch.float64) + number)
    return nn.Parameter(values.reshape(shape).to(dtype))


def _set_gradients(parameters: Sequence[nn.Parameter], step: int) -> None:
    """Set gradients that depend on the values of the parameters, so that every step affects the result."""
    for number, parameter in enumerate(parameters):
        scale = _SCALES[(step + number) % len(_SCALES)]
        values = torch.arange(parameter.numel(), dtype=torch.float64) * (step + 1) + number
        noise = torch.cos(values).reshape(parameter.shape) * scale
        parameter.grad = (parameter.detach().double() / 2 + noise).to(parameter.dtype)


def _sizes(state: Tensor, parameter: Tensor) -> StateSizes:
    """Return two descriptions of ``state``, an optimizer state of ``parameter``: of its dimensions, and of its bytes
    per element.

    For each dimension of ``state``, the first has a pair: the index of the dimension of ``parameter`` with the same
    size, or None, and the size. The second is None if an element of ``state`` has as many bytes as an element of
    ``parameter``.
    """
    shape = list(parameter.shape)
    sizes = tuple(
        (shape.index(size) if size in shape and size > 1 else None, size) for size in state.shape
    )
    same = state.element_size() == parameter.element_size()
    return sizes, None if same else state.element_size()


def _joined(parts: Sequence[Sequence[Mapping[str, Any]]], parameter: Tensor) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    for part in (each for several in parts for each in several):
        for key, value in part.items():
            found.setdefault(key, []).append(value)
    return {k: _join(values, parameter) for k, values in found.items()}


def _join(values: list[Any], parameter: Tensor) -> Any:
    first = values[0]
    if len(values) == 1 or not isinstance(first, Tensor) or first.dim() == 0:
        return first
    flat = torch.cat([value.reshape(-1) for value in values])
    return flat.reshape(parameter.shape) if flat.numel() == parameter.numel() else flat


def _same(one: Any, other: Any) -> bool:
    """Whether two results are bit-identical."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and _bits(one) == _bits(other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _bits(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return found

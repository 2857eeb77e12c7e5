"""Parameter groups: the settings of each parameter, from the rules of the optimizer and the user's patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallax.errors import ConfigError, check_positive, nearest, printable
from parallax.runtime.optim.config import CLIPS, Group, OptimizerConfig
from parallax.runtime.optim.places import ParameterPlace, places_of
from parallax.runtime.optim.scaling import GradientCorrection
from parallax.swap.optimizer.buckets import CLIP_GROUP

_SELECTING = ("match", "type", "dims", "freeze")


class GroupSummary(NamedTuple):
    """A parameter group: its settings, the names of its parameters, and their number of elements."""

    settings: Group
    names: tuple[str, ...]
    elements: int


class ClipGroup(NamedTuple):
    """The clipping of some parameters' gradients: to the norm ``clip_norm``, and then each element to ``clip_value``.

    ``norm`` is the index of the gradient norm that clipping uses. Index 0 is the norm over all parameters whose group
    has no ``clip_norm`` of its own.
    """

    norm: int
    clip_norm: float
    clip_value: float

    def correction(self, norms: Sequence[Tensor] | Tensor, scale: float) -> GradientCorrection:
        """Return the correction of gradients that are ``scale`` times too large. ``norms``: the gradient norms, already
        divided by ``scale``."""
        return GradientCorrection(norms[self.norm], self.clip_norm, scale, self.clip_value)


class ParameterGroups:
    """The settings of each parameter that ``config`` trains.

    ``places`` are the places of the trained parameters in the model, and ``frozen`` those of all other parameters.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        places: Iterable[ParameterPlace],
        frozen: Sequence[ParameterPlace] = (),
    ) -> None:
        self._settings: dict[str, Group] = {}
        self._places = {place.names[0]: place for place in places}
        self._config = config
        patterns = _patterns(config)
        self.clips = _clips(config, patterns)
        used: set[int] = set()
        for name, place in self._places.items():
            index = next((i for i, each in enumerate(patterns) if each.fits(place)), None)
            used |= set() if index is None else {index}
            if index is not None and patterns[index].freezes:
                raise ConfigError(
                    f"optimizer.groups: {patterns[index].text}: {name} requires gradients; call requires_grad_(False) "
                    "on it where the model is built"
                )
            self._settings[name] = self._of(
                place, {} if index is None else patterns[index].settings
            )
        used |= {
            i for i, each in enumerate(patterns) if each.freezes and any(map(each.fits, frozen))
        }
        for index in sorted(set(range(len(patterns))) - used):
            raise ConfigError(self._unused(patterns[index], patterns[:index]))

    @classmethod
    def of(cls, config: OptimizerConfig, model: nn.Module) -> ParameterGroups:
        """Return the groups of the trained parameters of ``model``."""
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        places: dict[bool, list[ParameterPlace]] = {True: [], False: []}
        for place in places_of(model):
            places[not names.isdisjoint(place.names)].append(place)
        return cls(config, places[True], places[False])

    def __contains__(self, name: str) -> bool:
        return name in self._settings

    def by_norm(self, tensors: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """Return one list of tensors for each gradient norm that clipping uses (:class:`ClipGroup`).

        ``tensors`` maps names of parameters to tensors.
        """
        found: list[list[Tensor]] = [[] for _ in range(1 + max(each.norm for each in self.clips))]
        for name, tensor in tensors.items():
            number = self._settings.get(name, {}).get(CLIP_GROUP, 0)
            found[self.clips[number].norm].append(tensor)
        return found

    def settings(self, name: str) -> Group:
        """Return the settings of the parameter ``name`` that differ from those of the whole optimizer."""
        return self._settings[name]

    def fragments(self, count: int) -> dict[str, int]:
        """Divide the parameters into ``count`` fragments. Return a dict from the name of each parameter to the index of
        its fragment.

        In the order of the model, each parameter is added to the smallest fragment. So the division does not depend on
        the plan, and the parameters of every stage are divided about equally too.
        """
        found, sizes = dict[str, int](), [0] * count
        for name, place in self._places.items():
            found[name] = fragment = sizes.index(min(sizes))
            sizes[fragment] += torch.Size(place.shape).numel()
        return found

    def summaries(self) -> list[GroupSummary]:
        """Return the groups, in the order of their first parameters."""
        found: dict[str, list[ParameterPlace]] = {}
        settings: dict[str, Group] = {}
        for name, place in self._places.items():
            key = group_key(self._settings[name])
            settings[key] = self._settings[name]
            found.setdefault(key, []).append(place)
        return [
            GroupSummary(
                settings[key],
                tuple(place.names[0] for place in places),
                sum(torch.Size(place.shape).numel() for place in places),
            )
            for key, places in found.items()
        ]

    def shapes(self) -> list[tuple[Group, list[tuple[int, ...]]]]:
        """Return, for each group, its settings and the shapes of its parameters."""
        return [
            (each.settings, [self._places[name].shape for name in each.names])
            for each in self.summaries()
        ]

    def _of(self, place: ParameterPlace, own: Mapping[str, Any]) -> Group:
        found = {**self._config.settings_of(place), **own}
        if self._config.layer_decay != 1:
            rate = found.get("lr", self._config.lr)
            found["lr"] = rate * self._config.layer_decay**place.later
        return found

    def _unused(self, pattern: _Pattern, earlier: Sequence[_Pattern]) -> str:
        taken = [each for each in earlier if any(map(pattern.fits, self._places.values()))]
        if taken:
            return f"optimizer.groups: {pattern.text} has no parameters left: an earlier group has them all"
        names = [name for place in self._places.values() for name in place.names]
        hint = nearest(pattern.match, names)
        example = f"; names are such as {names[0]}" if names else ": none is trained"
        return f"optimizer.groups: {pattern.text} fits no trained parameter{hint}{example}"


def freeze(config: OptimizerConfig, model: nn.Module) -> None:
    """Switch off the gradients of the parameters of ``model`` that are in groups of ``config`` with ``freeze:
    true``."""
    patterns = _patterns(config)
    if not any(each.freezes for each in patterns):
        return
    by_name = dict(model.named_parameters())
    used: set[int] = set()
    for place in places_of(model):
        index = next((i for i, each in enumerate(patterns) if each.fits(place)), None)
        if index is not None and patterns[index].freezes:
            used.add(index)
            by_name[next(name for name in place.names if name in by_name)].requires_grad_(False)
    for index, pattern in enumerate(patterns):
        if pattern.freezes and index not in used:
            raise ConfigError(
                f"optimizer.groups: {pattern.text} fits no parameter{nearest(pattern.match, by_name)}"
            )


def group_key(settings: Mapping[str, Any]) -> str:
    """Return a text that is equal for two groups exactly if their settings are equal."""
    return repr(sorted(settings.items()))


class _Pattern(NamedTuple):
    """One entry of ``optimizer.groups``. ``text`` is the entry as error messages show it.

    ``match``, ``kind`` (the key ``type``; "" for any) and ``dims`` (None for any) select parameters. ``freezes`` is
    True if these parameters are not trained. ``settings`` are the entry's settings of the optimizer.
    """

    text: str
    match: str
    kind: str
    dims: int | None
    freezes: bool
    settings: Group

    def fits(self, place: ParameterPlace) -> bool:
        return (
            (
                not self.match
                or any(re.fullmatch(_regular(self.match), name) for name in place.names)
            )
            and (not self.kind or self.kind in place.kinds)
            and self.dims in (None, place.dims)
        )


def _patterns(config: OptimizerConfig) -> list[_Pattern]:
    found = [_pattern(index, entry) for index, entry in enumerate(config.groups)]
    clipped = [each for each in found if {*each.settings} & {*CLIPS}]
    for number, each in enumerate(clipped, 1):
        each.settings[CLIP_GROUP] = number
    return found


def _clips(config: OptimizerConfig, patterns: Iterable[_Pattern]) -> tuple[ClipGroup, ...]:
    """Return the clipping rules.

    Rule 0 follows the optimizer's settings. Each group with its own ``clip_norm`` or ``clip_value`` has one more rule.
    ``clip_group`` in the settings of a parameter is the index of its rule.
    """
    found, norms = [ClipGroup(0, config.clip_norm, config.clip_value)], 0
    for own in (each.settings for each in patterns if CLIP_GROUP in each.settings):
        norms += "clip_norm" in own
        found.append(
            ClipGroup(
                norms if "clip_norm" in own else 0,
                own.get("clip_norm", config.clip_norm),
                own.get("clip_value", config.clip_value),
            )
        )
    return tuple(found)


def _pattern(index: int, entry: Any) -> _Pattern:
    where = f"optimizer.groups[{index}]"
    if not isinstance(entry, Mapping) or not set(entry) & {"match", "type", "dims"}:
        raise ConfigError(
            f"{where}={printable(str(entry))}: accepted is {{match: PATTERN, type: CLASS, dims: N, KEY: VALUE}} with "
            "at least one of match, type and dims"
        )
    match, kind = str(entry.get("match", "")), str(entry.get("type", ""))
    dims, freezes = entry.get("dims"), entry.get("freeze", False)
    if dims is not None and (isinstance(dims, bool) or not isinstance(dims, int)):
        raise ConfigError(f"{where}.dims={dims}: accepted is a number of dimensions, such as 1")
    if not isinstance(freezes, bool):
        raise ConfigError(f"{where}.freeze={freezes}: accepted are true and false")
    selecting = {k: v for k, v in entry.items() if k in _SELECTING}
    settings = {str(k): v for k, v in entry.items() if k not in _SELECTING}
    if freezes and settings:
        raise ConfigError(
            f"{where}: freeze: true trains nothing, so {', '.join(settings)} has no meaning"
        )
    for key in {*CLIPS} & {*settings}:
        if isinstance(settings[key], bool) or not isinstance(settings[key], int | float):
            raise ConfigError(
                f"{where}.{key}={settings[key]}: accepted is a number, 0 for no clipping"
            )
        check_positive(f"{where}.{key}", settings[key], zero=True)
    shown = ", ".join(f"{key}: {value}" for key, value in selecting.items())
    return _Pattern(f"{{{printable(shown)}}}", match, kind, dims, freezes, settings)


def _regular(pattern: str) -> str:
    """Return the regular expression of a pattern: ``*`` is any text, ``?`` one character, ``{0..3}`` a range of
    numbers, ``|`` separates alternatives."""
    return "|".join(f"(?:{''.join(_pieces(part))})" for part in pattern.split("|"))


def _pieces(part: str) -> Iterator[str]:
    for piece in re.split(r"(\*|\?|\{\d+\.\.\d+\})", part.strip()):
        if piece in ("*", "?"):
            yield ".*" if piece == "*" else "."
        elif piece.startswith("{"):
            first, last = (int(number) for number in piece[1:-1].split(".."))
            yield f"(?:{'|'.join(map(str, range(first, last + 1)))})"
        else:
            yield re.escape(piece)

"""The places of parameters in a model. The patterns and rules of parameter groups select parameters by their place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn


class ParameterPlace(NamedTuple):
    """The place of a parameter in its model.

    ``names``      all names of the parameter; checkpoints use the first
    ``kinds``      the class names of the modules that hold the parameter
    ``later``      the number of layers after the parameter's own layer
    ``is_output``  whether the parameter is in the model's last module with parameters, and not an embedding
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    shape: tuple[int, ...]
    later: int = 0
    is_output: bool = False

    @property
    def dims(self) -> int:
        return len(self.shape)


def places_of(model: nn.Module) -> Iterator[ParameterPlace]:
    """Yield the place of each parameter. A shared parameter has one place with several names."""
    names: dict[nn.Parameter, list[str]] = {}
    kinds: dict[nn.Parameter, list[str]] = {}
    last: frozenset[nn.Parameter] = frozenset()
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in own.items():
            names.setdefault(parameter, []).append(f"{path}.{name}" if path else name)
            kinds.setdefault(parameter, []).append(type(module).__name__)
        last = frozenset(own.values()) or last
    layers = _layers([each[0] for each in names.values()])
    most = max(layers, default=0)
    for (parameter, found), layer in zip(names.items(), layers):
        kind = tuple(kinds[parameter])
        embeds = any("Embedding" in each for each in kind)
        output = parameter in last and not embeds
        yield ParameterPlace(tuple(found), kind, tuple(parameter.shape), most - layer, output)


def _layers(names: Sequence[str]) -> list[int]:
    """Return the layer number of each name. ``names`` are in the order of the model.

    Names with the same prefix up to their first number (``layers.3``) are one layer. Unnumbered names before all
    numbered names are layer 0. Unnumbered names after a numbered name are one more layer, behind all numbered layers.
    """
    numbered = [re.match(r"(?:\D*\.)?\d+(?=\.)", name) for name in names]
    beginnings = list(dict.fromkeys(each[0] for each in numbered if each is not None))
    found, after = [], 0
    for each in numbered:
        if each is not None:
            after = len(beginnings) + 1
            found.append(1 + beginnings.index(each[0]))
        else:
            found.append(after)
    return found

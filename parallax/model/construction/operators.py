"""What a log must know of an operator: what it writes, whether it draws, and whether it returns values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_EMPTY = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
"""Operators that only make room."""

_OVERWRITES = {
    "bernoulli_",
    "cauchy_",
    "copy_",
    "exponential_",
    "fill_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
}
"""Operators in place for whom it does not matter what was there."""

_ALSO_WRITTEN = {"native_batch_norm": ("running_mean", "running_var")}
"""Arguments that are written though the schema does not say so."""


@dataclass(frozen=True)
class Operator:
    """``written`` are the arguments that it writes, by name, and ``overwrites`` whether it does so without reading
    them; ``looks`` whether it only changes how a tensor looks at memory; ``draws`` whether it is random; ``answers``
    whether it returns plain values; ``empty`` whether it only makes room; ``shaped`` whether the sizes that it returns
    depend on values; ``placed`` whether it is told a device; ``moves`` whether it copies there what it is given."""

    names: tuple[str, ...]
    written: frozenset[str]
    overwrites: bool
    looks: bool
    draws: bool
    answers: bool
    empty: bool
    shaped: bool
    placed: bool
    moves: bool


@cache
def operator(function: Any) -> Operator:
    """Read from the schema and the tags of an overload of an operator."""
    schema = function._schema
    name = schema.name.rpartition(":")[2]
    arguments, tags = schema.arguments, function.tags
    written = frozenset(a.name for a in arguments if a.alias_info and a.alias_info.is_write)
    written |= frozenset(_ALSO_WRITTEN.get(name, ()))
    returns_tensors = any("Tensor" in str(r.type) for r in schema.returns)
    return Operator(
        names=tuple(argument.name for argument in arguments),
        written=written,
        overwrites=name in _OVERWRITES or all(a.is_out for a in arguments if a.name in written),
        looks=torch.Tag.inplace_view in tags,
        draws=torch.Tag.nondeterministic_seeded in tags
        or any(a.name == "generator" for a in arguments),
        answers=not returns_tensors and not written,
        empty=schema.name.startswith("aten::") and name in _EMPTY,
        shaped=torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags,
        placed=any(a.name == "device" for a in arguments),
        moves=name == "_to_copy",
    )

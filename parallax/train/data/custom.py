"""Rows of a data source that the user implements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parallax.common.targets import call_target, check_call
from parallax.errors import DataError, printable
from parallax.model.source import ModelConfig
from parallax.train.data.source import DataConfig, Source, seed_generators

_OFFERED = {
    "batch": ("rows",),
    "validation": ("index", "rows"),
    "state_dict": (),
    "load_state_dict": ("state",),
}


@dataclass(frozen=True, kw_only=True)
class CustomDataConfig(DataConfig):
    """The user's own data source.

    ``target``: the factory as ``package.module:function``, which returns a :class:`~parallax.train.data.source.Source`.
    ``kwargs``: its keyword arguments, for example ``data.kwargs.path=/rows`` on the command line.
    """

    name: str = "custom"
    target: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"data.target={printable(self.target)}"

    def open(self, model: ModelConfig, seed: int, *, quiet: bool = True) -> Source:  # noqa: ARG002
        """Return the user's source. The global random generators are seeded with ``seed`` before the source is
        created."""
        seed_generators(seed)
        source: Source = call_target("data", self.target, self.kwargs)
        what = f"data.target={self.target} returned a {type(source).__name__}"
        if missing := [name for name in _OFFERED if not callable(getattr(source, name, None))]:
            raise DataError(
                f"{what} without {', '.join(missing)}: see parallax.train.data.source.Source for what a source offers"
            )
        for name, arguments in _OFFERED.items():
            check_call(f"{what} with {name}", getattr(source, name), *arguments)
        return source

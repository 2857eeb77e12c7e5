"""Select the named columns of a file that are the model's inputs and the loss's targets."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallax.errors import DataError
from parallax.model.source import ModelConfig
from parallax.plan.tier import AUTO
from parallax.train.data.dataset import TARGET_KEYS, Split
from parallax.train.data.order import Numbers
from parallax.train.data.table import INPUTS, TARGETS, Values

Array = NDArray[Any]
Names = list[str] | str

_SAMPLED = 32  # rows of which a fingerprint has the values


@dataclass(frozen=True)
class Columns:
    """The names of the input columns and of the target columns: ``parts`` maps "inputs" and "targets" to these names. A
    single column is read as an array, several columns are read as a mapping. ``by_name``: whether the model takes its
    inputs as keyword arguments, so that the inputs are always read as a mapping."""

    parts: Mapping[str, tuple[str, ...]]
    by_name: bool

    @classmethod
    def chosen(
        cls, label: str, known: Collection[str], inputs: Names, targets: Names, *, by_name: bool
    ) -> Columns:
        """Return the columns that the settings ``inputs`` and ``targets`` select; auto follows the rules of
        :class:`~parallax.train.data.dataset.DatasetDataConfig`. ``by_name``: whether the model takes its inputs as
        keyword arguments. Raises :class:`DataError` for a name that is not ``known``."""
        several = listed(targets)
        if missing := [name for name in several if name not in known]:
            raise DataError(
                f"{label}: there is no {', '.join(missing)}; the names are {', '.join(known)}: set data.targets=NAME"
            )
        split = Split(
            label,
            None if inputs == AUTO else tuple(listed(inputs)),
            several[0] if several else AUTO,
            keep=lambda: by_name,
        )
        found = split({name: name for name in known})
        wanted = [name for name in found[INPUTS] if inputs != AUTO or name not in several[1:]]
        if not wanted:
            raise DataError(
                f"{label}: {found[TARGETS]} is the only name, and inputs need one too: set data.inputs=NAME"
            )
        return cls({INPUTS: tuple(wanted), TARGETS: tuple(several) or (found[TARGETS],)}, by_name)

    @classmethod
    def unlabelled(
        cls, label: str, known: Collection[str], inputs: Names, targets: Names, *, by_name: bool
    ) -> Columns:
        """Return the input columns for rows without targets. If ``inputs`` is auto, all columns are selected, except
        ``targets`` and columns with a usual name of targets."""
        wanted = listed(inputs) or [
            name for name in known if name not in (*listed(targets), *TARGET_KEYS)
        ]
        if missing := [name for name in wanted if name not in known]:
            raise DataError(
                f"{label}: there is no {', '.join(missing)}; the names are {', '.join(known)}: set data.inputs=NAME"
            )
        if not wanted:
            raise DataError(
                f"{label}: its names, {', '.join(known)}, are those of targets; set data.inputs=NAME"
            )
        return cls({INPUTS: tuple(wanted), TARGETS: ()}, by_name)

    def names(self, parts: Collection[str]) -> tuple[str, ...]:
        """Return the names of all columns in ``parts`` (inputs, targets), each once."""
        return tuple(dict.fromkeys(name for part in sorted(parts) for name in self.parts[part]))

    def values(self, arrays: Mapping[str, Array], parts: Collection[str]) -> Values:
        """Return the values of ``parts`` (inputs, targets). ``arrays``: column name → values of the rows."""
        found: Values = {}
        for part in parts:
            names = self.parts[part]
            alone = len(names) == 1 and not (self.by_name and part == INPUTS)
            found[part] = (
                arrays[names[0]] if alone else {_argument(name): arrays[name] for name in names}
            )
        return found


def digest_of_columns(
    names: Sequence[str], rows: int, read: Callable[[str, Numbers], Array]
) -> str:
    """Return a digest of the columns ``names``. The digest covers dtypes, shapes, and the values of a few of the
    ``rows`` rows. ``read(name, numbers)`` returns the values of the column ``name`` in the rows ``numbers``."""
    chosen = np.unique(np.linspace(0, rows - 1, _SAMPLED).astype(np.int64))
    found = 0
    for name in names:
        values = np.ascontiguousarray(read(name, chosen))
        head = f"{name} {values.dtype.str} {values.shape[1:]}"
        found = zlib.crc32(values.tobytes(), zlib.crc32(head.encode(), found))
    return f"{rows}-{found:08x}"


def listed(names: Names) -> list[str]:
    """Return the names as a list; an empty list for auto."""
    if isinstance(names, str):
        return [] if names == AUTO else [names]
    return list(names)


def _argument(name: str) -> str:
    """Return the name of the model's argument for a column or a file: its name without folders."""
    return name.rpartition("/")[2]


def takes_names(model: ModelConfig, known: Collection[str]) -> bool:
    """Return whether ``model`` takes its inputs as keyword arguments, if the rows have the names ``known``."""
    return model.name == "huggingface" or ("labels" in known and model.takes_labels)

"""Tensors of a checkpoint by name, verified, and what it is refused for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallax.errors import CheckpointError, printable
from parallax.model.files.tensors import held_in
from parallax.runtime.checkpoint.checksums import checksum
from parallax.runtime.checkpoint.folder import INDEX, VERSION


class CheckpointReader:
    """Reads tensors of a checkpoint by name, wherever they were saved."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
            if index["version"] != VERSION:
                raise CheckpointError(
                    f"{directory} has version {printable(str(index['version']))}; this Parallax reads {VERSION}"
                )
            self.step, self.state, self.scale = (
                int(index["step"]),
                dict(index["state"]),
                dict(index.get("scale", {})),
            )
            self._fingerprint, self._optimizer = str(index["fingerprint"]), list(index["optimizer"])
            self._trained_by = str(index.get("trained_by", ""))  # older ones do not say
            self._checksums: dict[str, int] = dict(index["checksums"])
            self._nodes: dict[str, str] = dict(index.get("nodes", {}))
            self._base, self._marks = str(index.get("base", "")), dict(index.get("marks", {}))
            paths = sorted(directory.glob("*.safetensors"))
            self._files = [safe_open(path, framework="pt") for path in paths]
            self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
            self._paths = dict(zip(map(id, self._files), paths))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            reason = f"{type(error).__name__}: {printable(str(error))}"
            raise CheckpointError(
                f"{directory} is damaged ({reason}); use an earlier one"
            ) from error

    def check_names(self, expected: Iterable[str], fingerprint: str) -> None:
        """Refuse a checkpoint of another model, whose names ``expected`` are, before anything is changed."""
        wanted = set(expected)
        found = {
            name.removeprefix("model/") for name in self._checksums if name.startswith("model/")
        }
        if self._fingerprint != fingerprint or wanted != found:
            raise CheckpointError(
                f"{self.directory} holds another model: missing {_listed(wanted - found)}, extra "
                f"{_listed(found - wanted)}; fingerprint {printable(self._fingerprint)} where {fingerprint} is due"
            )

    def check_base(self, base: str, marks: dict[str, int]) -> None:
        """Refuse a checkpoint that was trained beside other parameters than those it leaves out, whose ``marks`` are of
        ``base`` here."""
        other = [name for name, found in marks.items() if self._marks.get(name) != found]
        if other:
            raise CheckpointError(
                f"{self.directory} was trained over another base ({printable(self._base)}), of which it holds nothing; "
                f"{base} differs in {_listed(set(other))}: give the base that it was trained over, or start a new run"
            )

    def check_optimizer(self, name: str) -> None:
        """Refuse states of another optimizer: those of one mean something else to the other."""
        if self._trained_by not in ("", name):
            raise CheckpointError(
                f"{self.directory} was trained by {printable(self._trained_by)}, and its states are no good to {name}: "
                f"use optimizer={printable(self._trained_by)}, or start a new run"
            )

    def model_tensors(self) -> dict[str, Tensor]:
        """What it holds of the model, by the model's names, without values."""
        held: dict[str, Tensor] = {}
        for file in self._files:
            held |= held_in(file)
        return {
            name.removeprefix("model/"): tensor
            for name, tensor in held.items()
            if name.startswith("model/")
        }

    def read(self, name: str) -> Tensor:
        """One tensor, verified."""
        try:
            tensor: Tensor = self._where[name].get_tensor(name)
        except (KeyError, SafetensorError) as error:
            if name not in self._where and name in self._nodes:
                raise CheckpointError(self._elsewhere(name)) from error
            raise CheckpointError(
                f"{self.directory} has no readable {name}; use an earlier one"
            ) from error
        if self._checksums.get(name) != checksum(tensor):
            raise CheckpointError(
                f"{self.directory}: {name} is damaged (checksum); use an earlier checkpoint"
            )
        return tensor

    @property
    def split(self) -> bool:
        """Whether nodes that share no disk saved it, each a part."""
        return bool(self._nodes)

    def missing(self, names: Iterable[str]) -> list[str]:
        """What it holds of the parameters ``names``, but not here."""
        wanted = [f"{kind}/{name}" for name in names for kind in ("model", *self._optimizer)]
        return [each for each in wanted if each in self._nodes and each not in self._where]

    def files(self) -> dict[str, str]:
        """The file that each tensor is in, of those that are here."""
        return {name: self._paths[id(file)].name for name, file in self._where.items()}

    def check_whole(self) -> None:
        """Refuse a checkpoint of which other nodes hold parts."""
        for name in self._checksums:
            if name not in self._where and name in self._nodes:
                raise CheckpointError(self._elsewhere(name))

    def _elsewhere(self, name: str) -> str:
        """Of a tensor that another node has saved."""
        place, here = printable(self._nodes[name]), {self._nodes.get(each) for each in self._where}
        mine = ", ".join(sorted(printable(str(each)) for each in here if each)) or "no node"
        return (
            f"{self.directory} has on this node what {mine} saved, and {printable(name)} is on {place}: run with the "
            f"same nodes and stages, or copy the *.safetensors of that folder from {place} to here"
        )

    def check(self, names: dict[str, Tensor]) -> None:
        """Read everything that a rank with the tensors ``names`` needs, one by one, and keep nothing: what is refused
        is refused before anything is changed."""
        for name, mine in names.items():
            found = self.read(f"model/{name}")
            if found.shape != mine.shape:
                was, due = list(found.shape), list(mine.shape)
                raise CheckpointError(
                    f"{self.directory}: {name} has shape {was} where {due} is due"
                )
            self.states(name)

    def states(self, name: str) -> dict[str, Tensor]:
        """The optimizer's states of a parameter; of one that never had a gradient there are none."""
        keys = [key for key in self._optimizer if f"{key}/{name}" in self._checksums]
        return {key: self.read(f"{key}/{name}") for key in keys}


def _listed(names: set[str]) -> str:
    shown = ", ".join(printable(name) for name in sorted(names)[:3])
    return f"{shown} ({len(names)})" if names else "nothing"

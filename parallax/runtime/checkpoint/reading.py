"""Reads and verifies the tensors of a checkpoint by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallax.common.documents import MANIFEST_BYTES, any_json, read_text
from parallax.errors import CheckpointError, printable
from parallax.machine.host import unmapping_files
from parallax.model.files.tensors import held_in
from parallax.runtime.checkpoint.caller_state import thaw
from parallax.runtime.checkpoint.checksums import SEAL, checksum, seal, verify_file
from parallax.runtime.checkpoint.folder import INDEX, VERSION
from parallax.swap.optimizer.averaging import AVERAGE


class CheckpointReader:
    """Reads tensors of a checkpoint by name, from any of its files. A whole file is verified before its first tensor is
    returned.

    If ``averaged`` is True, :meth:`read` returns the average of a model tensor if the checkpoint has one.
    """

    def __init__(self, directory: Path, *, averaged: bool = False) -> None:
        self.directory, self.averaged = directory, averaged
        index = _read_index(directory)
        with _as_damage(directory):
            self.step, self.state = int(index["step"]), dict(thaw(index["state"]))
            self.scale, self.metrics = dict(index.get("scale", {})), dict(index.get("metrics", {}))
            self.averages = dict(index.get("averages", {}))
            self._fingerprint, self._optimizer = str(index["fingerprint"]), list(index["optimizer"])
            # The time at which its run was started.
            self.started = float(index.get("started", 0.0))
            self._trained_by = str(index.get("trained_by", ""))
            self._checksums: dict[str, int] = dict(index["checksums"])
            # Older checkpoints lack the keys that are read with a default.
            self._digests = {n: str(f["sha256"]) for n, f in index.get("files", {}).items()}
            self._structure = str(index.get("structure", ""))
            self._dtype = str(index.get("dtype", ""))
            self._nodes: dict[str, str] = {
                n: str(p) for n, p in dict(index.get("nodes", {})).items()
            }
            # Name → checksum of the base's tensors, which a checkpoint of adapters does not hold.
            self._base, self.marks = str(index.get("base", "")), dict(index.get("marks", {}))
        self._verified: set[Path] = set()
        self._where: dict[str, tuple[Path, Any]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            if not path.is_file():
                continue  # opening a pipe could block for ever
            with _as_damage(path):
                file = safe_open(path, framework="pt")
                self._where |= dict.fromkeys(file.keys(), (path, file))

    def check_names(
        self, expected: Iterable[str], fingerprint: str, structure: str = "", dtype: str = ""
    ) -> None:
        """Raise :class:`CheckpointError` if the checkpoint is of another model: if the names of its model tensors
        differ from ``expected``, or if its fingerprint differs from ``fingerprint``.

        The fingerprint includes the number format. So a checkpoint in another format than ``dtype`` is also accepted if
        ``structure``, a hash that does not depend on the format, is equal.
        """
        wanted = set(expected)
        found = {
            name.removeprefix("model/") for name in self._checksums if name.startswith("model/")
        }
        same = self._fingerprint == fingerprint
        if self._dtype not in ("", dtype):
            same = same or self._structure == structure
        if not same and wanted == found:
            raise CheckpointError(
                f"{self.directory} holds another model: its tensors have the same names, but other shapes, blocks or "
                "frozen parameters; resume with the model and the optimizer.groups of the training, or start a new run "
                "from its weights with parallax export and parallax import"
            )
        if wanted != found:
            raise CheckpointError(
                f"{self.directory} holds another model: missing {_listed(wanted - found)}, extra "
                f"{_listed(found - wanted)}"
            )

    def check_base(self, base: str, marks: dict[str, int], dtype: str = "") -> None:
        """Raise :class:`CheckpointError` if the checkpoint's adapters were trained on another base model than this
        run's.

        ``base`` is the name of this run's base model, ``marks`` are the checksums of its tensors, and ``dtype`` is its
        number format. The same base model in another number format counts as another base model.
        """
        if marks and self._dtype not in ("", dtype):
            raise CheckpointError(
                f"{self.directory} was trained on a base in {printable(self._dtype)}, which it does not hold, and "
                f"here the base is in {dtype}: resume with the precision.parameters of the training"
            )
        other = [name for name, found in marks.items() if self.marks.get(name) != found]
        if other:
            raise CheckpointError(
                f"{self.directory} was trained on another base ({printable(self._base)}), which it does not hold; "
                f"{base} differs in {_listed(set(other))}: give the base that it was trained on, or start a new run"
            )

    def check_optimizer(self, name: str) -> None:
        """Raise :class:`CheckpointError` if the checkpoint's optimizer is not ``name``."""
        if self._trained_by not in ("", name):
            trained_by = printable(self._trained_by)
            if ":" in trained_by:
                remedy = f"optimizer=custom optimizer.target={trained_by}"
            elif trained_by.isidentifier() and trained_by.islower():
                remedy = f"optimizer={trained_by}"
            else:
                remedy = f"the function {trained_by} as Engine.build(optimizer=...)"
            raise CheckpointError(
                f"{self.directory} was trained by {trained_by}, whose states {name} cannot use: "
                f"use {remedy}, or start a new run"
            )

    def held(self) -> dict[str, Tensor]:
        """Return the shape and type of each tensor on this node: a dict from full names, such as ``model/<name>`` or
        ``<optimizer state>/<name>``, to tensors without values."""
        held: dict[str, Tensor] = {}
        for file in {id(file): file for _, file in self._where.values()}.values():
            held |= held_in(file)
        return held

    def model_tensors(self) -> dict[str, Tensor]:
        """Return the shape and type of each of the model's tensors on this node: a dict from names in the model to
        tensors without values."""
        return {
            name.removeprefix("model/"): tensor
            for name, tensor in self.held().items()
            if name.startswith("model/")
        }

    def close(self) -> None:
        """Close the files; no tensor can be read afterwards."""
        with unmapping_files():
            self._where.clear()

    def read(self, name: str) -> Tensor:
        """Return the tensor with the full name ``name``, such as ``model/<name>`` or ``<optimizer state>/<name>``. If
        ``averaged`` is True, return the average of a model tensor instead if the checkpoint has one."""
        average = name.replace("model/", f"{AVERAGE}/", 1)
        if self.averaged and name.startswith("model/") and average in self._checksums:
            return self._read(average).to(self._formats[name])
        return self._read(name)

    @cached_property
    def _formats(self) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self.held().items()}

    def _read(self, name: str) -> Tensor:
        path, file = self._find(name)
        self._verify(path)
        with _as_damage(path):
            tensor: Tensor = file.get_tensor(name)
        if path not in self._verified and self._checksums.get(name) != checksum(tensor):
            raise CheckpointError(
                f"{path}: {printable(name)} is damaged (checksum); use an earlier checkpoint"
            )
        return tensor

    def _find(self, name: str) -> tuple[Path, Any]:
        """Return the path of the file that holds the tensor with the full name ``name``, and the open file. Raises
        :class:`CheckpointError` if this node has no such file."""
        if name in self._where and name in self._checksums:
            return self._where[name]
        if name not in self._where and name in self._nodes:
            raise CheckpointError(self._elsewhere(name))
        raise CheckpointError(
            f"{self.directory} has no readable {printable(name)}; use an earlier checkpoint"
        )

    def _verify(self, path: Path) -> None:
        """Verify a file once against its recorded digest."""
        expected = self._digests.get(path.name)
        if expected is not None and path not in self._verified:
            with _as_damage(path):
                verify_file(path, expected, self._checksums)
            self._verified.add(path)

    def elsewhere(self) -> dict[str, str]:
        """Return a dict from the full name of each tensor that this node lacks to the name of the node that saved the
        tensor."""
        return {name: node for name, node in self._nodes.items() if name not in self._where}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the full names (``model/<name>``, ``<optimizer state>/<name>``) of those tensors of the parameters
        ``names`` that are in the checkpoint, but not on this node."""
        wanted = [f"{kind}/{name}" for name in names for kind in ("model", *self._optimizer)]
        return [each for each in wanted if each in self._checksums and each not in self._where]

    def files(self) -> dict[str, str]:
        """Return a dict from the full name of each tensor on this node to the name of the file that holds it."""
        return {name: path.name for name, (path, _) in self._where.items()}

    def check_whole(self) -> None:
        """Raise :class:`CheckpointError` if this node lacks a tensor of the checkpoint that another node has saved."""
        for name in self._checksums:
            if name not in self._where and name in self._nodes:
                raise CheckpointError(self._elsewhere(name))

    def _elsewhere(self, name: str) -> str:
        """Return the error message for the tensor ``name``, which this node lacks because another node has saved
        it."""
        place, here = printable(self._nodes[name]), {self._nodes.get(each) for each in self._where}
        mine = ", ".join(sorted(printable(str(each)) for each in here if each)) or "no node"
        return (
            f"{self.directory}: this node has the files of {mine}, and {printable(name)} is on {place}: run with the "
            f"same nodes and stages, or copy the *.safetensors of that folder from {place} to this node"
        )

    def check(self, names: dict[str, Tensor]) -> None:
        """Raise :class:`CheckpointError` unless the checkpoint has undamaged values and states of the right shapes for
        ``names``.

        ``names`` maps the names of all tensors that this rank needs to its own tensors. The check comes before anything
        is changed, and keeps no tensor of the checkpoint in memory.
        """
        for name, mine in names.items():
            _, file = self._find(f"model/{name}")
            was, due = list(file.get_slice(f"model/{name}").get_shape()), list(mine.shape)
            if was != due:
                raise CheckpointError(
                    f"{self.directory}: {printable(name)} has shape {was} where {due} is expected"
                )
        for name in names:
            for each in (f"model/{name}", *(f"{key}/{name}" for key in self._states_of(name))):
                path, _ = self._find(each)
                self._verify(path)
                if path not in self._verified:
                    self.read(each)

    def states(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer states of the parameter ``name``, by the states' names; empty if the parameter never had
        a gradient."""
        return {key: self.read(f"{key}/{name}") for key in self._states_of(name)}

    def state_of(self, name: str, key: str) -> Tensor | None:
        """Return the state ``key`` of the parameter ``name``; None if the checkpoint lacks it."""
        return self.read(f"{key}/{name}") if key in self._states_of(name) else None

    def _states_of(self, name: str) -> list[str]:
        return [key for key in self._optimizer if f"{key}/{name}" in self._checksums]


def read_metrics(directory: Path) -> dict[str, Any]:
    """Return the values of the metrics, by name, that were saved with the checkpoint in ``directory``; an empty dict if
    they cannot be read."""
    try:
        return dict(_read_index(directory).get("metrics", {}))
    except (CheckpointError, ValueError, TypeError):
        return {}


def _read_index(directory: Path) -> dict[str, Any]:
    path = directory / INDEX
    with _as_damage(path):
        index = dict(any_json(read_text(path, MANIFEST_BYTES)))
        if index["version"] != VERSION:
            raise CheckpointError(
                f"{directory} has version {printable(str(index['version']))}; this Parallax reads {VERSION}"
            )
        # Older checkpoints have no digests.
        if ("files" in index or SEAL in index) and index.get(SEAL) != seal(index):
            raise CheckpointError(f"{path}: it is damaged (SHA-256); use an earlier checkpoint")
    return index


@contextlib.contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """A context in which an error of reading or parsing is raised as :class:`CheckpointError`, which says that ``path``
    is damaged."""
    try:
        yield
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        SafetensorError,
    ) as error:
        reason = f"{type(error).__name__}: {printable(str(error))[:300]}"
        raise CheckpointError(f"{path} is damaged ({reason}); use an earlier checkpoint") from error


def _listed(names: set[str]) -> str:
    shown = ", ".join(printable(name) for name in sorted(names)[:3])
    return f"{shown} ({len(names)})" if names else "nothing"

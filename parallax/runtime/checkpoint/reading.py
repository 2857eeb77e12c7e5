"""Tensors of a checkpoint by name, verified, and what it is refused for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallax.common.documents import MANIFEST_BYTES, any_json, read_text
from parallax.errors import CheckpointError, printable
from parallax.model.files.tensors import held_in
from parallax.runtime.checkpoint.caller_state import thaw
from parallax.runtime.checkpoint.checksums import SEAL, checksum, seal, verify_file
from parallax.runtime.checkpoint.folder import INDEX, VERSION


class CheckpointReader:
    """Reads tensors of a checkpoint by name, wherever they were saved. A file is read through once, and verified,
    before any of its tensors is given out."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = _read_index(directory)
        with _as_damage(directory):
            self.step, self.state = int(index["step"]), dict(thaw(index["state"]))
            self.scale, self.metrics = dict(index.get("scale", {})), dict(index.get("metrics", {}))
            self._fingerprint, self._optimizer = str(index["fingerprint"]), list(index["optimizer"])
            # When its run was started; older ones do not say.
            self.started = float(index.get("started", 0.0))
            self._trained_by = str(index.get("trained_by", ""))  # older ones do not say
            self._checksums: dict[str, int] = dict(index["checksums"])
            # Of each file; older ones have none.
            self._digests = {n: str(f["sha256"]) for n, f in index.get("files", {}).items()}
            self._structure = str(index.get("structure", ""))  # older ones have neither
            self._dtype = str(index.get("dtype", ""))
            self._nodes: dict[str, str] = {
                n: str(p) for n, p in dict(index.get("nodes", {})).items()
            }
            self._base, self._marks = str(index.get("base", "")), dict(index.get("marks", {}))
        self._verified: set[Path] = set()
        self._where: dict[str, tuple[Path, Any]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            if not path.is_file():
                continue  # a pipe, which to open could take for ever
            with _as_damage(path):
                file = safe_open(path, framework="pt")
                self._where |= dict.fromkeys(file.keys(), (path, file))

    def check_names(
        self, expected: Iterable[str], fingerprint: str, structure: str = "", dtype: str = ""
    ) -> None:
        """Refuse a checkpoint of another model, whose names ``expected`` are, before anything is changed. One in
        another number format than ``dtype`` is the same model where its ``structure`` is."""
        wanted = set(expected)
        found = {
            name.removeprefix("model/") for name in self._checksums if name.startswith("model/")
        }
        same = self._fingerprint == fingerprint
        if self._dtype not in ("", dtype):
            same = same or self._structure == structure
        if not same or wanted != found:
            raise CheckpointError(
                f"{self.directory} holds another model: missing {_listed(wanted - found)}, extra "
                f"{_listed(found - wanted)}; fingerprint {printable(self._fingerprint)} where {fingerprint} is due"
            )

    def check_base(self, base: str, marks: dict[str, int], dtype: str = "") -> None:
        """Refuse a checkpoint that was trained beside other parameters than those it leaves out, whose ``marks`` are of
        ``base`` here. In another number format than ``dtype`` they were others."""
        if marks and self._dtype not in ("", dtype):
            raise CheckpointError(
                f"{self.directory} was trained over a base in {printable(self._dtype)}, of which it holds nothing, and "
                f"here the base is in {dtype}: go on with the precision.parameters that it was trained with"
            )
        other = [name for name, found in marks.items() if self._marks.get(name) != found]
        if other:
            raise CheckpointError(
                f"{self.directory} was trained over another base ({printable(self._base)}), of which it holds nothing; "
                f"{base} differs in {_listed(set(other))}: give the base that it was trained over, or start a new run"
            )

    def check_optimizer(self, name: str) -> None:
        """Refuse states of another optimizer: those of one mean something else to the other."""
        if self._trained_by not in ("", name):
            trained_by = printable(self._trained_by)
            named = trained_by.islower()  # others are classes
            way = (
                f"optimizer={trained_by}"
                if named
                else f"an OptimizerConfig that builds {trained_by}"
            )
            raise CheckpointError(
                f"{self.directory} was trained by {trained_by}, and its states are no good to {name}: "
                f"use {way}, or start a new run"
            )

    def held(self) -> dict[str, Tensor]:
        """All that it holds, under its own names, without values."""
        held: dict[str, Tensor] = {}
        for file in {id(file): file for _, file in self._where.values()}.values():
            held |= held_in(file)
        return held

    def model_tensors(self) -> dict[str, Tensor]:
        """What it holds of the model, by the model's names, without values."""
        return {
            name.removeprefix("model/"): tensor
            for name, tensor in self.held().items()
            if name.startswith("model/")
        }

    def read(self, name: str) -> Tensor:
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
        """The file that holds it."""
        if name in self._where and name in self._checksums:
            return self._where[name]
        if name not in self._where and name in self._nodes:
            raise CheckpointError(self._elsewhere(name))
        raise CheckpointError(
            f"{self.directory} has no readable {printable(name)}; use an earlier one"
        )

    def _verify(self, path: Path) -> None:
        """Read a file whose digest is known, once."""
        expected = self._digests.get(path.name)
        if expected is not None and path not in self._verified:
            with _as_damage(path):
                verify_file(path, expected, self._checksums)
            self._verified.add(path)

    def elsewhere(self) -> dict[str, str]:
        """The tensors that are not here, and the node that saved each."""
        return {name: node for name, node in self._nodes.items() if name not in self._where}

    def missing(self, names: Iterable[str]) -> list[str]:
        """What it holds of the parameters ``names``, but not here."""
        wanted = [f"{kind}/{name}" for name in names for kind in ("model", *self._optimizer)]
        return [each for each in wanted if each in self._checksums and each not in self._where]

    def files(self) -> dict[str, str]:
        """The file that each tensor is in, of those that are here."""
        return {name: path.name for name, (path, _) in self._where.items()}

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
        """Look at everything that a rank with the tensors ``names`` needs, and keep nothing: what is refused is refused
        before anything is changed."""
        for name, mine in names.items():
            _, file = self._find(f"model/{name}")
            was, due = list(file.get_slice(f"model/{name}").get_shape()), list(mine.shape)
            if was != due:
                raise CheckpointError(
                    f"{self.directory}: {printable(name)} has shape {was} where {due} is due"
                )
        for name in names:
            for each in (f"model/{name}", *(f"{key}/{name}" for key in self._states_of(name))):
                path, _ = self._find(each)
                self._verify(path)
                if path not in self._verified:
                    self.read(each)

    def states(self, name: str) -> dict[str, Tensor]:
        """The optimizer's states of a parameter; of one that never had a gradient there are none."""
        return {key: self.read(f"{key}/{name}") for key in self._states_of(name)}

    def state_of(self, name: str, key: str) -> Tensor | None:
        """One of them; None where there is none."""
        return self.read(f"{key}/{name}") if key in self._states_of(name) else None

    def _states_of(self, name: str) -> list[str]:
        return [key for key in self._optimizer if f"{key}/{name}" in self._checksums]


def read_metrics(directory: Path) -> dict[str, Any]:
    """What a checkpoint is judged by; nothing where it cannot be read."""
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
        # Older ones have no digests.
        if ("files" in index or SEAL in index) and index.get(SEAL) != seal(index):
            raise CheckpointError(f"{path}: it is damaged (SHA-256); use an earlier checkpoint")
    return index


@contextlib.contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """What goes wrong in a file, said as its damage."""
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
        raise CheckpointError(f"{path} is damaged ({reason}); use an earlier one") from error


def _listed(names: set[str]) -> str:
    shown = ", ".join(printable(name) for name in sorted(names)[:3])
    return f"{shown} ({len(names)})" if names else "nothing"

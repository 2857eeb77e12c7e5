"""Checkpoints by parameter name: any plan can load what another has saved.

::

    step-00000030/
        stage-00.safetensors       model/<name>, and <optimizer state>/<name> for each parameter
        stage-00-001.safetensors   the next of them, where they are many
        stage-00-replica-01.…      states that a replica keeps for all
        stage-01.safetensors
        checkpoint.json            step, model fingerprint, plan hash, a checksum per tensor, the caller's state

Everything is written into a folder with another name, synced, and renamed last, so a folder called ``step-…`` is
always whole. Nothing is ever unpickled. Where a model trains adapters alone, the base that these were added to is not
in it, but a mark of each of its tensors, by which it is known again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from parallax.common.files import disk_free_bytes, sync
from parallax.common.units import format_bytes
from parallax.errors import CheckpointError, printable
from parallax.model.files.tensors import held_in

VERSION = 1
PART_BYTES = 64 * 2**20  # of a file; they are copied before they are written
_INDEX = "checkpoint.json"
_PIECES, _PIECE_BYTES = 64, 1024  # of a tensor that is left out
_PARTIAL = ".saving-"
_REPLACED = ".replaced-"
UNTOUCHED = "the last checkpoint is untouched"


def checkpoint_name(step: int) -> str:
    """The folder of a step; names sort by step."""
    return f"step-{step:08d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints below ``directory``, oldest first."""
    return sorted(path for path in directory.glob("step-*") if (path / _INDEX).is_file())


def remove_partial(directory: Path) -> None:
    """Delete what an interrupted save left over; a checkpoint that it was about to replace gets its name back."""
    for path in directory.glob(f"{_REPLACED}*"):
        final = directory / path.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(final)
    for path in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_old(directory: Path, keep: int, step: int) -> None:
    """Of the checkpoints up to that of ``step``, which was just saved, delete all but the last ``keep``; 0 keeps all.
    Later ones, which this training did not go on from, do not count: not every node may have them."""
    found = [path for path in list_checkpoints(directory) if path.name <= checkpoint_name(step)]
    for path in found[:-keep] if keep else []:
        shutil.rmtree(path, ignore_errors=True)


def digest(directory: Path) -> str:
    """What tells a checkpoint from every other one of the same step."""
    return hashlib.sha256((directory / _INDEX).read_bytes()).hexdigest()


def partial_folder(directory: Path, step: int) -> Path:
    """The folder that a save of ``step`` writes into."""
    return directory / f"{_PARTIAL}{checkpoint_name(step)}"


def begin(partial: Path) -> None:
    """Make the folder, without anything that an interrupted save left in it."""
    try:
        remove_partial(partial.parent)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot make {partial}: {error.strerror}{_free(partial)}; {UNTOUCHED}"
        ) from error


def write_parts(
    partial: Path, part: str, tensors: Iterable[tuple[str, Tensor]], part_bytes: int = PART_BYTES
) -> dict[str, int]:
    """Write named tensors, in files of about ``part_bytes``, so that never more of them need be in memory; the
    checksum of each."""
    checksums: dict[str, int] = {}
    batch: dict[str, Tensor] = {}
    count = 0

    def write() -> None:
        path = partial / (f"{part}-{count:03d}.safetensors" if count else f"{part}.safetensors")
        checksums.update(_write_part(path, batch))
        batch.clear()

    for name, tensor in tensors:
        batch[name] = tensor.detach().to("cpu").contiguous()
        if sum(value.nbytes for value in batch.values()) >= part_bytes:
            write()
            count += 1
    if batch or not count:
        write()
    return checksums


def _write_part(path: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    try:
        save_file(tensors, path)
        sync(path)
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise CheckpointError(
            f"cannot write {format_bytes(size)} to {path}: {printable(str(error))}{_free(path)}; {UNTOUCHED}"
        ) from error
    return {name: _checksum(tensor) for name, tensor in tensors.items()}


def _free(path: Path) -> str:
    try:
        return f", {format_bytes(disk_free_bytes(path))} free"
    except OSError:
        return ""


def finish(partial: Path, index: dict[str, Any]) -> None:
    """Write the index and give the folder its name; replaces a checkpoint of the same step."""
    path, name = partial / _INDEX, partial.name.removeprefix(_PARTIAL)
    final, replaced = partial.parent / name, partial.parent / f"{_REPLACED}{name}"
    text = json.dumps({"version": VERSION, **index}, indent=1)
    try:
        path.write_text(text, encoding="utf-8")
        sync(path)
        sync(partial)
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        sync(final.parent)
    except OSError as error:
        size = format_bytes(len(text))
        raise CheckpointError(
            f"cannot write {size} to {path}: {error.strerror}{_free(path)}; {UNTOUCHED}"
        ) from error
    shutil.rmtree(replaced, ignore_errors=True)


def mark(tensor: Tensor) -> int:
    """A checksum of some of the bytes of a tensor that a checkpoint leaves out, to know it by: all of a small one,
    pieces from everywhere of a large one."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if len(flat) > _PIECES * _PIECE_BYTES:
        step = (len(flat) - _PIECE_BYTES) // (_PIECES - 1)
        flat = flat.as_strided((_PIECES, _PIECE_BYTES), (step, 1))
    return _checksum(flat.contiguous().cpu())


class CheckpointReader:
    """Reads tensors of a checkpoint by name, wherever they were saved."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
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
        if self._checksums.get(name) != _checksum(tensor):
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


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]

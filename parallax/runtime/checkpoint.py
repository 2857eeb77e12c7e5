"""Checkpoints by parameter name: any plan can load what another has saved.

::

    step-00000030/
        stage-00.safetensors   model/<name>, and <optimizer state>/<name> for each parameter
        stage-01.safetensors
        checkpoint.json        step, model fingerprint, plan hash, a checksum per tensor, the caller's state

Everything is written into a folder with another name, synced, and renamed last, so a folder called ``step-…`` is
always whole. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from parallax.errors import CheckpointError, printable
from parallax.units import format_bytes

VERSION = 1
_INDEX = "checkpoint.json"


def checkpoint_name(step: int) -> str:
    """The folder of a step; names sort by step."""
    return f"step-{step:08d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints below ``directory``, oldest first."""
    return sorted(path for path in directory.glob("step-*") if (path / _INDEX).is_file())


def remove_partial(directory: Path) -> None:
    """Delete what an interrupted save left over."""
    for path in directory.glob(".saving-*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_old(directory: Path, keep: int) -> None:
    """Delete all but the last ``keep`` checkpoints; 0 keeps all."""
    for path in list_checkpoints(directory)[:-keep] if keep else []:
        shutil.rmtree(path, ignore_errors=True)


def begin(directory: Path, step: int) -> Path:
    """The folder that a save of ``step`` writes into."""
    partial = directory / f".saving-{checkpoint_name(step)}"
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def write_part(partial: Path, part: str, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Write one stage's tensors; the checksum of each."""
    path = partial / f"{part}.safetensors"
    host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    try:
        save_file(host, path)
        _sync(path)
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in host.values())
        raise CheckpointError(
            f"cannot write {format_bytes(size)} to {path}: {printable(str(error))}; the last checkpoint is untouched"
        ) from error
    return {name: _checksum(tensor) for name, tensor in host.items()}


def finish(partial: Path, index: dict[str, Any]) -> Path:
    """Write the index and give the folder its name; replaces a checkpoint of the same step."""
    path = partial / _INDEX
    path.write_text(json.dumps({"version": VERSION, **index}, indent=1), encoding="utf-8")
    _sync(path)
    final = partial.parent / partial.name.removeprefix(".saving-")
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync(final.parent)
    return final


class CheckpointReader:
    """Reads tensors of a checkpoint by name, wherever they were saved."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self.index: dict[str, Any] = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
            if self.index["version"] != VERSION:
                raise CheckpointError(f"{directory} has version {self.index['version']}; this Parallax reads {VERSION}")
            self._checksums: dict[str, int] = self.index["checksums"]
            self._files = [safe_open(path, framework="pt") for path in sorted(directory.glob("*.safetensors"))]
            self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(f"{directory} is damaged ({printable(str(error))}); use an earlier one") from error

    def check_names(self, expected: Iterable[str], fingerprint: str) -> None:
        """Refuse a checkpoint of another model before anything is changed."""
        wanted = set(expected)
        found = {name.removeprefix("model/") for name in self._where if name.startswith("model/")}
        if self.index.get("fingerprint") != fingerprint or not wanted <= found:
            missing, extra = sorted(wanted - found), sorted(found - wanted)
            raise CheckpointError(
                f"{self.directory} holds another model: missing {', '.join(missing[:3]) or 'nothing'} "
                f"({len(missing)}), extra {', '.join(extra[:3]) or 'nothing'} ({len(extra)}); "
                f"fingerprint {self.index.get('fingerprint')} where {fingerprint} is due"
            )

    def read(self, name: str) -> Tensor:
        """One tensor, verified."""
        try:
            tensor: Tensor = self._where[name].get_tensor(name)
        except (KeyError, SafetensorError) as error:
            raise CheckpointError(f"{self.directory} has no readable {name}; use an earlier one") from error
        if self._checksums.get(name) != _checksum(tensor):
            raise CheckpointError(f"{self.directory}: {name} is damaged (checksum); use an earlier checkpoint")
        return tensor


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[str, Tensor]) -> dict[str, Tensor]:
    """``<state>/<parameter name>`` → tensor, for every state the optimizer keeps."""
    return {
        f"{key}/{name}": value
        for name, parameter in names.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: dict[str, Tensor], reader: CheckpointReader, keys: Iterable[str]
) -> None:
    """Put the saved states ``keys`` back, on the device of their parameter."""
    keys = list(keys)
    for name, parameter in names.items():
        if keys and parameter.requires_grad:
            optimizer.state[parameter] = {
                key: reader.read(f"{key}/{name}").to(parameter.device) for key in keys
            }


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

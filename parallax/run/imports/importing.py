"""Convert weights of another library into a run directory with one checkpoint, from which ``parallax train name=…``
resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallax import config as configuration
from parallax.common.files import disk_free_bytes, making_folder
from parallax.common.trust import class_paths, remember
from parallax.common.units import format_bytes
from parallax.config import RunConfig
from parallax.errors import CheckpointError, ConfigError, printable
from parallax.model.describe import Chain
from parallax.model.files.values import as_dtype, check_finite
from parallax.model.materialise import materialise
from parallax.model.pretrained import tied_names
from parallax.run.imports.sources import SOURCES, ImportSource
from parallax.run.imports.states import NOT_IMPORTED, check_states, state_as_kept
from parallax.run.job import build_chain, built_model, open_source
from parallax.run.prepare import RUNS, check_name, free_name
from parallax.run.resume import STORED
from parallax.runtime import checkpoint
from parallax.runtime.checkpoint.writing import contents_of
from parallax.swap.optimizer.buckets import MASTER
from parallax.train.data.indexed import IndexedSource


@dataclass(frozen=True)
class Imported:
    """The result of an import: the directory of the run, the step of its checkpoint, the bytes of weights and optimizer
    states, and ``remarks`` on parts that the source lacks."""

    directory: Path
    step: int
    weight_bytes: int
    state_bytes: int
    remarks: tuple[str, ...]


def import_settings(path: Path, form: str, overrides: Sequence[str]) -> RunConfig:
    """Return the settings of the new run, which ``overrides`` define. If ``path`` is a transformers folder, the folder
    determines the model, unless ``overrides`` choose one."""
    keys = ("model.pretrained", "model.architecture")
    named = any(configuration.override_value(overrides, key) for key in keys)
    completed = list(overrides)
    if (
        form == "huggingface"
        and not named
        and configuration.override_value(overrides, "model") in ("", form)
    ):
        text = str(path).replace("\\", "\\\\").replace("'", "\\'")
        completed = ["model=huggingface", *overrides, f"model.pretrained='{text}'"]
    config = configuration.compose(completed)
    return replace(config, name=config.name if config.name != "auto" else free_name())


def import_run(
    config: RunConfig,
    path: Path,
    form: str,
    *,
    step: int = 0,
    weights_only: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Imported:
    """Create the run of ``config``, with one checkpoint of step ``step``, from the files at ``path``. ``form``: their
    format, one of :data:`SOURCES`. ``weights_only``: import no optimizer states. Nothing is written if names or shapes
    differ from the model's, or if the disk is too small."""
    directory = _free_directory(config)
    steps = config.trainer.steps
    if step < 0 or 0 < steps <= step:
        accepted = (
            f"0 to {steps - 1}, as trainer.steps={steps}" if steps else "whole numbers from 0"
        )
        raise ConfigError(f"--step {step}: accepted is {accepted}")
    if built_model(config).base(config.seed):
        raise ConfigError(
            "model.adapter: checkpoints of adapters do not hold their base; let the run begin with it (model.weights, "
            "model.pretrained)"
        )
    progress("building the model")
    chain = build_chain(_in_masters(config))
    progress("comparing")
    found = _Import(config, chain, SOURCES[form](path, chain), states=not weights_only)
    remarks = found.check()
    _check_room(config.checkpoint.folder(directory, config.name), found)
    progress("importing")
    state = {"source": _rows_from(config, step)}
    with making_folder(directory) as made:
        folder = config.checkpoint.folder(made, config.name)
        found.write(folder, step, state)
        (made / STORED).write_text(configuration.dump(config), encoding="utf-8")
    remember(directory, class_paths(configuration.dump(config)))
    return Imported(directory, step, found.weight_bytes, found.state_bytes, tuple(remarks))


class _Import:
    """Converts ``source`` into a checkpoint of ``chain``, in the number format of the master weights."""

    def __init__(
        self, config: RunConfig, chain: Chain, source: ImportSource, *, states: bool
    ) -> None:
        self._optimizer, self._chain = config.optimizer, chain
        self._source = source if states else replace(source, states={})
        self._aliases = tied_names(chain.model)
        known = chain.model.state_dict(keep_vars=True)
        self._wanted = {name: known[name] for names in chain.names for name in names.values()}
        self._trained = {
            name: tensor
            for name, tensor in self._wanted.items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }

    def check(self) -> list[str]:
        """Raise :class:`CheckpointError` with the names of tensors that are missing, superfluous, or of another shape
        or type. Return messages for the user."""
        weights = self._source.weights
        buffers = {name for name, _ in self._chain.model.named_buffers()}
        remarks = weights.check(self._wanted, self._aliases, buffers)
        weights.check_ties(self._aliases)
        return [*remarks, *check_states(self._source, self._trained, self._optimizer)]

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights as they are written."""
        return sum(
            tensor.numel() * self._dtype_of(tensor).itemsize for tensor in self._wanted.values()
        )

    @property
    def state_bytes(self) -> int:
        wide = self._chain.dtype.itemsize
        return wide * sum(
            value.numel()
            for name in self._source.states
            for key, value in self._source.without_values(name).items()
            if key not in NOT_IMPORTED
        )

    def write(self, folder: Path, step: int, state: dict[str, Any]) -> None:
        """Write the checkpoint of ``step`` as a new folder inside ``folder``. ``state``: the state of the data source,
        as stored in checkpoints."""
        partial = checkpoint.partial_folder(folder, step)
        checkpoint.begin(partial)
        try:
            written = checkpoint.write_parts(partial, "stage-00", self._tensors())
        except BaseException:
            checkpoint.remove_partial(folder)
            raise
        contents = contents_of([written])
        index = {
            "step": step,
            "fingerprint": self._chain.fingerprint(),
            "structure": self._chain.structure(),
            "dtype": str(self._chain.dtype),
            "trained_by": self._optimizer.label if contents["optimizer"] else "",
            **contents,
            "state": state,
        }
        checkpoint.finish(partial, index)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._wanted.items():
            yield f"model/{name}", self._weight(name, tensor)
            for key in self._source.states.get(name, {}):
                if key not in NOT_IMPORTED:
                    value, dtype = self._source.read_state(name, key), self._dtype_of(tensor)
                    yield (
                        f"{key}/{name}",
                        state_as_kept(f"{key} of {name}", key, value, tensor, dtype),
                    )

    def _weight(self, name: str, tensor: Tensor) -> Tensor:
        """Return the value of the tensor ``name`` in the checkpoint's dtype. The value is the source's master weight.
        If the source has none, it is the source's weight, or else the value from the model's constructor."""
        held = self._source.weights.find(name, self._aliases)
        if MASTER in self._source.states.get(name, {}):
            value = self._source.read_state(name, MASTER)
        elif held is not None:
            value = self._source.weights.read(held)
        else:
            value = self._constructed(name)
        found = as_dtype(name, value, self._dtype_of(tensor))
        if isinstance(tensor, nn.Parameter):
            check_finite(name, found, frozen=not tensor.requires_grad)
        return found

    def _constructed(self, name: str) -> Tensor:
        chain = replace(self._chain, weights=None)
        for index, names in enumerate(chain.names):
            for inner, known in names.items():
                if known == name:
                    (block,) = materialise(chain, index, index + 1, torch.device("cpu"))
                    return block.state_dict()[inner]
        raise AssertionError(name)

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype of ``tensor`` in the checkpoint. Floating-point tensors have the dtype of the master
        weights."""
        return self._chain.dtype if tensor.is_floating_point() else tensor.dtype


def _free_directory(config: RunConfig) -> Path:
    """Return the directory of the new run. Raises :class:`ConfigError` if it or its folder of checkpoints exists and is
    not empty."""
    check_name(config.name)
    directory = RUNS / config.name
    saved = config.checkpoint.folder(directory, config.name)
    for folder in (directory, saved):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise ConfigError(
                f"name={config.name}: {printable(str(folder))} is there already; choose another name"
            )
    return directory


def _in_masters(config: RunConfig) -> RunConfig:
    """Return ``config`` with the model in the number format of the master weights, so that imported values lose no
    precision."""
    masters = config.precision.masters
    precision = replace(config.precision, parameters=masters, compute=masters, loss_scale="auto")
    return replace(config, precision=precision)


def _rows_from(config: RunConfig, step: int) -> dict[str, Any]:
    """Return the state of the data source after ``step`` batches, or at its start if its rows cannot be accessed by
    number."""
    source = open_source(config)
    if isinstance(source, IndexedSource):
        source.go_to(step, config.trainer.global_batch)
    return source.state_dict()


def _check_room(directory: Path, found: _Import) -> None:
    size, free = found.weight_bytes + found.state_bytes, disk_free_bytes(directory)
    if size > free:
        raise CheckpointError(
            f"{printable(str(directory))}: the checkpoint is {format_bytes(size)}, and {format_bytes(free)} are free "
            "there; free space, or name a folder on another disk (checkpoint.directory)"
        )

"""Weights and optimizer states in torch's distributed checkpoint format.

The state dict is that of ``torch.distributed.checkpoint.state_dict``. ``model`` has the weights by name, with each tied
weight under all of its names. ``optimizer`` has ``state`` by parameter name, and the ``param_groups`` of the run's
``torch.optim`` optimizer. The state ``master`` is the weight in full precision, if the model has two-byte weights.
Tensors are read one at a time.

The files are written by torch's own writer. Their index, ``.metadata``, is a pickle of torch's classes. torch executes
this pickle when it reads the files, so a reader must trust their author. ``parallax import`` does not execute
the pickle (:mod:`parallax.model.files.distributed`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from parallax.run.export.form import Contents, Trained
from parallax.runtime.checkpoint import PART_BYTES
from parallax.runtime.optim.builder import OptimizerBuilder
from parallax.runtime.saving import OF_GROUP

_PLACE = torch.device("cpu")


class DistributedForm:
    """A folder for ``torch.distributed.checkpoint``, or for ``dcp_to_torch_save``, which converts it to one file."""

    name, takes_adapters, takes_merged = "dcp", False, False

    def contents(self, trained: Trained) -> Contents:
        """Return the files to write for ``trained``, as :class:`Contents`."""
        tensors = trained.tensors()
        states = _states(trained, tensors)
        sources = {other: names[0] for names in trained.names() for other in names}
        weights = {name: tensors[source] for name, source in sources.items()}
        tree = {
            "model": weights,
            "optimizer": {
                "state": states,
                "param_groups": list(_groups(trained)),
            },
        }

        def read(name: str) -> Tensor:
            kind, _, rest = name.partition(".")
            if kind == "model":
                return trained.read(sources[rest])
            parameter, _, key = rest.removeprefix("state.").rpartition(".")
            return trained.reader.read(f"{key}/{parameter}")

        def write(folder: Path) -> list[str]:
            writer = _Writer(folder, sync_files=False)  # the whole folder is synced at the end
            with warnings.catch_warnings():  # torch warns that this is a single process
                warnings.simplefilter("ignore", UserWarning)
                save(tree, storage_writer=writer, planner=_Planner(read), no_dist=True)
            return []

        held = [*weights.values(), *(v for known in states.values() for v in known.values())]
        return Contents(sum(tensor.nbytes for tensor in held), write)


def _states(trained: Trained, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """Return, for each of the parameters ``names`` that has optimizer states, a mapping from the name of a state to a
    meta tensor (without values). A parameter that never had a gradient has no states. After local steps, the states are
    those of the first group of replicas."""
    found: dict[str, dict[str, Tensor]] = {}
    known = set(names)
    for held, tensor in trained.reader.held().items():
        key, _, name = held.partition("/")
        if key != "model" and OF_GROUP not in key and name in known:
            found.setdefault(name, {})[key] = tensor
    return found


class _Planner(DefaultSavePlanner):
    """A save planner for meta tensors, which reads each tensor from the checkpoint when the writer asks for its
    bytes."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor at ``index`` with its values; any other object unchanged."""
        found = super().lookup_object(index)
        return self._read(index.fqn) if isinstance(found, Tensor) else found


class _Writer(FileSystemWriter):
    """Writes files of about :data:`PART_BYTES` each, because torch's writer keeps all tensors of a file in memory. It
    omits this machine's paths from the index."""

    def storage_meta(self) -> StorageMeta:
        """Return no metadata, because torch's would contain this machine's path."""
        return StorageMeta()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: list[WriteResult] = []
        for number, items in enumerate(_runs(plan.items)):
            place = replace(plan.storage_data, prefix=f"__{number}_")
            part = replace(plan, items=items, storage_data=place)
            written += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done


def _runs(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield groups of consecutive items of about :data:`PART_BYTES` each."""
    run, size = list[WriteItem](), 0
    for item in items:
        run.append(item)
        if item.tensor_data is not None:
            data = item.tensor_data
            size += math.prod(data.size) * data.properties.dtype.itemsize
        if size >= PART_BYTES:
            yield run
            run, size = [], 0
    if run:
        yield run


def _groups(trained: Trained) -> Iterator[dict[str, Any]]:
    """Yield the param groups of the optimizer, with parameter names in place of the parameters."""
    names = {names[0] for names in trained.names()}
    parameters = {n: p for n, p in trained.model.named_parameters() if n in names}
    stand_ins = {
        name: nn.Parameter(
            torch.empty((0,) * p.dim(), device=_PLACE), requires_grad=p.requires_grad
        )
        for name, p in parameters.items()
    }
    settings = trained.settings
    found = {parameter: name for name, parameter in stand_ins.items()}
    factor = settings.schedule.factor(trained.reader.step, settings.trainer.steps)
    builder = OptimizerBuilder.of(settings.optimizer, trained.model)
    for group in builder.build(stand_ins).param_groups:
        members = [found[p] for p in group["params"] if p in found]
        yield {**group, "lr": group["lr"] * factor, "params": members}

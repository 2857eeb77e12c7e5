"""A run's model for a server: its inputs and outputs by name, and forwards of batches from requests."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallax.errors import ConfigError, PlanError
from parallax.machine.accelerators import limit_device_memory, select_device
from parallax.machine.local import choose_devices
from parallax.model.block import flatten, leaves, rebuild
from parallax.model.describe import Chain
from parallax.run.inference import ForwardJob, output_tensors, tensor_name
from parallax.run.job import build_chain, local_cluster, sample_inputs
from parallax.run.planning import settle
from parallax.runtime.checkpoint import step_of
from parallax.runtime.forward import ForwardEngine
from parallax.serve.model import NAMES, TensorSpec


class RequestRows:
    """A batch of requests as rows for an engine: ``template`` with ``tensors`` in place of its slots."""

    def __init__(self, template: Any, tensors: Sequence[Tensor]) -> None:
        self._template, self._tensors = template, tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def inputs(self, start: int, stop: int) -> Any:
        return rebuild(self._template, [tensor[start:stop] for tensor in self._tensors])

    def targets(self, start: int, stop: int) -> Any:
        raise AssertionError(
            f"targets of rows {start} to {stop}: forwards without a loss read none"
        )


class RunModel:
    """The :class:`~parallax.serve.model.ServedModel` of a run in one process."""

    def __init__(self, job: ForwardJob, engine: ForwardEngine, chain: Chain) -> None:
        self.name, self.version = job.directory.resolve().name, str(step_of(job.checkpoint))
        self._engine = engine
        sample = sample_inputs(job.config, 2)
        self._tensors, self._template = flatten(sample)
        self.inputs = input_specs(chain, sample, self._tensors)
        self.outputs: tuple[TensorSpec, ...] = self._output_specs()

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`~parallax.serve.model.ServedModel`."""
        return [part.cpu() for _, part in self._results(tensors)]

    def close(self) -> None:
        self._engine.close()

    def _results(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """Return the outputs of all rows by name."""
        parts = sorted(self._engine.predict(RequestRows(self._template, tensors)), key=_first_row)
        named = [output_tensors(results) for _, results in parts]
        return [
            (same[0][0], torch.cat([tensor for _, tensor in same]) if len(same) > 1 else same[0][1])
            for same in zip(*named)
        ]

    def _output_specs(self) -> tuple[TensorSpec, ...]:
        """Return the outputs of a forward of zeros. Raises :class:`ConfigError` for outputs that cannot be divided by
        rows."""
        rows = 2
        inputs = [
            torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in self._tensors
        ]
        found = []
        varies = any(-1 in spec.shape[1:] for spec in self.inputs)
        for name, tensor in self._results(inputs):
            if tensor.dtype not in NAMES or tensor.shape[:1] != (rows,):
                raise ConfigError(
                    f"serve: the model's output {name} of {rows} rows has the type {tensor.dtype} and the shape "
                    f"{list(tensor.shape)}; accepted are numbers with the rows in the first dimension"
                )
            trailing = (-1,) * (tensor.ndim - 1) if varies else tuple(tensor.shape[1:])
            found.append(TensorSpec(name, tensor.dtype, (-1, *trailing)))
        if not found:
            raise ConfigError("serve: the model returns no tensors")
        return tuple(found)


def _first_row(part: tuple[int, Any]) -> int:
    return part[0]


def input_specs(chain: Chain, sample: Any, tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """Return the model's inputs, named by the keys of ``sample`` or the arguments of the model's forward. Sizes are
    those of the run's rows; -1 where the model was recorded for any size."""
    paths = [path for path, part in leaves(sample) if isinstance(part, Tensor)]
    arguments = _arguments(chain)
    specs = []
    for index, (path, tensor) in enumerate(zip(paths, tensors)):
        alone = not path or isinstance(path[0], int)
        place = path[0] if path else 0
        known = alone and place < len(arguments)
        name = (
            ".".join([arguments[place], *map(str, path[1:])])
            if known
            else tensor_name(path, "input")
        )
        if tensor.dtype not in NAMES or tensor.ndim < 1:
            raise ConfigError(
                f"serve: the model's input {name} has the type {tensor.dtype} and the shape {list(tensor.shape)}; "
                "accepted are numbers with the rows in the first dimension"
            )
        sizes = chain.sizes[index] if index < len(chain.sizes) else ()
        trailing = sizes[1:] if len(sizes) == tensor.ndim else tensor.shape[1:]
        specs.append(
            TensorSpec(name, tensor.dtype, (-1, *(-1 if s is None else int(s) for s in trailing)))
        )
    return tuple(specs)


def _arguments(chain: Chain) -> list[str]:
    """Return the names of the model's arguments in order."""
    if chain.inputs:
        return list(chain.inputs)
    for module in (chain.model, chain.blocks[0].module):
        parameters = inspect.signature(module.forward).parameters.values()
        names = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if names:
            return names
    return []


def open_model(job: ForwardJob) -> RunModel:
    """Return the model of ``job`` in this process, with the checkpoint's weights."""
    config = job.config
    if job.plan.world_size > 1:
        raise PlanError(
            f"serve: the plan uses {job.plan.world_size} ranks, and serving runs in one process: set cluster.devices=1"
        )
    choice = choose_devices(local_cluster(config))
    settle(choice)
    device = select_device(choice.kind, 0)
    limit_device_memory(device, job.plan.allocator_bytes(0))
    chain = build_chain(config)
    return RunModel(job, job.build_forward(chain, device, "serve"), chain)

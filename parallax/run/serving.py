"""A run's model for a server: its inputs and outputs by name, and forwards of batches from requests."""

from __future__ import annotations

import inspect
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parallax.errors import ConfigError, ParallaxError, printable
from parallax.machine.accelerators import limit_device_memory, select_device
from parallax.machine.local import choose_devices
from parallax.model.block import flatten, leaves
from parallax.model.describe import Chain
from parallax.run.inference import ForwardJob, ForwardRequest, output_tensors, tensor_name
from parallax.run.job import build_chain, local_cluster, sample_inputs
from parallax.run.planning import settle
from parallax.run.processes.answering import RequestRows
from parallax.run.rank_group import Named, joined
from parallax.run.resume import StoredRun
from parallax.runtime.forward import ForwardEngine
from parallax.serve.model import NAMES, BatchOutputs, ServedModel, TensorSpec

_FOLLOW_SECONDS = 1.0  # between two looks for a new checkpoint


class RunModel(ServedModel):
    """A run's model for a server, with its name, inputs and outputs. Subclasses compute the batches."""

    def __init__(self, job: ForwardJob, chain: Chain) -> None:
        self.name = job.directory.resolve().name
        self._samples, self.template = flatten(sample := sample_inputs(job.config, 2))
        self.inputs = input_specs(chain, sample, self._samples)

    failure: ParallaxError | None = None
    """Why the model can compute no more."""

    outdated = False
    """Whether a copy computes with other weights than those loaded last."""

    @property
    @abstractmethod
    def step(self) -> int:
        """The training step of the newest weights that the model has loaded."""

    @property
    def version(self) -> str:  # type: ignore[override]
        return str(self.step)

    @abstractmethod
    def compute(self, tensors: Sequence[Tensor]) -> tuple[Named, int]:
        """Return the outputs of a batch with the inputs ``tensors``, and the step of the weights that computed them."""

    @abstractmethod
    def load(self, job: ForwardJob) -> str:
        """Load the checkpoint of ``job``. Return an empty text, or the reason why the checkpoint cannot be loaded."""

    @abstractmethod
    def close(self) -> None: ...

    def run(self, tensors: Sequence[Tensor]) -> BatchOutputs:
        """Return the outputs of a batch with the inputs ``tensors``. The version of the outputs is the step of the
        weights that computed them."""
        named, step = self.compute(tensors)
        return BatchOutputs([tensor for _, tensor in named], str(step))

    def try_forward(self) -> None:
        """Run a forward of zeros, and set ``outputs`` to the names, dtypes and shapes of its outputs. Raises
        :class:`ConfigError` if an output cannot be served: its first dimension is not the rows, or its dtype is not
        supported."""
        self.outputs = self._output_specs()

    def _output_specs(self) -> tuple[TensorSpec, ...]:
        rows = 2
        inputs = [
            torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in self._samples
        ]
        found = []
        varies = any(-1 in spec.shape[1:] for spec in self.inputs)
        for name, tensor in self.compute(inputs)[0]:
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


class LocalModel(RunModel):
    """The model of ``job``, computed in this process."""

    def __init__(self, job: ForwardJob, engine: ForwardEngine, chain: Chain) -> None:
        super().__init__(job, chain)
        self._engine, self._lock = engine, threading.Lock()

    @property
    def step(self) -> int:
        return self._engine.completed_steps

    def compute(self, tensors: Sequence[Tensor]) -> tuple[Named, int]:
        rows = RequestRows(self.template, tensors, len(tensors[0]))
        with self._lock:
            found = sorted(self._engine.predict(rows), key=lambda part: part[0])
            self.fetched_bytes += self._engine.fetched_bytes()
            step = self._engine.completed_steps
        parts = [output_tensors(results) for _, results in found]
        return [(name, tensor.cpu()) for name, tensor in joined(parts)], step

    def load(self, job: ForwardJob) -> str:
        try:
            with self._lock:
                self._engine.load(job.checkpoint, averaged=job.averaged)
        except (ParallaxError, OSError) as error:
            return printable(str(error))
        return ""

    def close(self) -> None:
        self._engine.close()


def open_model(job: ForwardJob) -> LocalModel:
    """Return the model of ``job`` in this process, with the checkpoint's weights. The plan of ``job`` must have one
    rank."""
    config = job.config
    choice = choose_devices(local_cluster(config))
    settle(choice)
    device = select_device(choice.kind, 0)
    limit_device_memory(device, job.plan.allocator_bytes(0))
    chain = build_chain(config)
    return LocalModel(job, job.build_forward(chain, device, "serve"), chain)


def input_specs(chain: Chain, sample: Any, tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """Return name, dtype and shape of each input of the model. Names are the keys of ``sample`` or the arguments of the
    model's forward. Shapes are those of the run's rows. A size of -1 means any size: the number of rows, and dimensions
    for which the model was recorded with any size."""
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


def follow(
    model: RunModel,
    job: ForwardJob,
    run: StoredRun,
    request: ForwardRequest,
    say: Callable[[str], None],
    over: threading.Event,
) -> None:
    """Load each new checkpoint of ``run`` that ``request`` chooses into ``model``, until ``over`` is set. ``job``: the
    job that ``model`` serves at the start. ``say`` prints a line."""
    seen = job.checkpoint
    while not over.wait(_FOLLOW_SECONDS):
        try:
            checkpoint, averaged, _ = request.chosen(run)
        except (ParallaxError, OSError):  # it is being removed
            continue
        if checkpoint == seen and not model.outdated:
            continue
        job = replace(job, checkpoint=checkpoint, averaged=averaged)
        reason = model.load(job)
        if reason and not checkpoint.exists():  # a newer one has taken its place
            continue
        if checkpoint != seen:
            say(f"{checkpoint.name}: {reason or f'version {model.version} answers now'}")
        seen = checkpoint

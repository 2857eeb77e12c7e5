"""Build the objects of a run from its configuration: model, loss, data, profile, plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from parallax.common.targets import check_call
from parallax.config import RunConfig
from parallax.errors import ConfigError, DataError, DescribeError, printable
from parallax.machine.accelerators import unusable_device
from parallax.machine.host import node_name
from parallax.machine.local import ClusterConfig, choose_devices
from parallax.model.block import flatten, padding_help
from parallax.model.construction.deferred import deferred_init
from parallax.model.describe import Chain, describe
from parallax.model.loss_kinds import check_classes
from parallax.model.losses import check_loss, scores_of
from parallax.model.materialise import check_weights
from parallax.model.profiling.count import COUNTED_ROWS, Sample, count
from parallax.model.source import ModelConfig
from parallax.model.verification.rows import Verdict
from parallax.plan.analytic.catalog import CatalogClusterConfig
from parallax.plan.analytic.efficiency import price
from parallax.plan.cluster import Cluster
from parallax.plan.profile import ModelProfile
from parallax.plan.task import PlanTask
from parallax.plan.tier import AUTO
from parallax.plan.updates import Updates
from parallax.plan.work import ModelWork
from parallax.run.planning import (
    Loss,
    Planned,
    check_model,
    measure_model,
    plan_catalog,
    plan_model,
    remember_profile,
    settled,
)
from parallax.run.stepping import stepped_by
from parallax.run.verified import check_rows, verify_run
from parallax.runtime.batch import Rows, RowsOf, as_tensors
from parallax.runtime.health.row_check import RowCheck
from parallax.runtime.optim.groups import ParameterGroups, freeze
from parallax.train.data.source import Source

logger = logging.getLogger("parallax")

_SUFFER = "adamw", "sgd"
_DELAYED = (
    "trainer.updates=delayed: the delay raises the loss of AdamW and SGD by more than that of Lion (figures: "
    "docs/updates.md); optimizer.delay_correction=true recovers most of it"
)
_GROUPS_LATER = "optimizer.groups: planned without names of parameters, so patterns are checked when training starts"


def build_chain(config: RunConfig, layer: str = "") -> Chain:
    """Return the model of ``config`` as a chain of blocks. ``layer``: the module at whose output the chain ends; empty
    for the whole model."""
    model = built_model(config)
    return describe(
        model_factory(config),
        seed=config.seed,
        dtype=config.precision.parameter_dtype,
        blocks=model.block_paths,
        sample=lambda rows: sample_inputs(config, rows),
        weights=model.stage_weights,
        partial_weights=model.partial_weights,
        base=model.base(config.seed),
        layer=layer,
        task=PlanTask(config.task),
    )


def model_factory(config: RunConfig) -> Callable[[], nn.Module]:
    """Return a function that builds the model. Parameters that ``optimizer.groups`` freezes are frozen in the model."""

    def build() -> nn.Module:
        model = built_model(config).build()
        freeze(config.optimizer, model)
        return model

    return build


def sample_inputs(config: RunConfig, rows: int) -> Any:
    """Return the inputs of the first ``rows`` rows of a batch, or of the whole batch if it has fewer."""
    if (shapes := config.data.shapes(config.model)) is not None:
        return shapes(rows)[0][0]
    batch = first_batch(config, open_source(config))
    rows = min(rows, len(batch))
    return as_tensors("inputs", batch.inputs(0, rows), rows, config.precision.parameter_dtype)


def doing(config: RunConfig, what: str) -> str:
    """Return ``what``, the name of a phase, followed by the user's function that is called in this phase, if any."""
    group = {"building the model": config.model, "fetching rows": config.data}[what]
    key = "model.target" if group is config.model else "data.target"
    target = getattr(group, "target", "")
    return f"{what} ({key}={printable(target)})" if target else what


def built_model(config: RunConfig) -> ModelConfig:
    """Return the model settings of ``config``. Raises :class:`ConfigError` for a model that is described by sizes
    alone, and so cannot be built."""
    config.model.check_code()
    return config.model


def local_cluster(config: RunConfig) -> ClusterConfig:
    """Return the cluster settings of ``config``. Raises :class:`ConfigError` if the settings name a cluster of the
    catalog, because its machines are not present."""
    if isinstance(config.cluster, CatalogClusterConfig):
        raise ConfigError(
            "cluster=catalog: it is a cluster to plan for; train on this machine with cluster=local"
        )
    return config.cluster


def check_devices(config: RunConfig) -> None:
    """Raise :class:`ConfigError` if the run would use the CPU without the user's request, although this host has an
    accelerator that torch cannot use."""
    if local_cluster(config).kind == AUTO and (found := unusable_device()):
        wrong, remedy = found
        raise ConfigError(
            f"on {printable(node_name())} {wrong}: {remedy}, or train on the CPU with cluster.kind=cpu"
        )


def device_kind(config: RunConfig) -> str:
    """Return the kind of device to train on: the kind in the catalog cluster, if one is configured, otherwise the kind
    in this machine."""
    if isinstance(config.cluster, CatalogClusterConfig):
        return config.cluster.kind.name
    return choose_devices(config.cluster).kind


def build_loss(config: RunConfig) -> Loss:
    """Return the loss that ``config`` chooses. For loss=model it is the model's own ``loss(outputs, targets)`` or,
    without such a method, :func:`usual_loss`."""
    chosen = config.loss.build()
    if chosen is not None:
        check_loss(chosen)
        return chosen
    model = deferred_init(built_model(config).build, config.seed).with_attributes()
    own = getattr(model, "loss", None)
    if not callable(own):
        return usual_loss
    called = getattr(own, "forward", own)  # a module's __call__ accepts any arguments
    check_call(f"the loss of {type(model).__name__}: loss", called, "outputs", "targets")
    if callable(count := getattr(own, "count", None)):
        check_call(f"the loss of {type(model).__name__}: count", count, "targets")
    check_loss(own)
    return own


def usual_loss(outputs: Any, targets: Any) -> Tensor:
    """Return the loss in ``outputs`` if there is one, as in models of transformers that get labels. Otherwise return
    the mean cross-entropy: class scores are in the last dimension of ``outputs`` or of its ``logits``, and ``targets``
    are class indices."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(own, Tensor):
        return own
    scores = scores_of(outputs)
    if not isinstance(scores, Tensor):
        raise DescribeError(
            f"the model returns a {type(outputs).__name__} without logits or loss: let the rows' inputs have labels, "
            "with which a model of transformers computes its loss, or give the model a loss(outputs, targets)"
        )
    if not isinstance(targets, Tensor):
        raise DescribeError(
            f"the model's scores have shape {list(scores.shape)} and the targets are a {type(targets).__name__}: "
            "cross-entropy takes a tensor of classes; let the rows' inputs have labels, with which a model of "
            "transformers computes its loss, or give the model a loss(outputs, targets)"
        )
    if targets.is_floating_point():
        raise DescribeError(
            f"the targets are {targets.dtype} of shape {list(targets.shape)}: the usual loss is cross-entropy, which "
            "takes the numbers of classes; type loss=mse_loss or another loss, or give the model a "
            "loss(outputs, targets)"
        )
    if scores.ndim < 2 or scores.shape[:-1].numel() != targets.numel():
        raise DescribeError(
            f"the model's scores have shape {list(scores.shape)} and the targets {list(targets.shape)}: cross-entropy "
            "takes a class for each row of scores in the last dimension; let the rows' inputs have labels, with which "
            "a model of transformers computes its loss, or give the model a loss(outputs, targets)"
        )
    check_classes("loss=model (cross-entropy)", scores)
    return nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def tokens_per_row(config: RunConfig) -> int:
    """Return the number of tokens in a row; 1 if rows are not tokens."""
    return config.data.tokens_per_row(config.model)


def open_source(config: RunConfig, *, quiet: bool = True) -> Source:
    """Return the data source of ``config``."""
    return config.data.open(config.model, config.seed, quiet=quiet)


def with_steps(config: RunConfig) -> RunConfig:
    """Return the settings in steps instead of epochs: ``trainer.epochs``, if set, is converted to ``trainer.steps``,
    and a schedule in epochs gets the number of steps of an epoch."""
    by_epochs = config.schedule.unit == "epochs"
    if not config.trainer.epochs and not by_epochs:
        return config
    count = getattr(open_source(config), "steps", None)
    if by_epochs and count is not None:
        epoch_steps = count(1, config.trainer.global_batch)
        config = replace(config, schedule=replace(config.schedule, epoch_steps=epoch_steps))
    if not config.trainer.epochs:
        return config
    if count is None:
        raise ConfigError(
            f"trainer.epochs={config.trainer.epochs}: the rows of {config.data.label} cannot be counted; set "
            "trainer.epochs=0 trainer.steps=N"
        )
    return replace(config, trainer=config.trainer.with_steps(count))


def first_batch(config: RunConfig, source: Source, least: int = 1) -> Rows:
    """Return a batch for measuring and planning, of at least ``least`` rows, without consuming rows of the training.
    Raises :class:`DataError` if the source has fewer rows."""
    wanted, label = max(config.trainer.global_batch, least), config.data.label
    config.data.check_size(source, config.model, wanted)
    sample = getattr(source, "sample", None)
    if callable(sample):
        batch: Rows = sample(wanted)
        if len(batch) > 1:
            _check_inputs(f"{label}: the inputs", batch)
        return batch
    batch = source.validation(0, wanted)
    if missing := [
        name
        for name in ("__len__", "inputs", "targets")
        if not callable(getattr(batch, name, None))
    ]:
        raise DataError(
            f"{label}: validation(0, {wanted}) gave a {type(batch).__name__} without "
            f"{', '.join(missing)}; return parallax.TensorRows(inputs, targets), or what has these methods"
        )
    if len(batch) < wanted:
        raise DataError(
            f"{label}: validation(0, {wanted}) gave {len(batch)} row(s), fewer than "
            f"trainer.global_batch={wanted}; "
            + (
                f"use trainer.global_batch={len(batch)} or less"
                if len(batch)
                else "it needs rows to plan with"
            )
        )
    if len(batch) > 1:
        _check_inputs(f"{label}: the inputs", batch)
    return batch


def _sampled(config: RunConfig, *, least: int = 1, quiet: bool = True) -> Rows:
    """Return a batch of at least ``least`` rows to plan with. Raises :class:`DataError` if the batch does not have as
    many targets as inputs."""
    source = open_source(config, quiet=quiet)
    batch = first_batch(config, source, least)
    wanted = max(config.trainer.global_batch, least)
    sampled = hasattr(source, "sample")
    name = f"{config.data.label}: {'the first batch' if sampled else f'the batch of validation(0, {wanted})'}"
    checked = RowCheck(config.precision.parameter_dtype).of(batch, name)
    checked.check_last()
    return checked


def _check_inputs(what: str, batch: Rows) -> None:
    """Raise :class:`DataError` if the inputs of ``batch`` are a list with one tensor for each row instead of one
    tensor, or if they are padded to the longest row of each batch. The message calls the inputs ``what``."""
    one, two = (flatten(batch.inputs(0, rows))[0] for rows in (1, 2))
    if len(one) != len(two):
        raise DataError(
            f"{what} of one row are {len(one)} tensor(s) and of two rows {len(two)}; each must have the rows in its "
            f"first dimension: {padding_help()}"
        )
    shapes = [
        (tuple(a.shape), tuple(b.shape))
        for a, b in zip(one, two)
        if a.ndim == b.ndim and not (a.is_nested or b.is_nested)
    ]
    if longer := [(a, b) for a, b in shapes if a[:1] == (1,) and b[:1] == (2,) and a[1:] != b[1:]]:
        raise DataError(
            f"{what} of one row have the shape {longer[0][0]} and of two rows {longer[0][1]}: pad all rows to one "
            "length, not to the longest of each batch (padding='max_length', max_length=128 of a tokenizer or of "
            "DataCollatorWithPadding)"
        )


def plan_run(
    config: RunConfig,
    scratch: Path,
    progress: Callable[[str], None],
    *,
    profile: ModelProfile | None = None,
    present: Cluster | None = None,
    verified: bool = False,
    accept: Callable[[Chain], None] = lambda chain: None,
    known: Callable[[Chain, Rows], ModelProfile | None] = lambda chain, batch: None,
    layer: str = "",
) -> Planned:
    """Return the plan of ``config`` on this machine or for its catalog cluster.

    ``scratch``        the folder of swap files
    ``profile``        used instead of a measured or derived profile
    ``present``        the cluster of all nodes of the run, if there are several; this process is on the first node
    ``verified``       the plan will be trained, so the chain is compared with its model, and a batch is refused if its
                       loss depends on its division into micro-batches (:mod:`parallax.run.verified`)
    ``accept(chain)``  is called before weights are created, and raises an error for a model that must not be planned
    ``known(chain, batch)``  returns a profile to use instead of a measurement, or None
    ``layer``          plan the model only up to the output of this module; empty for the whole model
    """
    task = PlanTask(config.task)
    if task.trains:
        config.replicas.check_requested(config.plan)
    if isinstance(config.cluster, CatalogClusterConfig):
        return _plan_for_catalog(config, config.cluster, task, profile, progress)
    chain, loss, batch = _what_is_planned(config, progress, present, accept, layer)
    verdict = verify_run(config, chain, loss, batch, progress) if verified else Verdict()
    progress("planning")
    planned = plan_model(
        chain,
        loss,
        batch,
        cluster=config.cluster,
        plan=config.plan,
        swap=config.swap,
        precision=config.precision,
        optimizer=config.optimizer,
        averages=config.ema.averages,
        replicas=config.replicas,
        updates=config.trainer.updates,
        skips=config.trainer.nonfinite_skips > 0,
        microbatch=config.trainer.microbatch,
        gather_loss=config.trainer.gather_loss,
        name=config.model.name,
        profile=profile or known(chain, batch),
        present=present,
        scratch=scratch,
        task=task,
        progress=progress,
    )
    check_rows(config, verdict, planned.plan)
    suffers = config.optimizer.name in _SUFFER and not config.optimizer.delay_correction
    if planned.plan.updates.delays and suffers:
        return replace(planned, remarks=(*planned.remarks, _DELAYED))
    return planned


def _plan_for_catalog(
    config: RunConfig,
    cluster: CatalogClusterConfig,
    task: PlanTask,
    profile: ModelProfile | None,
    progress: Callable[[str], None],
) -> Planned:
    nameless = profile is not None or config.model.work(str(config.precision)) is not None
    profile = profile or profile_run(config, progress)
    if task.trains:
        profile = stepped_by(
            profile,
            config.optimizer,
            averages=config.ema.averages,
            replicas=config.replicas,
            delays=config.trainer.updates == Updates.DELAYED,
        )
    planned = plan_catalog(
        profile,
        cluster,
        dtype=config.precision.compute,
        plan=config.plan,
        swap=config.swap,
        global_batch=config.trainer.global_batch,
        microbatch=config.trainer.microbatch,
        gather_loss=config.trainer.gather_loss,
        updates=config.trainer.updates,
        task=task,
        progress=progress,
    )
    if not config.optimizer.groups or not nameless:
        return planned
    return replace(planned, remarks=(*planned.remarks, _GROUPS_LATER))


class _WithoutTargets(RowsOf):
    def inputs(self, start: int, stop: int) -> Any:
        return self._batch.inputs(start, stop)

    def targets(self, start: int, stop: int) -> Any:
        del start, stop


def _what_is_planned(
    config: RunConfig,
    progress: Callable[[str], None],
    present: Cluster | None,
    accept: Callable[[Chain], None],
    layer: str,
) -> tuple[Chain, Loss, Rows]:
    """Return model, loss and a batch of ``config``, after checking that the settings allow a plan on this machine."""
    check_devices(config)
    config.plan.check_task(PlanTask(config.task))
    config.metrics_config.check_installed()
    if (classes := config.loss.takes_classes) is not None:
        config.metrics_config.check_targets(classes=classes)
    progress(doing(config, "building the model"))
    chain = build_chain(config, layer)
    accept(chain)
    for remark in check_weights(chain):
        logger.warning(remark)
    check_model(
        chain,
        config.trainer.global_batch,
        cluster=local_cluster(config),
        plan=config.plan,
        swap=config.swap,
        microbatch=config.trainer.microbatch,
        gather_loss=config.trainer.gather_loss and config.task != PlanTask.INFERENCE,
        present=present,
    )
    loss = build_loss(config)
    progress(doing(config, "fetching rows"))
    batch = _sampled(config, quiet=False)
    if not chain.trains and config.task == PlanTask.INFERENCE:
        batch = _WithoutTargets(batch)  # the loss needs the model's outputs in training
    if loss is usual_loss and config.metrics:
        targets = batch.targets(0, 1)
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            config.metrics_config.check_targets(classes=True)
    return chain, loss, batch


def profile_run(config: RunConfig, progress: Callable[[str], None]) -> ModelProfile:
    """Return the profile of the model of ``config``: measured on this machine or, for a catalog cluster, derived from
    shapes."""
    if isinstance(config.cluster, CatalogClusterConfig):
        return price(model_work(config, progress), config.cluster.kind)
    check_devices(config)
    progress(doing(config, "building the model"))
    chain, loss = build_chain(config), build_loss(config)
    progress(doing(config, "fetching rows"))
    batch = _sampled(config, quiet=False)
    if chain.trains:
        verify_run(config, chain, loss, batch, progress)
    progress("profiling")
    return measure_model(
        chain,
        loss,
        batch,
        settled(config.cluster, config.plan),
        precision=config.precision,
        swap=config.swap,
        gather_loss=config.trainer.gather_loss,
        shared_norms=config.replicas.shares_norms,
        name=config.model.name,
        progress=progress,
    )


def remember_run_profile(profile: ModelProfile, config: RunConfig) -> Path:
    """Cache ``profile`` for the next plan of ``config`` on this machine; return the cache file."""
    return remember_profile(
        profile,
        build_chain(config),
        build_loss(config),
        _sampled(config),
        settled(local_cluster(config), config.plan),
        precision=config.precision,
        swap=config.swap,
        gather_loss=config.trainer.gather_loss,
        shared_norms=config.replicas.shares_norms,
    )


def model_work(config: RunConfig, progress: Callable[[str], None] = lambda text: None) -> ModelWork:
    """Return the operations and bytes of the model of ``config``, counted on fake tensors without weights."""
    if (work := config.model.work(str(config.precision))) is not None:
        if config.trainer.gather_loss:
            raise ConfigError(
                f"trainer.gather_loss=true: the loss of model={config.model.name} is the mean over its tokens, of "
                "which each micro-batch gives a part; use trainer.gather_loss=false"
            )
        if any(group.get("freeze") for group in config.optimizer.groups):
            raise ConfigError(
                f"optimizer.groups: model={config.model.name} has only sizes, and no names that a frozen group could "
                "fit; leave frozen groups out, or choose another model"
            )
        return work
    progress(doing(config, "building the model"))
    chain = build_chain(config)
    ParameterGroups.of(config.optimizer, chain.model)  # refuses patterns that fit no parameter
    return count(
        chain,
        build_loss(config),
        _shapes(config, chain),
        precision=config.precision,
        minimum_bytes=config.swap.smallest_bytes(device_kind(config)),
        gathered=config.trainer.global_batch if config.trainer.gather_loss else 0,
        name=config.model.name,
        progress=progress,
    )


def read_profile(config: RunConfig, path: Path) -> ModelProfile:
    """Read a profile file. Raises :class:`ConfigError` if it is of another model than that of ``config``."""
    found, model = ModelProfile.load(path), config.model
    work = model.work(str(config.precision))
    wanted = build_chain(config).fingerprint() if work is None else work.fingerprint
    if found.fingerprint != wanted:
        raise ConfigError(
            f"--profile {path}: it is of {found.model} ({found.fingerprint}), and model={model.name} with these "
            f"settings is another ({wanted}); write it with `parallax profile` and the same model.* settings"
        )
    return found


def _shapes(config: RunConfig, chain: Chain) -> Sample:
    """Return a function that returns inputs and targets of n rows. If the shapes of rows are known, these are meta
    tensors; otherwise they are rows of the data source."""
    if (shapes := config.data.shapes(config.model)) is not None:
        return shapes
    batch = _sampled(config, least=max(COUNTED_ROWS))
    return lambda rows: (chain.arguments(batch.inputs(0, rows)), batch.targets(0, rows))

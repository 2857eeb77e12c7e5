"""Verify a run before its first step: whether the chain of blocks computes the same as the model, and whether batches
may be divided into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from parallax.config import RunConfig
from parallax.errors import ConfigError
from parallax.model.describe import Chain
from parallax.model.verification.rows import Verdict
from parallax.model.verification.verify import verify
from parallax.plan.config import AUTO
from parallax.plan.plan import Plan
from parallax.run.planning import Loss
from parallax.runtime.batch import Rows

_PADDED_ROWS = 1024  # rows among which the most padded one is searched


def verify_run(
    config: RunConfig, chain: Chain, loss: Loss, batch: Rows, progress: Callable[[str], None]
) -> Verdict:
    """Compare ``chain`` with the model of ``config`` on the first rows of ``batch``, if ``model.verify`` requests it.
    Return the verdict on whether batches may be divided into micro-batches. Raises :class:`ConfigError` if the rows are
    padded and the model's outputs depend on the padding."""
    if config.model.work(str(config.precision)) is not None:
        return Verdict()  # the model is known by its sizes only
    # The setting ``verify`` does not change the model, so all its values share one cached verdict.
    model = asdict(config.model) | {"verify": "auto"}
    key = repr((model, config.loss, config.data, config.precision, config.trainer.global_batch))
    found = verify(
        chain,
        loss,
        batch,
        when=config.model.verify,
        key=key,
        padded=lambda: _padded_rows(config),
        progress=progress,
    )
    if found.padded:
        raise ConfigError(
            f"rows of {config.data.label} are padded, and the model reads the padding: {found.padded}; use a model "
            "in which no output depends on later tokens (model=gpt, or attention with is_causal=True), or one of "
            "transformers, which gets a mask (model=huggingface); model.verify=false trains it as it is"
        )
    return found


def _padded_rows(config: RunConfig) -> Rows | None:
    """Return some rows of ``config``, which may include padded rows. Return None if this kind of data has no padding,
    or if the model gets a mask for the padding."""
    if not config.data.pads_rows or config.model.name == "huggingface":
        return None
    source: Any = config.data.open(config.model, config.seed)
    found: Rows = source.sample(min(len(source), _PADDED_ROWS))
    return found


def check_rows(config: RunConfig, verdict: Verdict, plan: Plan) -> None:
    """Raise :class:`ConfigError` if ``plan`` divides a batch into micro-batches although, by ``verdict``, this changes
    the loss."""
    rows = config.trainer.global_batch
    micro_batches = plan.micro_batches(rows)
    replicas = max(stage.replicas for stage in plan.stages)
    how = verdict.gathered if plan.gather_loss else verdict.coupled
    if not how or (micro_batches == 1 and replicas == 1):
        return
    splits = f"the plan has {micro_batches} micro-batch(es) and {replicas} replica(s)"
    whole = f"trainer.microbatch={rows} plan.replicas=1"
    if verdict.gathered:
        raise ConfigError(
            f"rows of a batch interact in the model, and {splits}: {how}; use {whole}, or return a value for each row "
            "from the model and compare the values in the loss, with trainer.gather_loss=true; if the model computes "
            "its loss from labels among its inputs, give the labels as targets instead; model.verify=false trains it "
            "as it is"
        )
    raise ConfigError(
        f"the loss depends on how a batch is split, and {splits}: {how}; use {_gathering(config)}, which computes it "
        f"once, over all rows, or {whole}, or, if it is a mean over some of the targets, give the loss count(targets) "
        "and return the sum; model.verify=false trains it as it is"
    )


def _gathering(config: RunConfig) -> str:
    """Return the settings to type, as text, with which the loss is computed once, over the outputs of all
    micro-batches."""
    requested = config.plan
    schedule = "" if requested.schedule in (AUTO, "gpipe") else " plan.schedule=gpipe"
    interleave = "" if requested.interleave in (AUTO, 1) else " plan.interleave=auto"
    return f"trainer.gather_loss=true{schedule}{interleave}"

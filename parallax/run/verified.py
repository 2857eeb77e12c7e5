"""What is checked of a configured run before its first step: that its chain is its model, that its rows may be cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from parallax.config import RunConfig
from parallax.errors import ConfigError
from parallax.model.describe import Chain
from parallax.model.verification.verify import Verdict, verify
from parallax.plan.analytic.transformer import TransformerConfig
from parallax.plan.plan import Plan
from parallax.run.planning import Loss
from parallax.runtime.batch import Rows


def verify_run(
    config: RunConfig, chain: Chain, loss: Loss, batch: Rows, progress: Callable[[str], None]
) -> Verdict:
    """Compare ``chain`` with the model of ``config`` on the first rows of ``batch``, as ``model.verify`` says."""
    if isinstance(config.model, TransformerConfig):
        return Verdict()  # it has no code
    model = replace(config.model, verify="auto")  # whenever it is checked, it is the same
    key = repr((model, config.data, config.precision, config.trainer.global_batch))
    return verify(chain, loss, batch, when=config.model.verify, key=key, progress=progress)


def check_rows(config: RunConfig, verdict: Verdict, plan: Plan) -> None:
    """Raise :class:`ConfigError` where ``plan`` cuts a batch whose parts give another loss."""
    rows = config.trainer.global_batch
    micro_batches = plan.micro_batches(rows)
    replicas = max(stage.replicas for stage in plan.stages)
    if not verdict.coupled or (micro_batches == 1 and replicas == 1):
        return
    raise ConfigError(
        f"the loss depends on how a batch is cut, and the plan has {micro_batches} micro-batch(es) and {replicas} "
        f"replica(s): {verdict.coupled}; use trainer.microbatch={rows} plan.replicas=1, or, where it is a mean over "
        "some of the targets, give the loss count(targets) and let it return the sum; model.verify=false trains it so"
    )

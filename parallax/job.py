"""From a resolved configuration to the objects of a run: model, loss, rows, plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from parallax.config import RunConfig
from parallax.errors import ConfigError
from parallax.model.describe import Chain, build_on_meta, describe
from parallax.model.registry import CustomModelConfig
from parallax.planning import Loss, Planned, plan_model
from parallax.train.data import Source, TextDataConfig, build_source

BYTES = 256  # values that a byte can have: what a model of text must know
DEFAULT_SEQUENCE = 256


def build_chain(config: RunConfig) -> Chain:
    """The model of ``config`` as a chain of blocks."""
    names = config.model.blocks if isinstance(config.model, CustomModelConfig) else ()
    return describe(config.model.build, seed=config.seed, dtype=config.precision.parameter_dtype, blocks=names)


def build_loss(config: RunConfig) -> Loss:
    """The model's own ``loss(outputs, targets)``, or cross-entropy over the last dimension of its outputs."""
    own = getattr(build_on_meta(config.model.build), "loss", None)
    return own if callable(own) else cross_entropy


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy: class scores in the last dimension of ``outputs``, classes in ``targets``."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def sequence_length(config: RunConfig) -> int:
    """Bytes in a row of text."""
    if isinstance(config.model, CustomModelConfig):
        return int(config.model.kwargs.get("sequence", DEFAULT_SEQUENCE))
    return config.model.sequence


def tokens_per_row(config: RunConfig) -> int:
    """What a row counts in tokens per second: its bytes, or one where rows are the user's own."""
    return sequence_length(config) if isinstance(config.data, TextDataConfig) else 1


def open_source(config: RunConfig, *, quiet: bool = True) -> Source:
    """The rows of ``config``."""
    vocabulary = getattr(config.model, "vocabulary", BYTES)
    if isinstance(config.data, TextDataConfig) and vocabulary < BYTES:
        raise ConfigError(f"model.vocabulary={vocabulary}: text needs {BYTES}, one for each value of a byte")
    return build_source(config.data, sequence_length(config), config.seed, quiet=quiet)


def plan_run(config: RunConfig, scratch: Path, progress: Callable[[str], None]) -> Planned:
    """The plan of ``config`` on this machine; ``scratch`` is where swap files would go."""
    source = open_source(config, quiet=False)
    return plan_model(
        build_chain(config),
        build_loss(config),
        source.validation(0, config.trainer.global_batch),
        cluster=config.cluster,
        plan=config.plan,
        swap=config.swap,
        precision=config.precision,
        microbatch=config.trainer.microbatch,
        name=config.model.name,
        scratch=scratch,
        progress=progress,
    )

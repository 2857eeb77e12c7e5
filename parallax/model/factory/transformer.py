"""A decoder described only by its sizes, which can be planned for but not trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from parallax.errors import ConfigError
from parallax.model.source import ModelConfig
from parallax.plan.analytic.transformer import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class TransformerModelConfig(TransformerConfig, ModelConfig):
    """A decoder of which only the sizes are known."""

    __doc__ = TransformerConfig.__doc__

    def check_code(self) -> NoReturn:
        raise ConfigError(
            "model=transformer: it has sizes but no code, so it can be planned for (cluster=dgx_a100) but neither "
            "measured nor trained; use model=gpt or model=custom"
        )

    def build(self) -> NoReturn:
        self.check_code()

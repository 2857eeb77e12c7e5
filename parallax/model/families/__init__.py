"""Models of transformers that are cut without their help: Llama, GPT-2, BERT, ViT and T5.

A block is a module of the model with the few lines around it that the model's own forward has. Attention masks are
made in each block from the padding that is relayed, which is smaller than what is made of it; tables of positions and
biases are made once and relayed. There is no cache: this is training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from parallax.model.block import Cut
from parallax.model.families import decoders, encoders, t5

FAMILIES: dict[str, Callable[[nn.Module], Cut]] = {
    "LlamaForCausalLM": decoders.cut_llama,
    "GPT2LMHeadModel": decoders.cut_gpt2,
    "BertForMaskedLM": encoders.cut_bert,
    "BertForSequenceClassification": encoders.cut_bert,
    "ViTForImageClassification": encoders.cut_vit,
    "T5ForConditionalGeneration": t5.cut_t5,
}
"""The classes of transformers that have ready blocks."""


def cut_family(model: nn.Module) -> Cut | None:
    """The blocks of ``model`` where it is of a family that has ready ones, and its forward is the family's."""
    for kind in type(model).__mro__:
        ready = kind.__module__.startswith("transformers.") and kind.__name__ in FAMILIES
        if ready and type(model).forward is vars(kind).get("forward"):
            cut = FAMILIES[kind.__name__](model)
            return replace(cut, rename=_Names(model))
    return None


class _Names:
    """What ``model`` calls the tensors of its files: names changed with transformers' releases, and files of the inner
    model alone lack its prefix. Conversions that compute are not made: the families here need none."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, name: str) -> str:
        for step in self._renamings:
            name, _ = step.rename_source_key(name)
        prefixed = f"{self._model.base_model_prefix}.{name}"
        return prefixed if name not in self._known and prefixed in self._known else name

    @cached_property
    def _known(self) -> set[str]:
        return set(self._model.state_dict())

    @cached_property
    def _renamings(self) -> list[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        return [
            step
            for step in get_model_conversion_mapping(self._model)
            if isinstance(step, WeightRenaming)
        ]

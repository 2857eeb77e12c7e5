"""Adapters of peft in models that others brought: the base is frozen, and what is added is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.models import hugging, text, vision

IMPORTS = ("peft",)


def adapt(build: Callable[[], nn.Module], settings: dict[str, Any]) -> nn.Module:
    """The model with adapters, as ``model.adapter`` makes them."""
    from parallax.model.factory.adapters import adapted

    return adapted(build(), settings, "")


def wrap(build: Callable[[], nn.Module], settings: dict[str, Any]) -> nn.Module:
    """The model in a model of peft, as a factory of one's own may make it."""
    import peft

    return peft.get_peft_model(build(), peft.get_peft_config(settings))


def _entry(
    base: Entry, method: str, make: Callable[..., nn.Module] = adapt, **settings: Any
) -> Entry:
    given = {"peft_type": method, **settings}
    return replace(
        base,
        build=partial(make, base.build, given),
        path=f"{base.path}, {method}" + (" (use_dora)" if settings.get("use_dora") else ""),
        imports=(*base.imports, *IMPORTS),
    )


_LLAMA = hugging.entry("causal", "LlamaForCausalLM")
_GPT2 = hugging.entry("causal", "GPT2LMHeadModel")
_BERT = hugging.entry("classes", "BertForSequenceClassification")
_T5 = hugging.entry("translation", "T5ForConditionalGeneration")
_VIT = hugging.entry("image", "ViTForImageClassification")
_ATTENTION = ["q_proj", "v_proj"]

ENTRIES: dict[str, Entry] = {
    "lora-llama": _entry(_LLAMA, "LORA", r=4, target_modules=_ATTENTION),
    "lora-llama-all": _entry(_LLAMA, "LORA", r=2, target_modules="all-linear", use_rslora=True),
    "dora-llama": _entry(_LLAMA, "LORA", r=4, target_modules=_ATTENTION, use_dora=True),
    "wrapped-llama": _entry(_LLAMA, "LORA", wrap, r=4, target_modules=_ATTENTION),
    "lora-gpt2": _entry(_GPT2, "LORA", r=4, target_modules=["c_attn"], fan_in_fan_out=True),
    "ia3-gpt2": _entry(
        _GPT2,
        "IA3",
        target_modules=["c_attn", "c_proj"],
        feedforward_modules=["c_proj"],
        fan_in_fan_out=True,
    ),
    "lora-bert-head": _entry(
        _BERT, "LORA", r=4, target_modules=["query"], modules_to_save=["classifier"], bias="all"
    ),
    "loha-bert": _entry(_BERT, "LOHA", r=2, target_modules=["query", "value"]),
    "lora-t5": _entry(_T5, "LORA", r=4, target_modules=["q", "v"]),
    "ia3-t5": _entry(_T5, "IA3", target_modules=["k", "v", "wo"], feedforward_modules=["wo"]),
    "lora-vit": _entry(
        _VIT, "LORA", r=4, target_modules=["q_proj"], modules_to_save=["classifier"]
    ),
    "oft-vit": _entry(_VIT, "OFT", oft_block_size=4, target_modules=["q_proj"]),
    "lora-unet": _entry(
        vision.ENTRIES["unet"], "LORA", r=2, target_modules=r"(downs|convs)\.\d\.0"
    ),
    "lora-mixer": _entry(vision.ENTRIES["mixer"], "LORA", r=2, target_modules="all-linear"),
    "lora-mingpt": _entry(text.ENTRIES["mingpt"], "LORA", r=2, target_modules=["c_attn", "c_fc"]),
    "norms-bert": _entry(_BERT, "LN_TUNING", target_modules=["LayerNorm"]),
}

"""Decoders of text: Llama and GPT-2. Between blocks pass the hidden states, tables of positions, and the padding where
it is given: ``(rows, sequence)``, 1 for a token that is there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallax.model.block import Block, Cut


def cut_llama(model: Any) -> Cut:
    """Embedding and rotary tables, layers, norm and head."""
    layers = [
        Block(f"model.layers.{i}", _LlamaLayer(layer), _TABLES)
        for i, layer in enumerate(model.model.layers)
    ]
    first = Block("model.embed_tokens", _LlamaEmbedding(model.model), _TABLES)
    return Cut(
        (first, *layers, Block("lm_head", _LlamaHead(model))), ("input_ids", "attention_mask")
    )


def cut_gpt2(model: Any) -> Cut:
    """Embeddings, layers, norm and head."""
    inner = model.transformer
    layers = [
        Block(f"transformer.h.{i}", _GPT2Layer(layer, inner.config))
        for i, layer in enumerate(inner.h)
    ]
    blocks = (
        Block("transformer.wte", _GPT2Embedding(inner)),
        *layers,
        Block("lm_head", _GPT2Head(model)),
    )
    return Cut(blocks, ("input_ids", "attention_mask"))


_TABLES = frozenset({1, 2})  # cosines and sines: (1, sequence, head), the same for all rows


def causal_mask(config: Any, hidden: Tensor, padding: tuple[Tensor, ...]) -> Any:
    """What attention is given for hidden states of so many rows and positions."""
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(
        config=config,
        inputs_embeds=hidden,
        attention_mask=padding[0] if padding else None,
        past_key_values=None,
        position_ids=positions(hidden),
    )


def positions(hidden: Tensor) -> Tensor:
    """(1, sequence)."""
    return torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)


class _LlamaEmbedding(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = model.embed_tokens, model.rotary_emb

    def forward(self, input_ids: Tensor, *padding: Tensor) -> tuple[Tensor, ...]:
        hidden = self.embed_tokens(input_ids)
        cosine, sine = self.rotary_emb(hidden, position_ids=positions(hidden))
        return (hidden, cosine, sine, *padding)


class _LlamaLayer(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden: Tensor, cosine: Tensor, sine: Tensor, *padding: Tensor
    ) -> tuple[Tensor, ...]:
        hidden = self.layer(
            hidden,
            attention_mask=causal_mask(self.layer.self_attn.config, hidden, padding),
            position_embeddings=(cosine, sine),
            position_ids=positions(hidden),
            use_cache=False,
        )
        return (hidden, cosine, sine, *padding)


class _LlamaHead(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, hidden: Tensor, *_: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


class _GPT2Embedding(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = model.wte, model.wpe, model.drop

    def forward(self, input_ids: Tensor, *padding: Tensor) -> tuple[Tensor, ...]:
        embedded = self.wte(input_ids)
        return (self.drop(embedded + self.wpe(positions(embedded))), *padding)


class _GPT2Layer(nn.Module):
    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        self.layer, self.config = layer, config

    def forward(self, hidden: Tensor, *padding: Tensor) -> tuple[Tensor, ...]:
        mask = causal_mask(self.config, hidden, padding)
        return (self.layer(hidden, attention_mask=mask, use_cache=False), *padding)


class _GPT2Head(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.ln_f, self.lm_head = model.transformer.ln_f, model.lm_head

    def forward(self, hidden: Tensor, *_: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.ln_f(hidden))
        return logits

"""Encoders: BERT for text and ViT for images. Between blocks pass the hidden states, and of text the padding where it
is given: ``(rows, sequence)``, 1 for a token that is there."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from parallax.model.block import Block, Cut
from parallax.model.families.decoders import causal_mask


def cut_bert(model: Any) -> Cut:
    """Embeddings, layers, and the head: of words, or of the pooled first token's class."""
    layers = model.bert.encoder.layer
    blocks = [
        Block(f"bert.encoder.layer.{i}", _BertLayer(layer, model.config))
        for i, layer in enumerate(layers)
    ]
    head = (
        Block("cls", _WordHead(model))
        if hasattr(model, "cls")
        else Block("classifier", _ClassHead(model))
    )
    first = Block("bert.embeddings", _BertEmbedding(model.bert))
    return Cut((first, *blocks, head), ("input_ids", "attention_mask", "token_type_ids"))


def cut_vit(model: Any) -> Cut:
    """Patches and positions, layers, norm and classifier."""
    layers = [
        Block(f"vit.layers.{i}", _ViTLayer(layer, model.config))
        for i, layer in enumerate(model.vit.layers)
    ]
    blocks = (
        Block("vit.embeddings", _ViTEmbedding(model.vit)),
        *layers,
        Block("classifier", _ViTHead(model)),
    )
    return Cut(blocks, ("pixel_values",))


def bidirectional_mask(
    config: Any, hidden: Tensor, padding: Tensor | None, source: Tensor | None = None
) -> Any:
    """What attention is given for hidden states of so many rows and positions; ``source``: what they attend to, where
    that is not themselves."""
    from transformers.masking_utils import create_bidirectional_mask

    return create_bidirectional_mask(
        config=config, inputs_embeds=hidden, attention_mask=padding, encoder_hidden_states=source
    )


class _BertEmbedding(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embeddings = model.embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        hidden = self.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
        return (hidden,) if attention_mask is None else (hidden, attention_mask)


class _BertLayer(nn.Module):
    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        self.layer, self.config = layer, config

    def forward(self, hidden: Tensor, *padding: Tensor) -> tuple[Tensor, ...]:
        if self.config.is_decoder:
            mask = causal_mask(self.config, hidden, padding)
        else:
            mask = bidirectional_mask(self.config, hidden, padding[0] if padding else None)
        return (self.layer(hidden, mask), *padding)


class _WordHead(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.cls = model.cls

    def forward(self, hidden: Tensor, *_: Tensor) -> Tensor:
        scores: Tensor = self.cls(hidden)
        return scores


class _ClassHead(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pooler, self.dropout, self.classifier = (
            model.bert.pooler,
            model.dropout,
            model.classifier,
        )

    def forward(self, hidden: Tensor, *_: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.dropout(self.pooler(hidden)))
        return logits


class _ViTEmbedding(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embeddings = model.embeddings

    def forward(self, pixel_values: Tensor) -> Tensor:
        weight = self.embeddings.patch_embeddings.projection.weight
        hidden: Tensor = self.embeddings(pixel_values.to(weight.dtype))
        return hidden


class _ViTLayer(nn.Module):
    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        self.layer, self.config = layer, config

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.layer(hidden, bidirectional_mask(self.config, hidden, None))
        return result


class _ViTHead(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layernorm, self.classifier = model.vit.layernorm, model.classifier

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.layernorm(hidden)[:, 0, :])
        return logits

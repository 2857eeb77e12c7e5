"""T5, an encoder and a decoder in one chain.

::

    encoder:  hidden, decoder ids, bias, *masks  ─ layers ─▶  turn  ─▶  decoder:  hidden, encoded, bias, *masks ─ layers

The bias of relative positions is a parameter's, made by a stack's first layer and used by its others: ``(1, heads,
sequence, sequence)``, the same for all rows. The decoder's ids pass the encoder; what was encoded passes the decoder.
Masks are those of the input and of the decoder's input, where given, ``(rows, sequence)``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from parallax.model.block import Block, Cut
from parallax.model.families.decoders import causal_mask
from parallax.model.families.encoders import bidirectional_mask

_BIAS = frozenset({2})


def cut_t5(model: Any) -> Cut:
    """Embedding, encoder's layers, its norm with the decoder's embedding, decoder's layers, norm and head."""
    encoder = [
        Block(f"encoder.block.{i}", _EncoderLayer(layer, model.encoder.config, first=i == 0), _BIAS)
        for i, layer in enumerate(model.encoder.block)
    ]
    decoder = [
        Block(f"decoder.block.{i}", _DecoderLayer(layer, model.decoder.config, first=i == 0), _BIAS)
        for i, layer in enumerate(model.decoder.block)
    ]
    blocks = (
        Block("encoder.embed_tokens", _Embedding(model.encoder)),
        *encoder,
        Block("decoder.embed_tokens", _Turn(model)),
        *decoder,
        Block("lm_head", _Head(model)),
    )
    return Cut(
        blocks, ("input_ids", "decoder_input_ids", "attention_mask", "decoder_attention_mask")
    )


class _Embedding(nn.Module):
    def __init__(self, stack: Any) -> None:
        super().__init__()
        self.embed_tokens, self.dropout = stack.embed_tokens, stack.dropout

    def forward(
        self, input_ids: Tensor, decoder_input_ids: Tensor, *masks: Tensor
    ) -> tuple[Tensor, ...]:
        return (self.dropout(self.embed_tokens(input_ids)), decoder_input_ids, *masks)


class _EncoderLayer(nn.Module):
    def __init__(self, layer: Any, config: Any, *, first: bool) -> None:
        super().__init__()
        self.layer, self.config, self.first = layer, config, first

    def forward(self, hidden: Tensor, ids: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        bias, masks = (None, rest) if self.first else (rest[0], rest[1:])
        mask = bidirectional_mask(self.config, hidden, masks[0] if masks else None)
        hidden, bias, _ = self.layer(hidden, mask, bias)
        return (hidden, ids, bias, *masks)


class _Turn(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.final_layer_norm, self.dropout = model.encoder.final_layer_norm, model.encoder.dropout
        self.embed_tokens, self.decoder_dropout = model.decoder.embed_tokens, model.decoder.dropout

    def forward(
        self, hidden: Tensor, ids: Tensor, _bias: Tensor, *masks: Tensor
    ) -> tuple[Tensor, ...]:
        encoded = self.dropout(self.final_layer_norm(hidden))
        return (self.decoder_dropout(self.embed_tokens(ids)), encoded, *masks)


class _DecoderLayer(nn.Module):
    def __init__(self, layer: Any, config: Any, *, first: bool) -> None:
        super().__init__()
        self.layer, self.config, self.first = layer, config, first

    def forward(self, hidden: Tensor, encoded: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        bias, masks = (None, rest) if self.first else (rest[0], rest[1:])
        own = causal_mask(self.config, hidden, masks[1:])
        cross = bidirectional_mask(self.config, hidden, masks[0] if masks else None, encoded)
        hidden, bias, _ = self.layer(hidden, own, bias, encoded, cross)
        return (hidden, encoded, bias, *masks)


class _Head(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.final_layer_norm, self.dropout = model.decoder.final_layer_norm, model.decoder.dropout
        self.lm_head = model.lm_head
        self.scale = model.model_dim**-0.5 if model.config.scale_decoder_outputs else 1.0

    def forward(self, hidden: Tensor, *_: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.dropout(self.final_layer_norm(hidden)) * self.scale)
        return logits

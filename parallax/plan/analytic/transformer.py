"""Compute the work of a transformer decoder from its sizes alone.

A block is a list of operations. The floating-point operations, memory traffic and saved bytes of these operations are
summed. All figures are for one row, that is one sequence of ``sequence`` tokens.

* Floating-point operations: a matrix product takes two per weight and token in the forward, two for the gradient of its
  input and two for the gradient of its weight (Narayanan et al. 2021, section 5.1). Attention of the kind ``full``
  computes every score. Attention of the kind ``flash`` computes half of them, because attention is causal. Flash
  attention computes the scores again in the backward, which then takes 2.5 times the operations of the forward (Dao
  2023, section 4.1).
* Traffic of all operators but matrix products: each operator reads its inputs and writes its outputs once. Three groups
  are fused into one operator each, as in Megatron: scale, mask and softmax; bias and GELU; dropout and addition to the
  residual stream.
* Kernels: one per matrix product and operator. Norms and biases need one more for gradients of their parameters.
* Saved activations: those of Korthikanti et al. 2022, section 4.1. With full attention, a plain MLP and dropout, a
  layer saves ``sequence · hidden · (34 + 5 · heads · sequence / hidden)`` bytes. Without dropout, the masks of dropout
  are not saved. With flash attention, the scores are not saved.
* Working memory: the bytes that a caching allocator holds for a block while it runs. The allocator does not reuse
  memory for another size, so the gradients of all saved tensors count, not only those that are alive together.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from parallax.errors import ConfigError, check_choice, check_positive
from parallax.plan.analytic.recipe import BytesPerParameter, recipe
from parallax.plan.profile import Affine
from parallax.plan.work import BlockWork, ModelWork, Work

STATISTIC = 4
"""Bytes of a number that reductions keep in full precision: a mean, a sum of exponentials."""
TOKEN = 8
"""Bytes of a token's number (int64)."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes of a decoder; the defaults are GPT-2 XL's (Radford et al. 2019).

    ``layers``: transformer blocks.
    ``hidden``: width of a token's vector.
    ``heads``: attention heads, which divide ``hidden``.
    ``kv_heads``: heads of keys and values (Ainslie et al. 2023); 0 is as many as ``heads``.
    ``ffn``: width of the MLP. 0 means four times ``hidden``. For a gated MLP, 0 means 8/3 of ``hidden``, rounded up to
        a multiple of 256 (Touvron et al. 2023), because a gated MLP has three matrices instead of two.
    ``vocabulary``: number of tokens in the vocabulary.
    ``sequence``: tokens in a row.
    ``attention``: flash, which saves no scores, or full, which saves them.
    ``gated``: use a gated MLP.
    ``positions``: learned (an added vector for each position) or rotary (rotated queries and keys).
    ``bias``: matrices and norms have biases.
    ``tied``: the head uses the embedding's weight.
    ``dropout``: share of the values that are zeroed in training.
    """

    name: str = "transformer"
    layers: int = 48
    hidden: int = 1600
    heads: int = 25
    kv_heads: int = 0
    ffn: int = 0
    vocabulary: int = 50257
    sequence: int = 1024
    attention: str = "flash"
    gated: bool = False
    positions: str = "learned"
    bias: bool = True
    tied: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "vocabulary", "sequence"):
            check_positive(f"model.{key}", getattr(self, key))
        for key in ("kv_heads", "ffn"):
            check_positive(f"model.{key}", getattr(self, key), zero=True)
        check_choice("model.attention", self.attention, ["flash", "full"])
        check_choice("model.positions", self.positions, ["learned", "rotary"])
        if self.hidden % self.heads:
            raise ConfigError(
                f"model.heads={self.heads}: must divide model.hidden={self.hidden}; type "
                f"model.heads={math.gcd(self.hidden, 8)}"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(
                f"model.kv_heads={self.kv_heads}: must divide model.heads={self.heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"model.dropout={self.dropout}: accepted are shares from 0 to below 1"
            )

    @property
    def width(self) -> int:
        usual = 256 * math.ceil(8 * self.hidden / 3 / 256) if self.gated else 4 * self.hidden
        return self.ffn or usual

    @property
    def kv_width(self) -> int:
        """Return the width of the keys, which is also the width of the values."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the model. A tied matrix counts once."""
        work = self.work("fp32")
        return sum(block.parameters for block in work.blocks) - sum(
            size // 4 for size, _ in work.ties
        )

    def work(self, precision: str = "bf16") -> ModelWork:
        """Return the work of embedding, layers and head in the given ``precision``.

        ``precision`` is the name of a recipe (:data:`~parallax.plan.analytic.recipe.RECIPES`).
        """
        how = recipe(precision)
        shape = _Shape(self, how)
        layer = shape.layer()
        layers = [replace(layer, name=f"layer {i}") for i in range(self.layers)]
        token_bytes = self.vocabulary * self.hidden * how.weight
        text = json.dumps({**asdict(self), "precision": precision}, sort_keys=True)
        return ModelWork(
            model=self.name,
            fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16],
            precision=precision,
            dtype=how.dtype,
            blocks=(shape.embedding(), *layers, shape.head(layer)),
            ties=((token_bytes, (0, self.layers + 1)),) if self.tied else (),
            optimizer_bytes=how.optimizer / how.weight,
            gradient_bytes=how.gradient / how.weight,
            master_bytes=how.master / how.weight,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """One operation on one row.

    ``flops`` (floating-point operations), ``traffic`` (bytes of memory traffic) and ``kernels`` (number of kernels)
    have three entries each: forward, input gradient and weight gradient. Further numbers:

    ``weights``   number of parameters in matrix products
    ``others``    number of all other parameters
    ``operands``  number of input and output activations of a matrix product
    ``attends``   whether ``flops`` are those of attention

    Bytes of activations:

    ``saved``     saved for the backward; may be offloaded
    ``stays``     saved for the backward, but too small to be offloaded
    ``scratch``   allocated only while the operation runs, without the gradients of saved tensors
    ``deferred``  needed by the weight-gradient pass
    """

    flops: tuple[float, float, float] = (0.0, 0.0, 0.0)
    attends: bool = False
    operands: float = 0.0
    traffic: tuple[float, float, float] = (0.0, 0.0, 0.0)
    kernels: tuple[int, int, int] = (1, 1, 0)
    weights: int = 0
    others: int = 0
    saved: float = 0.0
    stays: float = 0.0
    scratch: float = 0.0
    deferred: float = 0.0


class _Shape:
    """Computes the work of the blocks of one model under one recipe for precision.

    The first methods describe single operations; the last ones sum them to blocks.
    """

    def __init__(self, config: TransformerConfig, how: BytesPerParameter) -> None:
        self.c, self.how = config, how
        self.tokens = config.sequence
        self.stream = float(how.residual * config.hidden * self.tokens)
        self.mask = float(config.hidden * self.tokens) if config.dropout else 0.0

    def numbers(self, per_token: int) -> float:
        """Return the bytes of ``per_token`` elements for every token of a row, in the dtype of matrix products."""
        return float(self.how.compute * per_token * self.tokens)

    def linear(self, inner: int, outer: int, *, saves: bool = True, bias: bool = True) -> _Op:
        """Return a matrix product from ``inner`` to ``outer`` elements per token.

        ``saves`` is False if another operation already saves the input. With ``bias`` the product adds a bias, whose
        gradient is a sum over the output's gradient.
        """
        flops = 2.0 * self.tokens * inner * outer
        biased = bias and self.c.bias
        return _Op(
            flops=(flops, flops, flops),
            operands=float(self.tokens * (inner + outer)),
            traffic=(0.0, 0.0, self.numbers(outer) if biased else 0.0),
            kernels=(1, 1, 2 if biased else 1),
            weights=inner * outer,
            others=outer if biased else 0,
            saved=self.numbers(inner) if saves else 0.0,
            deferred=self.numbers(inner * saves + outer),
        )

    def norm(self) -> _Op:
        """Return a norm of the residual stream, with its output in the dtype of matrix products.

        The input is saved and may be offloaded. Two statistics per token are saved on the device.
        """
        out = self.numbers(self.c.hidden)
        return _Op(
            traffic=(self.stream + out, 2 * self.stream + out, self.stream + out),
            kernels=(1, 1, 1),
            others=self.c.hidden * (2 if self.c.bias else 1),
            saved=self.stream,
            stays=2.0 * STATISTIC * self.tokens,
        )

    def residual(self) -> _Op:
        """Return dropout and addition to the residual stream. The mask, one byte per element, is saved."""
        out = self.numbers(self.c.hidden)
        return _Op(
            traffic=(2 * self.stream + out + self.mask, self.stream + out + self.mask, 0.0),
            saved=self.mask,
        )

    def attention(self) -> _Op:
        """Return attention: scores, softmax, and the sum of the values weighted by the softmax.

        ``flash`` runs all of this as one kernel. ``full`` runs one operator after another with all scores in memory. It
        saves the softmax and, while it runs, also allocates the scores and their gradients.
        """
        c = self.c
        flops = 4.0 * self.tokens * self.tokens * c.hidden
        inputs, out = self.numbers(c.hidden + 2 * c.kv_width), self.numbers(c.hidden)
        if c.attention == "flash":
            return _Op(
                flops=(flops / 2, 2.5 * flops / 2, 0.0),
                attends=True,
                traffic=(inputs + out, 2 * (inputs + out), 0.0),
                kernels=(1, 3, 0),
                saved=inputs,
                stays=float(STATISTIC * self.tokens * c.heads),
                scratch=float(
                    STATISTIC * self.tokens * c.hidden
                ),  # gradients of queries are summed in fp32
            )
        scores = self.numbers(self.tokens * c.heads)
        dropped = scores + self.tokens * self.tokens * c.heads if c.dropout else 0.0
        return _Op(
            flops=(flops, 2 * flops, 0.0),
            attends=True,
            traffic=(2 * scores + 2 * dropped, 3 * scores + 2 * dropped, 0.0),
            kernels=(3 + bool(c.dropout), 5 + bool(c.dropout), 0),
            saved=inputs + scores + dropped,
            scratch=2 * scores,
        )

    def rotation(self) -> _Op:
        """Return the rotary embedding of queries and keys (Su et al. 2021); only the angles are saved."""
        moved = 2 * self.numbers(self.c.hidden + self.c.kv_width)
        return _Op(traffic=(moved, moved, 0.0), kernels=(2, 2, 0))

    def activation(self) -> _Op:
        """Return the MLP's activation as one kernel: GELU, or, if gated, SiLU of the gate times the other input.

        The inputs are saved.
        """
        wide, inputs = self.numbers(self.c.width), 2 if self.c.gated else 1
        return _Op(traffic=((inputs + 1) * wide, (2 * inputs + 1) * wide, 0.0), saved=inputs * wide)

    def loss(self) -> _Op:
        """Return cross-entropy: the largest logit, the sum of exponentials, and the softmax.

        The softmax is saved in full precision. The backward computes softmax minus targets, in the dtype of the logits.
        """
        logits, softmax = self.numbers(self.c.vocabulary), self.softmax()
        return _Op(
            traffic=(2 * logits + softmax, softmax + logits, 0.0), kernels=(3, 2, 0), scratch=logits
        )

    def softmax(self) -> float:
        """Return the bytes of the softmax that the loss saves."""
        return float(max(STATISTIC, self.how.compute) * self.tokens * self.c.vocabulary)

    def embedding(self) -> BlockWork:
        """Return the block that computes token vectors and adds learned positions."""
        c = self.c
        tables = 2 if c.positions == "learned" else 1
        op = _Op(
            traffic=((tables + 1) * self.stream + self.mask, 0.0, 2 * self.stream + self.mask),
            kernels=(tables, 0, tables),
            others=c.hidden * (c.vocabulary + (c.sequence if tables > 1 else 0)),
            saved=self.mask,
            stays=float(TOKEN * self.tokens),
        )
        return self.block(
            "embedding", [op], entering=float(TOKEN * self.tokens), leaving=self.stream
        )

    def layer(self) -> BlockWork:
        c = self.c
        gate = [self.linear(c.hidden, c.width, saves=False)] if c.gated else []
        turn = [self.rotation()] if c.positions == "rotary" else []
        ops = [
            self.norm(),
            self.linear(c.hidden, c.hidden + 2 * c.kv_width),
            *turn,
            self.attention(),
            self.linear(c.hidden, c.hidden),
            self.residual(),
            self.norm(),
            self.linear(c.hidden, c.width),
            *gate,
            self.activation(),
            self.linear(c.width, c.hidden),
            self.residual(),
        ]
        return self.block("layer", ops, entering=self.stream, leaving=self.stream)

    def head(self, layer: BlockWork) -> BlockWork:
        """Return the block of final norm, logits and loss. ``layer`` is the work of the layer before.

        A caching allocator cannot place logits in the freed memory of the layer's tensors, because sizes differ. So the
        layer's working memory is still held while the head runs, and is added to the head's working memory.
        """
        c = self.c
        ops = [self.norm(), self.linear(c.hidden, c.vocabulary, bias=False), self.loss()]
        alone = self.block("head", ops, entering=self.stream, leaving=self.numbers(c.vocabulary))
        return replace(
            alone,
            by_loss=Affine(per_row=self.softmax()),
            forward_work=_sum(alone.forward_work, layer.forward_work),
            backward_work=_sum(alone.backward_work, layer.backward_work),
        )

    def block(self, name: str, ops: Sequence[_Op], *, entering: float, leaving: float) -> BlockWork:
        """Return the block with the summed work of ``ops``.

        In the backward, each saved tensor gets a gradient of equal size. Each parameter's gradient is added to the sum
        of the step; this addition moves three times the gradient's bytes. Autocast casts weights in the forward, keeps
        the casts, and casts the gradients back. ``entering`` and ``leaving`` are the bytes of the block's input and
        output for one row.
        """
        how = self.how
        weights, parameters = (
            sum(op.weights for op in ops),
            sum(op.weights + op.others for op in ops),
        )
        saved, scratch = sum(op.saved for op in ops), sum(op.scratch for op in ops)
        casts = float(how.cast * weights)
        casting = float((how.weight + how.cast) * weights) if how.cast else 0.0
        fixed_traffic = (casting, 0.0, casting + 3.0 * how.gradient * parameters)
        operands = Affine(per_row=sum(op.operands for op in ops))
        forward, backward, weight = (
            Work(
                flops=Affine(per_row=sum(op.flops[i] for op in ops)),
                bytes=Affine(fixed=fixed, per_row=sum(op.traffic[i] for op in ops)),
                kernels=float(sum(op.kernels[i] for op in ops)),
                attention_flops=Affine(per_row=sum(op.flops[i] for op in ops if op.attends)),
                operands=operands,
            )
            for i, fixed in enumerate(fixed_traffic)
        )
        return BlockWork(
            name=name,
            parameters=parameters,
            parameter_bytes=parameters * how.weight,
            largest_bytes=max(max(op.weights, op.others) for op in ops) * how.weight,
            forward=forward,
            input_gradient=backward,
            weight_gradient=weight,
            moved=Affine(per_row=saved),
            stays=Affine(fixed=casts, per_row=sum(op.stays for op in ops)),
            input=Affine(per_row=entering),
            output=Affine(per_row=leaving),
            forward_work=Affine(per_row=scratch),
            backward_work=Affine(fixed=how.gradient * parameters + casts, per_row=saved + scratch),
            deferred=Affine(fixed=casts, per_row=sum(op.deferred for op in ops)),
        )


def _sum(a: Affine, b: Affine) -> Affine:
    return Affine(fixed=a.fixed + b.fixed, per_row=a.per_row + b.per_row)

"""Count the work of the operators that run on tensors without memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils.flop_counter import conv_flop_count, flop_registry

from parallax.model.block import tensors_in
from parallax.model.private import OperatorMode
from parallax.model.saved import address


@dataclass(frozen=True)
class PassWork:
    """The work of the operators of one pass.

    ``flops``            operations of matrix products, including those in attention
    ``attention_flops``  the operations in attention
    ``operands``         elements that the matrix products outside of attention read and write
    ``bytes``            bytes that all other operators read and write
    ``kernels``          the number of kernels
    """

    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    attention_flops: float = 0.0
    operands: float = 0.0

    def minus(self, other: PassWork) -> PassWork:
        """Return this work minus ``other``, field by field, but at least 0."""
        return PassWork(*(max(0.0, mine - theirs) for mine, theirs in zip(self.parts, other.parts)))

    @property
    def parts(self) -> tuple[float, ...]:
        return self.flops, self.bytes, self.kernels, self.attention_flops, self.operands


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> float:
    """Return the number of operations of attention: of the product of queries and keys, and of the product of scores
    and values. With a causal mask only half of them are counted, because the kernel skips the others.
    """
    # Dropout, is_causal.
    _, is_causal = rest if len(rest) == 2 else (0.0, named.get("is_causal", False))
    # Torch's formula, which rejects grouped-query attention before 2.13.
    *_, tokens, features = key.shape
    scores, products = query.shape[:-1].numel() * tokens, features + value.shape[-1]
    return 2.0 * scores * products / (2 if is_causal else 1)


def _attention_backward(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any
) -> float:
    """Return the operations of attention's backward: four products for gradients, and the scores computed again.

    This is 2.5 times the forward (Dao 2023, section 4.1).
    """
    return 2.5 * _attention(query, key, value, *rest[2:], **named)  # skips output and log-sum-exp


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, **_: Any) -> float:
    """Return the operations of a convolution's backward: those of its forward for each of the two gradients.

    Torch's own formula is not used, because it counts the weight gradient of a grouped convolution once for each group.
    """
    transposed, wanted = rest[4], rest[7]
    forward = conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed)
    return float(forward * sum(wanted[:2]))


_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
_FORMULAS: dict[str, Callable[..., float]] = {
    _FLASH: _attention,
    f"{_FLASH}_backward": _attention_backward,
    "aten::convolution_backward": _convolution_backward,
}
"""Formulas that torch's counter lacks or has wrong, for the kernels that fake tensors select."""


def _formula(func: Any) -> Callable[..., float] | None:
    """Return the formula for the operations of ``func``, None if it is neither a matrix product nor a convolution."""
    return _FORMULAS.get(func.name()) or flop_registry.get(func._overloadpacket)


_ATTENDING = ("attention", "bmm")
"""Substrings of the names of operators that compute attention, which are fused kernels and batched matrix products."""


_RECOMPUTED = (
    0.8  # share of a fused attention backward's five products that do not compute the scores again
)


class FlopMeter(OperatorMode):
    """Counts in ``flops`` the operations of matrix products and convolutions that a model needs.

    The backward of a fused attention computes the scores again; these operations do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if "scaled_dot_product" in func.name():
            self.flops += _needed_by_attention(func, args, kwargs)
        elif (formula := _formula(func)) is not None:
            self.flops += float(formula(*args, **kwargs, out_val=out))
        return out


def _needed_by_attention(func: Any, args: Any, kwargs: Any) -> float:
    """Return the operations that count for a call of a fused attention kernel or of its backward."""
    given = dict(zip((each.name for each in func._schema.arguments), args)) | kwargs
    operands = [given.get(name) for name in ("query", "key", "value")]
    if not all(isinstance(each, Tensor) and each.ndim == 4 for each in operands):
        return 0.0
    forward = _attention(*operands, is_causal=given.get("is_causal", False))
    return forward * 2.5 * _RECOMPUTED if func.name().endswith("_backward") else forward


class WorkMeter(OperatorMode):
    """Counts the work of every operator below autograd, and tracks every storage until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()
        self._level = self._base = self._peak = 0
        self._found = PassWork()

    @contextmanager
    def watch(self) -> Iterator[Callable[[], tuple[PassWork, int]]]:
        """A context that counts work. It yields a function that returns two results: the work since the context was
        entered, and the peak of live bytes since then, above the bytes that were alive on entry."""
        self._base = self._peak = self._level
        self._found = PassWork()
        with self:
            yield lambda: (self._found, self._peak - self._base)

    def register_storages(self, tensors: Sequence[Tensor]) -> None:
        """Register storages that already exist, so that no operator counts as their creator."""
        for tensor in tensors:
            self._remember(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        written, read = list(tensors_in(out)), list(tensors_in((args, kwargs)))
        fresh = [tensor for tensor in written if self._remember(tensor.untyped_storage())]
        if (formula := _formula(func)) is not None:
            flops = float(formula(*args, **kwargs, out_val=out))
            attends = any(word in func.name() for word in _ATTENDING)
            operands = sum(tensor.numel() for tensor in [*read, *written])
            more = {"attention_flops": flops} if attends else {"operands": float(operands)}
            self._add(PassWork(flops, 0.0, 1.0, **more))
        elif fresh or func._schema.is_mutable:  # views and shape queries run no kernel
            self._add(PassWork(0.0, float(_traffic_bytes([*read, *written])), 1.0))
        return out

    def _add(self, more: PassWork) -> None:
        self._found = PassWork(
            *(mine + theirs for mine, theirs in zip(self._found.parts, more.parts))
        )

    def _remember(self, storage: UntypedStorage) -> bool:
        """Return whether ``storage`` was unknown. The bytes of such a storage are tracked until it is freed."""
        key, size = address(storage), storage.nbytes()
        if key in self._known:
            return False
        self._known.add(key)
        self._level += size
        self._peak = max(self._peak, self._level)
        weakref.finalize(storage, self._forget, key, size)
        return True

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._level -= size


def _traffic_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes that an operator reads and writes.

    ``tensors`` lists its operands and results, so a tensor that is changed in place is in the list twice.
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

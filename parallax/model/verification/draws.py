"""Control random numbers while a model is compared with its chain of blocks.

If the two call random operators in different orders, they draw different masks and noise, although both may be correct.
So there are two contexts:

* When a model is compared with its chain, every call of a torch function draws from the same random state. This also
  reveals a dropout that only one of the two has.
* When a batch is compared with its parts, dropout is off, and BatchNorms use their running statistics. The statistics
  of a batch may differ from those of its parts, because the user chooses the rows over which they are computed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SEED = 20
_DROPOUTS = (
    *(F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(F.alpha_dropout, F.feature_alpha_dropout),
)
_RECURRENT = "lstm", "gru", "rnn_tanh", "rnn_relu"
_ATTENTION = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
"""{function: index of its argument ``dropout_p``}."""


class SameDraws(TorchFunctionMode):
    """A context in which every torch function draws from the same random state.

    ``watch`` is called with each function's result.
    """

    def __init__(self, watch: Callable[[Any], None] = lambda found: None) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        torch.default_generator.manual_seed(_SEED)
        found = func(*args, **(kwargs or {}))
        self._watch(found)
        return found


class WithoutDraws(TorchFunctionMode):
    """A context in which dropout is off and BatchNorms use their running statistics.

    :meth:`drew` detects other operations that draw random numbers.
    """

    def __enter__(self) -> WithoutDraws:
        torch.default_generator.manual_seed(_SEED)
        self._before = torch.default_generator.get_state()
        super().__enter__()
        return self

    def drew(self) -> bool:
        """Return whether random numbers were drawn since the context was entered."""
        return not torch.default_generator.get_state().equal(self._before)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.batch_norm:
            return _with_running_statistics(*args, **kwargs)
        if func in _ATTENTION:
            place = _ATTENTION[func]
            if "dropout_p" in kwargs or len(args) <= place:
                kwargs["dropout_p"] = 0.0
            else:
                args = (*args[:place], 0.0, *args[place + 1 :])
        if getattr(func, "__name__", "") in _RECURRENT:
            args = tuple(0.0 if isinstance(part, float) else part for part in args)
        return func(*args, **kwargs)


def _with_running_statistics(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    del training
    channels = input.shape[1]
    mean = running_mean if running_mean is not None else input.new_zeros(channels)
    variance = running_var if running_var is not None else input.new_ones(channels)
    return F.batch_norm(input, mean, variance, weight, bias, False, momentum, eps)


@contextlib.contextmanager
def own_random_state() -> Iterator[None]:
    """A context that restores the random states of torch and Python on exit."""
    python = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)


def begin_draws() -> None:
    """Seed the generators of torch and Python, always with the same number."""
    torch.default_generator.manual_seed(_SEED)
    random.seed(_SEED)

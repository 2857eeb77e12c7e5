"""Call a user's loss, and raise an error if training with its return value is impossible."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from parallax.errors import DataError, DescribeError

_OF_CLASSES = re.compile(
    "Target -?[0-9]+ is out of bounds|expected target dtype|multi-target not supported|expected scalar type Long|"
    "target with class probabilities"
)
_ACCEPTED = "a tensor of one number, alone, first in a tuple, or as loss in a dictionary"


def call_loss(
    loss: Callable[[Any, Any], Any], outputs: Any, targets: Any, *, alone: bool = False
) -> Tensor:
    """Return ``loss(outputs, targets)``, the loss of some rows, as a tensor of one element.

    Raises :class:`DescribeError` if the loss is not a tensor of one element, or if the loss function uses parameters or
    buffers of the model, which have no values in this process. ``alone``: also raise an error if the function returns a
    tuple of several losses. This check takes time, because it searches their autograd graphs.
    """
    try:
        returned = loss(outputs, targets)
        found = _first(returned)
    except (RuntimeError, NotImplementedError, IndexError) as error:
        if "meta" in str(error) and _names_on_meta(loss):
            raise _not_at_hand(loss) from error
        if _OF_CLASSES.search(str(error)):
            raise _wrong_classes(error, scores_of(outputs), targets) from error
        raise
    if not isinstance(found, Tensor):
        hint = "; gradients need the tensor, so remove .item() and float()"
        raise DescribeError(
            f"the loss of a micro-batch is a {type(found).__name__}: accepted is {_ACCEPTED}"
            f"{hint if isinstance(found, int | float) else ''}"
        )
    if found.numel() != 1:
        raise DescribeError(
            f"the loss of a micro-batch has shape {tuple(found.shape)} and must be one number: return its mean()"
        )
    if found.is_meta and not _any_on_meta(outputs):
        raise _not_at_hand(loss)
    if alone:
        _check_one_loss(returned)
    return found


def _wrong_classes(error: Exception, scores: Any, targets: Any) -> DataError:
    shapes = [
        f"{name} have shape {tuple(each.shape)} and type {str(each.dtype).removeprefix('torch.')}"
        for name, each in (("outputs", scores), ("targets", targets))
        if isinstance(each, Tensor)
    ]
    known = isinstance(scores, Tensor) and scores.ndim > 1
    classes = f" from 0 to {scores.shape[1] - 1}" if known else ""
    return DataError(
        f"the loss does not take the targets ({str(error).splitlines()[0]}): {', '.join(shapes)}; classes are int64, "
        f"whole numbers{classes}, and probabilities are floating-point, of the outputs' shape"
    )


def check_loss(loss: Callable[[Any, Any], Any]) -> None:
    """Raise :class:`DescribeError` if the loss has trainable parameters, because only the model's parameters are
    trained.
    """
    inner = loss.func if isinstance(loss, partial) else loss
    named = inner.named_parameters() if isinstance(inner, nn.Module) else ()
    trained = [name for name, parameter in named if parameter.requires_grad]
    if trained:
        raise DescribeError(
            f"loss={type(inner).__name__}: its parameter {trained[0]} would not be trained, only the model's are: "
            "make it a layer of the model, whose outputs the loss takes, or call loss.requires_grad_(False)"
        )


def scores_of(outputs: Any) -> Any:
    """Return the ``logits`` among a model's outputs, or the outputs themselves if they have none."""
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    return getattr(outputs, "logits", outputs)


def _first(found: Any) -> Any:
    """Return the loss tensor in ``found``, the return value of a loss: the entry ``loss`` of a dict, the first member
    of a tuple or list, the attribute ``loss`` of a model output, or ``found`` itself."""
    if isinstance(found, Mapping) and "loss" in found:
        return found["loss"]
    if isinstance(found, tuple | list) and found:
        return found[0]
    return found if isinstance(found, Tensor) else getattr(found, "loss", found)


def _check_one_loss(returned: Any) -> None:
    """Raise :class:`DescribeError` if ``returned`` is a tuple of several losses that would be minimised separately.

    The first member of the tuple is the loss. Other members are accepted if they are parts of the first or are computed
    from it.
    """
    first, *others = returned if isinstance(returned, tuple | list) else (returned,)
    for other in others:
        if not isinstance(other, Tensor) or other.numel() != 1 or other.grad_fn is None:
            continue
        if other.grad_fn not in _graph(first) and first.grad_fn not in _graph(other):
            raise DescribeError(
                "the loss returns a tuple of several losses, and only the first would be trained: return their sum, or "
                "other.detach() for a number that is only reported; losses that are minimised in turns, each by an "
                "optimizer of its own, such as a GAN's, are not supported"
            )


def _graph(tensor: Tensor) -> set[Any]:
    """Return the nodes of the autograd graph that computed ``tensor``."""
    found: set[Any] = set()
    ahead: list[Any] = [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead.extend(following for following, _ in node.next_functions)
    return found


def _names_on_meta(loss: Any) -> list[str]:
    """Return the names of the parameters and buffers on the meta device that the loss can use: those of the loss if it
    is a module, or of the module of which the loss is a method."""
    module = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)
    if not isinstance(module, nn.Module):
        return []
    held = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in held if tensor.is_meta]


def _any_on_meta(outputs: Any) -> bool:
    several = outputs.values() if isinstance(outputs, Mapping) else outputs
    held = several if isinstance(outputs, Mapping | tuple | list) else [outputs]
    return any(isinstance(each, Tensor) and each.is_meta for each in held)


def _not_at_hand(loss: Any) -> DescribeError:
    names = _names_on_meta(loss)
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    owner = type(loss if isinstance(loss, nn.Module) else loss.__self__).__name__
    return DescribeError(
        f"the loss of {owner} uses a parameter or buffer of the model ({shown}), which have values only on their "
        "stages: let forward return it beside the scores, and take it from outputs"
    )

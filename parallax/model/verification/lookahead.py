"""Check that a model's loss does not depend on the padding of its rows.

Rows of conversations, lines and documents are padded at their end. Only models of the transformers library get a mask
of the padding. Without a mask, results are correct if each output depends only on its own token and earlier tokens.
Then the loss of a row stays the same if all tokens after its last counted target are replaced. The check replaces these
tokens. The loss changes with attention that is not causal, with a mean over the sequence, and with layers that use the
whole window.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from parallax.errors import HangError
from parallax.model.block import tensors_in, transform
from parallax.model.counting import Counting
from parallax.model.verification.differences import first_difference, tolerance
from parallax.model.verification.draws import WithoutDraws
from parallax.model.verification.runs import BlocksInOrder, Loss, SampleRows

logger = logging.getLogger("parallax")

_IGNORED = -100


def find_lookahead(blocks: BlocksInOrder, loss: Loss, rows: SampleRows) -> str:
    """Return a text on how the loss of a padded row depends on its padding; '' if it does not.

    The result is also '' if nothing can be checked: ``rows`` are not token ids (rows, sequence), or no row is padded.
    """
    targets = rows.targets(0, len(rows))
    row, end = _most_padded(targets)
    if row is None:
        return ""
    given, wanted = rows.inputs(row, row + 1), rows.targets(row, row + 1)
    if [each.shape for each in tensors_in(given)] != [wanted.shape]:
        return ""
    other = transform(given, lambda ids: _replaced(ids, end) if isinstance(ids, Tensor) else ids)
    blocks.train(False)
    try:
        with torch.no_grad(), WithoutDraws():
            values = [_loss_of(blocks, loss, each, wanted) for each in (given, other)]
    except HangError:
        raise
    except Exception as error:  # the model's code may raise anything on one row
        logger.debug("the padding of rows was not checked: %s", error)
        return ""
    alone, changed = (float(each) for each in values)
    counts = f"of a row whose targets end after {end} of {wanted.shape[1]} tokens"
    if not math.isfinite(alone):
        return f"the loss {counts} is {alone}"
    if first_difference({"": values[0]}, {"": values[1]}, tolerance(blocks.chain.dtype)):
        return f"the loss {counts} is {alone:.6g}, and {changed:.6g} with other tokens after them"
    return ""


def _most_padded(targets: object) -> tuple[int | None, int]:
    """Return the index of the row with the fewest tokens up to its last counted target, and the number of these tokens.

    The index is None if the last counted target is at the end of every row.
    """
    if not isinstance(targets, Tensor) or targets.ndim != 2 or targets.is_floating_point():
        return None, 0
    numbers = torch.arange(1, targets.shape[1] + 1)
    ends = ((targets != _IGNORED) * numbers).amax(1)
    ends[ends == 0] = targets.shape[1]  # a row without counted targets tells nothing
    row = int(ends.argmin())
    return (row, int(ends[row])) if ends[row] < targets.shape[1] else (None, 0)


def _replaced(ids: Tensor, end: int) -> Tensor:
    """Return ``ids`` (1, sequence) with each token from ``end`` on replaced by another token of the row."""
    first = ids[0, 0]
    others = ids[ids != first]
    found = ids.clone()
    if len(others):
        found[:, end:] = torch.where(ids[:, end:] == first, others[0], first)
    return found


def _loss_of(blocks: BlocksInOrder, loss: Loss, inputs: Any, targets: Tensor) -> Tensor:
    return Counting(loss).value(blocks.forward(inputs), targets, lambda: inputs).double()

"""What is checked of a model before its first step, once for each model, loss and set of libraries on a machine."""

from __future__ import annotations

import logging
from collections.abc import Callable

from parallax.common.units import format_bytes
from parallax.machine.host import available_memory
from parallax.model.describe import Chain
from parallax.model.verification.draws import own_random_state
from parallax.model.verification.kept import recall, remember, verdict_path
from parallax.model.verification.rows import Verdict, find_coupling
from parallax.model.verification.runs import BlocksInOrder, Loss, SampleRows
from parallax.model.verification.whole import CannotRun, check_whole, has_own_forward

logger = logging.getLogger("parallax")

AUTO = "auto"
ROWS = (2, 3), (4, 6), (1,)
"""Numbers of rows to compare with; the next where the model cannot run on so few."""
_COPIES = 4  # parameters and gradients, of the model and of its chain
_MOST_OF_HOST = 0.5


def verify(
    chain: Chain,
    loss: Loss,
    batch: SampleRows,
    *,
    when: bool | str = AUTO,
    key: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Compare ``chain`` with its model's own forward on the first rows of ``batch``, and that batch with its parts.

    ``when``: ``auto`` checks what was not checked on this machine before, where it fits the host; True always; False
    never. ``key`` is what the model and its rows depend on besides their code. Raises
    :class:`~parallax.errors.DescribeError` where the chain computes something else.
    """
    if when is False:
        return Verdict()
    path = verdict_path(chain, loss, key)
    known = recall(path) if when == AUTO else None
    if known is not None:
        return known
    if when == AUTO and (reason := _too_large(chain)):
        logger.warning("the chain was not checked against the model: %s", reason)
        return Verdict()
    progress("checking the chain against the model")
    with own_random_state():
        unchecked = _check_forward(chain, loss, batch)
        found = find_coupling(BlocksInOrder(chain), loss, batch)
    if unchecked:
        logger.warning("the chain was not checked against the model: %s", unchecked)
    else:
        remember(path, found)
    return found


def _check_forward(chain: Chain, loss: Loss, batch: SampleRows) -> str:
    """Why it was not compared in full; empty: it was, and it is right."""
    if not has_own_forward(chain):
        return ""  # its blocks are all that there is
    why = ""
    for counts in ROWS:
        fitting = [count for count in counts if count <= len(batch)]
        if not fitting:
            continue
        try:
            return check_whole(chain, loss, batch, fitting)
        except CannotRun as error:
            why = why or f"on {fitting[0]} row(s) its own forward raises {error}"
    return why


def _too_large(chain: Chain) -> str:
    parameters = sum(p.numel() for p in chain.model.parameters()) * chain.dtype.itemsize
    needed, available = _COPIES * parameters, int(_MOST_OF_HOST * available_memory())
    if needed <= available:
        return ""
    return (
        f"both with their gradients take {format_bytes(needed)}, and half of the host's free memory is "
        f"{format_bytes(available)}; model.verify=true checks it all the same"
    )

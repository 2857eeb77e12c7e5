"""A request to end that comes while tensors go to a disk or come from it: served after what is in progress."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from parallax.runtime.checkpoint import checkpoint_name, list_checkpoints
from tests.faults.commands import (
    check_same_weights,
    one_line,
    prepared,
    running,
    temporary,
)
from tests.faults.killing import kill_at
from tests.faults.test_left_over import SWAPPING
from tests.faults.test_swap_disk import offloading

# Of the first rank: what the last stage offloads it may want back before it has gone.
REQUESTS = ((0, 1, "swap_out"), (0, 3, "swap_in"), (1, 5, "write"))
STEPS = 9


@pytest.mark.faults
@pytest.mark.parametrize("behind", [False, True], ids=["waited_for", "behind"])
def test_a_request_in_the_middle_of_a_transfer(
    here: Path, called: Callable[..., tuple[int, str, str]], behind: bool
) -> None:
    """One rank is requested to end; both save the same step, and the resumed run has equal results."""
    settings = [*SWAPPING, f"trainer.steps={STEPS}", f"checkpoint.asynchronous={behind}"]
    whole, run = (
        prepared(
            *kill_at(*requested, how="is_requested_to_end"), *settings, name=name, plan=offloading
        )
        for name, requested in (("whole", ()), ("run", REQUESTS))
    )
    for _, step, action in REQUESTS:
        code, _, err = called("train", "--run-dir", str(run))
        assert code == 0, (action, err)
        found = re.fullmatch(
            rf"parallax: stopped by SIGTERM after step (\d+) of {STEPS}, which is saved; "
            r"`parallax train name=run` continues",
            one_line(err),
        )
        assert found, err
        ended = int(found[1])
        assert step <= ended <= step + 3, action
        last = list_checkpoints(run / "checkpoints")[-1]
        assert last.name == checkpoint_name(ended)
        assert len(list(last.glob("stage-0?.safetensors"))) == 2
        assert running(here) == []
        assert temporary() == []
    for each in (run, whole):
        code, out, err = called("train", "--run-dir", str(each))
        assert (code, err) == (0, "")
        assert ("continuing after step" in out) == (each == run)
    check_same_weights(run, whole)

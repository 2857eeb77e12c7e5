"""States of an optimizer that lie in files: read, set and forgotten while a step is under way."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallax.errors import SwapError
from parallax.machine.device import StreamCopies
from parallax.swap.optimizer.host import HostOptimizer
from parallax.swap.verify import Delays
from tests.sim.device import SIM
from tests.sim.midway import full_disk, losses_of, twins
from tests.sim.strict import StrictStore
from tests.sim.swapping import MIB, adamw, open_tier


class _Stepped(NamedTuple):
    """``mine``, which ``host`` steps, and ``plain``, which ``theirs`` does."""

    host: HostOptimizer
    store: StrictStore
    mine: nn.ModuleList
    plain: nn.ModuleList
    theirs: torch.optim.Optimizer

    def step(self) -> None:
        """One of both; that of ``host`` has only begun."""
        self.host.finish()
        for blocks in (self.mine, self.plain):
            losses_of(blocks)
        self.step_again()

    def step_again(self) -> None:
        """On the gradients that are there, at once."""
        self.host.commit()
        self.theirs.step()
        self.theirs.zero_grad(set_to_none=False)

    def states(self) -> list[dict[str, Tensor]]:
        """Of each parameter of ``mine``."""
        return [self.host.states(p) for p in self.mine.parameters()]

    def clear_gradients(self) -> None:
        """Of ``mine``, which may still be copied to the host."""
        for p in self.mine.parameters():
            if p.grad is not None:
                p.grad.zero_()
        self.host.zero_grad()

    def set_states(self, known: list[dict[str, Tensor]], theirs: dict[str, Any]) -> None:
        """Back to these, of both."""
        for p, states in zip(self.mine.parameters(), known):
            self.host.restore(p, states)
        self.theirs.load_state_dict(copy.deepcopy(theirs))

    def assert_alike(self) -> None:
        """States and weights."""
        for found, states in zip(self.states(), self.theirs.state.values()):
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(found[key], states[key].cpu(), atol=1e-6, rtol=0)
        for p, q in zip(self.mine.parameters(), self.plain.parameters()):
            torch.testing.assert_close(p, q, atol=1e-5, rtol=0)


@contextlib.contextmanager
def _states_in_files(bucket_bytes: int) -> Iterator[_Stepped]:
    mine, plain = twins(3)
    copies = StreamCopies(SIM)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store = open_tier("disk", folder, copies, Delays(most_seconds=0.01))
        stack.callback(store.close)
        optimizer, own = adamw(mine.parameters()), list(mine.parameters())
        host = HostOptimizer(optimizer, own, copies=copies, store=store, bucket_bytes=bucket_bytes)
        stack.callback(host.close)
        for p in own:
            p.register_post_accumulate_grad_hook(host.reduced)
        yield _Stepped(host, store, mine, plain, adamw(plain.parameters()))
        most = max(bucket.state_bytes for bucket in host._buckets)
        assert store.most_behind_bytes <= most, "more buckets are kept in host memory than promised"


def states_read(bucket_bytes: int) -> None:
    """While a step is under way: read, set, stepped again, and not stepped."""
    with _states_in_files(bucket_bytes) as both:
        both.step()
        both.assert_alike()
        known, theirs = both.states(), copy.deepcopy(both.theirs.state_dict())
        both.step()
        both.set_states(known, theirs)
        both.step()
        both.step_again()  # without gradients: no forward has used these
        both.assert_alike()
        both.step()
        both.host.skip()
        both.assert_alike()


def states_set_back(bucket_bytes: int) -> None:
    """While gradients are offloaded, or new weights are uploaded: the step, or everything, is dropped, and training
    continues."""
    with _states_in_files(bucket_bytes) as both:
        both.step()
        known, theirs = both.states(), copy.deepcopy(both.theirs.state_dict())
        weights = copy.deepcopy(both.plain.state_dict())
        losses_of(both.mine)
        both.host.skip()
        both.clear_gradients()
        losses_of(both.mine)
        both.host.reset()
        both.clear_gradients()
        both.set_states(known, theirs)
        both.step()
        both.host.reset()
        both.plain.load_state_dict(weights)
        with torch.no_grad():
            for p, q in zip(both.mine.parameters(), both.plain.parameters()):
                p.copy_(q)
        both.set_states(known, theirs)
        both.host.zero_grad()
        both.step()
        both.assert_alike()


def states_lost() -> None:
    """Who sets states that cannot be written learns it there, not in the next step."""
    with _states_in_files(MIB) as both:
        both.step()
        known, parameter = both.states()[0], next(both.mine.parameters())
        try:
            with full_disk():
                both.host.restore(parameter, known)
        except SwapError:
            return
        raise AssertionError("states that could not be written were taken")


SCENARIOS: dict[str, Callable[[], None]] = {
    "states read": lambda: states_read(16384),
    "states read in one bucket": lambda: states_read(MIB),
    "states set back": lambda: states_set_back(16384),
    "states set back in one bucket": lambda: states_set_back(MIB),
    "states lost": states_lost,
}

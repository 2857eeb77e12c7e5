"""In which order the blocks of a stage are used: what comes next should be on its way."""

from __future__ import annotations

_REMEMBERED = 100_000  # visits of one step; more are no step, but an evaluation that nobody ends


class PrefetchOrder:
    """Which block comes next. A step visits the blocks as the step before did; until there is one, or where this one
    differs, they are taken to run to the end of the chain and back."""

    def __init__(self) -> None:
        self._last: list[int] = []
        self._now: list[int] = []
        self._same = True

    def at(self, block: int) -> bool:
        """A block runs now; whether another one did before."""
        if self._now and self._now[-1] == block:
            return False
        if len(self._now) == _REMEMBERED:
            self._now.clear()
        at = len(self._now)
        self._same = self._same and at < len(self._last) and self._last[at] == block
        self._now.append(block)
        return True

    def restart(self) -> None:
        self._last, self._now, self._same = self._now, [], True

    def following(self, count: int, blocks: int) -> list[int]:
        """The next ``count`` of all ``blocks``, as far as anything is known of them."""
        if self._same:
            return self._last[len(self._now) : len(self._now) + count]
        at = self._now[-1]
        forward = len(self._now) < 2 or at > self._now[-2]
        found = []
        for _ in range(min(count, blocks - 1)):
            forward = at == 0 or (forward and at < blocks - 1)
            at += 1 if forward else -1
            found.append(at)
        return found

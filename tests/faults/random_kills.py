"""Kills at random moments:  ``python -m tests.faults.random_kills [--count N] [--seed N] [--round N]``

A small run of two ranks is trained in rounds. In each, again and again, one of its processes is killed (SIGKILL): a
rank, the process that ranks are forked from, or the launcher, which is then started again by hand. When a round is over
its weights must be those of an undisturbed run, bit for bit, its files must be the same, and no process may be left.
Victims and moments are of the seed and the round, so that after an error the same round can be begun again
(``--round``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from parallax.train.repeats import RESTARTS
from tests.faults.commands import (
    MODULE,
    check_same_weights,
    finish,
    fork_server,
    prepared,
    ranks,
    running,
    start,
    temporary,
    wait_for,
)
from tests.faults.killing import kill_at
from tests.leaks import names

STEPS = 60
SETTINGS = [
    *kill_at(),
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=3",
    "checkpoint.asynchronous=true",
    "trainer.max_restarts=1000000",
    "swap.tier=disk",
    "swap.minimum_bytes=1",
]
VICTIMS = {"rank": (16, 0.9), "server": (2, 4.0), "launcher": (2, 7.0)}
"""How likely each is, of twenty, and for how many seconds it may live: until some steps have been taken."""
_GIVES_UP = "the same failure came 3 times at the same step"


@dataclass
class Round:
    """One run with kills in it, in a folder of its own; ``most`` of them."""

    run: Path
    chance: random.Random
    most: int
    victims: Counter[str] = field(default_factory=Counter)
    _process: subprocess.Popen[str] | None = None

    def play(self) -> None:
        """Start, kill and resume until the run's end."""
        self._start()
        while self.victims.total() < self.most:
            (name,) = self.chance.choices([*VICTIMS], [seconds[0] for seconds in VICTIMS.values()])
            if not self._kill(name, self.chance.uniform(0, VICTIMS[name][1])):
                if self._end() == 0:
                    break
                self._start()
        while self._end() != 0:
            self._start()
        assert running(Path.cwd()) == []

    def _start(self) -> None:
        self._process = start([*MODULE, "train", "--run-dir", str(self.run)])

    def _kill(self, name: str, seconds: float) -> bool:
        """Kill it when there has been one for so long; False where the run ended before."""
        assert self._process is not None
        which, since = self.chance.random(), float("inf")
        while self._process.poll() is None:
            found = self._found(name)
            since = min(since, time.monotonic()) if found else float("inf")
            if time.monotonic() < since + seconds:
                time.sleep(0.002)
                continue
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found[int(which * len(found))].kill()
                self.victims[name] += 1
            if name == "launcher":
                self._process.communicate()
                wait_for(lambda: running(Path.cwd()) == [], "the end of what a launcher started")
                self._start()
            return True
        return False

    def _found(self, name: str) -> list[psutil.Process]:
        assert self._process is not None
        with contextlib.suppress(psutil.Error, ValueError):
            if name == "rank":
                return ranks(self._process)
            launcher = psutil.Process(self._process.pid)
            return [launcher] if name == "launcher" else [fork_server(self._process)]
        return []

    def _end(self) -> int:
        """The exit code, which is 1 only where the same came too often."""
        assert self._process is not None
        code, _, err = finish(self._process)
        assert code == 0 or (code == 1 and _GIVES_UP in err), err
        return code


def files_of(run: Path) -> set[str]:
    """What a run's folder holds, but what only a run that was killed has."""
    found = {str(path.relative_to(run)) for path in run.rglob("*")}
    return {name for name in found if name != RESTARTS}


def compare(run: Path, plain: Path) -> None:
    """Raise AssertionError where anything differs from the undisturbed run."""
    check_same_weights(run, plain)
    ours, theirs = files_of(run), files_of(plain)
    assert ours == theirs, (
        f"{run} has {ours - theirs or 'nothing'} more than {plain}, and lacks {theirs - ours}"
    )
    assert temporary() == []


def play(count: int, seed: int, say: Callable[[str], None], first: int = 0) -> Counter[str]:
    """Rounds until ``count`` processes have been killed, in the current folder; how many of which kind."""
    plain = prepared(*SETTINGS, name="plain")
    code, _, err = finish(start([*MODULE, "train", "--run-dir", str(plain)]))
    assert code == 0, err
    victims, number = Counter[str](), first
    while victims.total() < count:
        run = prepared(*SETTINGS, name=f"round-{number}")
        each = Round(run, random.Random(f"{seed}-{number}"), count - victims.total())
        each.play()
        compare(run, plain)
        victims += each.victims
        say(f"round {number}: {victims.total()} of {count} kills, {dict(victims)}")
        number += 1
    return victims


def main() -> None:
    """Play, and say how far it is."""
    parser = argparse.ArgumentParser(description="Kill processes of a run at random moments.")
    parser.add_argument("--count", type=int, default=1000, help="kills (1000)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    parser.add_argument("--round", type=int, default=0, help="the first, after an error")
    parsed = parser.parse_args()
    shared = names()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        for name in ("here", "tmp", "cache"):
            (Path(folder) / name).mkdir()
        os.chdir(Path(folder) / "here")
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        try:
            victims = play(
                parsed.count, parsed.seed, lambda text: print(text, flush=True), parsed.round
            )
        finally:
            os.chdir("/")
    left = names() - shared
    print(f"{victims.total()} kills: nothing lost; left in shared memory: {len(left)} files")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()

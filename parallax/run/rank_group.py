"""The server's connections with the ranks of one copy of a model, and the batches that these ranks compute."""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallax.errors import ParallaxError
from parallax.serve.model import ModelFailed
from parallax.serve.wire import receive, send

Named = list[tuple[str, Tensor]]
"""Outputs of a batch by name."""


class RanksLost(ParallaxError):
    """The ranks ended before they answered."""


@dataclass(eq=False)
class _Waiting:
    """A message that some ranks have not answered yet. ``answers``: the number of missing answers. ``parts``: first
    row → outputs of a part of the batch, for the parts received so far. ``step``: the step of the weights that the
    answering ranks have."""

    answers: int
    step: int = 0
    parts: dict[int, Named] = field(default_factory=dict)
    done: Future[None] = field(default_factory=Future)


@dataclass(frozen=True)
class RankLink:
    """The connection with a rank. ``reads``: whether the rank needs the tensors of a batch. ``step``: the step of the
    weights that the rank has loaded."""

    socket: socket.socket
    reads: bool
    step: int


class RankGroup:
    """The ranks of one copy of a model. ``lost`` is called once, by any thread, when a connection ends.

    ``step``           the step of the weights
    ``fetched_bytes``  the bytes of offloaded parameters that the ranks have fetched so far
    """

    def __init__(self, links: Sequence[RankLink], lost: Callable[[], None]) -> None:
        self._links, self._lost = links, lost
        self._sending, self._changed = threading.Lock(), threading.Lock()
        self._waiting, self._numbers = dict[int, _Waiting](), itertools.count()
        self.step, self.fetched_bytes, self._ended = links[0].step, 0, False
        self._selector = selectors.DefaultSelector()
        for link in links:
            self._selector.register(link.socket, selectors.EVENT_READ)

    def start(self) -> None:
        """Start the thread that receives the ranks' answers."""
        threading.Thread(target=self._read, daemon=True).start()

    def run(self, tensors: Sequence[Tensor]) -> tuple[Named, int]:
        """Return the outputs of a batch with the inputs ``tensors``, and the step of the weights that computed them.
        Raises :class:`RanksLost` if a connection ends, and :class:`ModelFailed` if the model raises an exception."""
        found = self._request({"do": "run", "rows": len(tensors[0])}, tensors)
        return joined([found.parts[first] for first in sorted(found.parts)]), found.step

    def load(self, checkpoint: Path, *, averaged: bool) -> None:
        """Load the weights of ``checkpoint``, or their averages if ``averaged``, on all ranks, after all batches that
        were sent before. Raises :class:`ModelFailed` with the reason if a rank cannot load them; then no rank has
        changed its weights. Raises :class:`RanksLost` if a connection ends."""
        message = {"do": "load", "checkpoint": str(checkpoint), "averaged": averaged}
        self._request(message)

    def end(self) -> None:
        """Ask the ranks to end after the messages that they have received."""
        with self._sending:
            for link in self._links:
                with contextlib.suppress(OSError):
                    send(link.socket, {"do": "end"})

    def _request(self, message: dict[str, Any], tensors: Sequence[Tensor] = ()) -> _Waiting:
        """Send ``message`` to all ranks, wait until all of them have answered, and return an object with their answers.
        Only ranks that read inputs get the tensors."""
        waiting = _Waiting(len(self._links))
        with self._sending:
            number = next(self._numbers)
            with self._changed:
                if self._ended:
                    raise RanksLost("the ranks have ended")
                self._waiting[number] = waiting
            try:
                for link in self._links:
                    given = tensors if link.reads else ()
                    send(link.socket, message | {"number": number}, given)
            except OSError:
                self._end()
        waiting.done.result()
        return waiting

    # ---- the thread

    def _read(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    self._received(*receive(key.fileobj))
        except (OSError, ValueError, KeyError, AttributeError):
            self._end()
        finally:
            self._selector.close()
            for link in self._links:
                link.socket.close()

    def _received(self, message: Mapping[str, Any], tensors: list[Tensor]) -> None:
        number = message["number"]
        if number not in self._waiting:  # another rank has failed in this batch
            return
        waiting, names = self._waiting[number], message.get("names", [])
        for index, first in enumerate(message.get("first", [])):
            part = tensors[index * len(names) : (index + 1) * len(names)]
            waiting.parts[first] = list(zip(names, part))
        waiting.answers -= 1
        self.fetched_bytes += message.get("fetched", 0)
        self.step = waiting.step = message["step"]
        if message["error"]:
            self._finish(number).set_exception(ModelFailed(message["error"]))
        elif not waiting.answers:
            self._finish(number).set_result(None)

    def _finish(self, number: int) -> Future[None]:
        with self._changed:
            return self._waiting.pop(number).done

    def _end(self) -> None:
        """Raise :class:`RanksLost` in all threads that wait for answers. The first call also calls ``lost``."""
        with self._changed:
            first, self._ended = not self._ended, True
            left, self._waiting = [*self._waiting.values()], {}
        for each in left:
            each.done.set_exception(RanksLost("the ranks ended before they answered"))
        if first:
            self._lost()


def joined(parts: Sequence[Named]) -> Named:
    """Return the outputs of all rows, concatenated from ``parts``: the outputs of consecutive groups of rows."""
    return [
        (same[0][0], torch.cat([tensor for _, tensor in same]) if len(same) > 1 else same[0][1])
        for same in zip(*parts)
    ]


def introduced(link: socket.socket) -> RankLink:
    """Receive the first message of the rank at the other end of ``link``, and return the connection with that rank."""
    hello, _ = receive(link)
    return RankLink(link, bool(hello["reads"]), int(hello["step"]))

"""Track the random generators of a recorded constructor.

Recorded operations run on meta tensors, where random operations do not advance a generator's state. So at each random
operation the recorder sets the generator to a new unique state, a mark, and stores which operation the mark follows. At
the next random operation the generator still has the latest mark, unless the constructor has seeded the generator or
restored an earlier state.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from parallax.common.seeds import block_seed
from parallax.model.construction.log import Drawn, OwnState, SeededState, StateAfter, Unrecordable
from parallax.model.private import without_function_modes, without_operator_modes


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which the CPU generators of torch, numpy and Python start from ``seed``.

    On exit, their states are restored.
    """
    pythons, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    torchs = torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)  # noqa: NPY002
        torch.default_generator.set_state(torchs)


class Generators:
    """Tracks the random generators of one constructor. ``seed`` seeds the generators of Python and numpy."""

    def __init__(self, seed: int) -> None:
        self._seed, self._marks = seed, 0
        self._meanings: dict[bytes, Drawn] = {}
        self._before: dict[torch.Generator, torch.Tensor] = {}

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """A context in which the constructor runs. On exit, the states of all random generators are restored.

        On entry, the generators are seeded, and torch's default generator is set to a first mark: a unique state by
        which :meth:`next` recognizes that the constructor has neither drawn nor seeded.
        """
        with seeded(self._seed):
            self._mark(torch.default_generator, OwnState(0))
            try:
                yield
            finally:
                for generator, state in self._before.items():
                    generator.set_state(state)

    def next(self, generator: torch.Generator | None, place: int) -> Drawn:
        """Return the random state from which the logged operation with index ``place`` draws.

        The generator is then set to a new unique state. ``generator``: the generator that the operation uses; None:
        torch's default generator. Raises :class:`Unrecordable` if it is not a CPU generator.
        """
        generator = torch.default_generator if generator is None else generator
        if generator.device.type != "cpu":
            raise Unrecordable(f"random numbers of a generator on {generator.device}")
        state = _state(generator)
        if generator is not torch.default_generator:
            self._before.setdefault(generator, state)
        drawn = self._meanings.get(_key(state)) or SeededState(state)
        self._mark(
            generator,
            OwnState(drawn.place + 1) if isinstance(drawn, OwnState) else StateAfter(place),
        )
        return drawn

    def _mark(self, generator: torch.Generator, meaning: Drawn) -> None:
        self._marks += 1
        generator.manual_seed(block_seed(self._seed, -self._marks))
        self._meanings[_key(_state(generator))] = meaning


def _key(state: torch.Tensor) -> bytes:
    with without_operator_modes(), without_function_modes():
        return state.numpy().tobytes()


def _state(generator: torch.Generator) -> torch.Tensor:
    with without_operator_modes(), without_function_modes():
        return generator.get_state()

"""Whether computing repeats: a micro-batch is computed twice, and by replicas beside each other; bits are compared.

Memory and arithmetic units go wrong now and then without a word, and a wrong gradient is in all weights a step later.
Three questions find what is wrong now::

    the same weights?       every replica of a stage has the same parameters, since all take the same steps
    the same forwards?      replicas on one host, given the same rows, put the same out of every block
    the same again?         one micro-batch, computed twice: outputs, gradients of outputs, gradients of parameters

What differs first, in the order in which data goes through the model, and gradients back, is the cause. Where a third
and a fourth time differ, or agree with neither, the path is none that repeats, and nothing can be said.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallax.errors import printable
from parallax.model.block import tensors_in
from parallax.runtime.batch import Rows
from parallax.runtime.checkpoint.checksums import checksum
from parallax.runtime.failure.report import name as name_of
from parallax.runtime.health.part_runs import PartRuns, RepeatedRows

_OUTPUT, _GRADIENT, _PARAMETER = range(3)  # in the order in which they are computed
Place = tuple[int, int, str]
"""Which of these, where in that order, and of what."""


def digest(tensor: Tensor) -> int:
    """Of the bits of a tensor: it differs after any one that has flipped."""
    plain = tensor.detach()
    if plain.is_nested:
        jagged = plain.layout is torch.jagged
        plain = (
            plain.values() if jagged else torch.cat([part.reshape(-1) for part in plain.unbind()])
        )
    return checksum(plain.contiguous().cpu())


@dataclass(slots=True)
class Digests:
    """What one run on this rank has computed, by place."""

    found: dict[Place, list[int]] = field(default_factory=dict)

    def add(self, place: Place, tensor: Tensor) -> None:
        """One more there."""
        self.found.setdefault(place, []).append(digest(tensor))

    def differences(self, other: Digests) -> list[Place]:
        """Where two runs differ, the first first."""
        places = self.found.keys() | other.found.keys()
        return sorted(p for p in places if self.found.get(p) != other.found.get(p))


class Recheck:
    """Asks the three questions of one rank's stage, together with all ranks. Nothing of it stays: a run with it trains
    as one without, bit by bit."""

    def __init__(self, parts: PartRuns) -> None:
        self._parts, self._mesh, self._plan = parts, parts.mesh, parts.plan
        stages = [self._plan.stages[stage] for stage in self._mesh.stages]
        self._blocks = [index for stage in stages for index in range(stage.start, stage.stop)]

    def check(self, batch: Rows, step: int) -> str:
        """What is wrong, in words, the same on all ranks; empty where nothing is."""
        return self._same_weights() or self._same_forwards(batch, step) or self._again(batch, step)

    # ---- the three questions

    def _same_weights(self) -> str:
        """Compare the parameters of replicas."""
        self._parts.settle()
        mine = {
            name: digest(value)
            for name, tensor, value in self._parts.stage.values()
            if self._mesh.replica_count > 1 and isinstance(tensor, nn.Parameter)
        }
        return self._compare(mine, "parameter {} differs from that of")

    def _same_forwards(self, batch: Rows, step: int) -> str:
        """Give replicas the same rows, without dropout."""
        most = max(stage.replicas for stage in self._plan.stages)
        low, high = self._part(batch, step)
        rows = (high - low) // most
        if most == 1 or not rows or not self._parts.can_repeat(batch):
            return ""
        part = RepeatedRows(batch, low, low + rows * most, low, low + rows)
        digests = Digests()
        with self._outputs(digests):
            self._parts.forward(part, low)
        even = most % self._mesh.replica_count == 0
        mine = {
            f"{index:06d}": hash(tuple(digests.found[_OUTPUT, index, ""]))
            for index in self._blocks
            if even and (_OUTPUT, index, "") in digests.found
        }
        return self._compare(mine, "block {} puts out other values, for the same rows, than")

    def _again(self, batch: Rows, step: int) -> str:
        """Compute a micro-batch twice."""
        first, second = self._run(batch, step), self._run(batch, step)
        found = first.differences(second)
        if not self._anywhere(found):
            return ""
        third, fourth = self._run(batch, step), self._run(batch, step)
        if self._anywhere(third.differences(fourth)):
            return ""  # every run gives something else: the path does not repeat
        if self._anywhere(third.differences(first)) and self._anywhere(third.differences(second)):
            return ""  # neither of the first two was the usual one
        answers = self._mesh.gather_objects(found[0] if found else None)
        (kind, order, name), rank = min((a, rank) for rank, a in enumerate(answers) if a)
        who = name_of(rank, self._plan.locate(rank))
        if kind == _OUTPUT:
            what = f"block {order} put out other values the second time"
        elif kind == _GRADIENT:
            what = f"the gradient that came back to block {-order}'s output was another the second time"
        else:
            what = f"the gradient of {printable(name)} was another the second time"
        return f"{who}: {what}, computed from the same rows and weights"

    # ---- parts of these

    def _part(self, batch: Rows, step: int) -> tuple[int, int]:
        parts = self._parts.parts(batch)
        return parts[step % len(parts)]

    def _run(self, batch: Rows, step: int) -> Digests:
        """Forward and backward of one micro-batch."""
        low, high = self._part(batch, step)
        digests = Digests()

        def look() -> None:
            stage = self._parts.stage
            for name, tensor in stage.named_tensors().items():
                if (gradient := stage.gradient(tensor)) is not None:
                    digests.add((_PARAMETER, -self._mesh.stage, name), gradient)

        with self._outputs(digests):
            self._parts.run(RepeatedRows(batch, low, high, low, high), low, look)
        return digests

    @contextlib.contextmanager
    def _outputs(self, digests: Digests) -> Iterator[None]:
        """Take note of what each block puts out, and of the gradients that come back to that."""

        def note(index: int, block: nn.Module, given: Any, output: Any) -> None:
            del block, given
            for tensor in tensors_in(output):
                digests.add((_OUTPUT, index, ""), tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(digests.add, (_GRADIENT, -index, "")))

        hooks = [
            block.register_forward_hook(partial(note, index))
            for index, block in zip(self._blocks, self._parts.stage.blocks)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _anywhere(self, differences: Sequence[Place]) -> bool:
        mine = torch.tensor([float(bool(differences))])
        return bool(self._mesh.sum(mine).item())

    def _compare(self, mine: Mapping[str, int], what: str) -> str:
        """Compare what replicas on the same host have; the first of the names in which one differs from most."""
        answers: list[Mapping[str, int]] = self._mesh.gather_objects(mine)
        hosts = self._mesh.nodes.hosts
        found: list[tuple[int, str, int]] = []
        groups: dict[tuple[int, str], list[int]] = {}
        for rank in range(self._plan.world_size):
            groups.setdefault((self._plan.locate(rank)[0], hosts[rank]), []).append(rank)
        for (stage, _), ranks in groups.items():
            for name in answers[ranks[0]]:
                values = Counter(answers[rank].get(name) for rank in ranks)
                usual, _ = values.most_common(1)[0]
                found += [(stage, name, r) for r in ranks if answers[r].get(name) != usual]
        if not found:
            return ""
        stage, name, rank = min(found)
        others = [r for r in groups[stage, hosts[rank]] if r != rank]
        one_of_two = "; which of the two is right, nobody knows" if len(others) == 1 else ""
        who = name_of(rank, self._plan.locate(rank))
        words = what.format(printable(name.lstrip("0") or "0" if name.isdecimal() else name))
        return f"{who}: {words} rank {others[0]}{one_of_two}"

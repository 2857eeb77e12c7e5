"""What is trained, how large and how often; chosen for a device and its host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.models import GPTTask, ResNetTask

GIB = 2**30
STATE_BYTES = 16  # of each parameter: bf16 weight and gradient, fp32 weight and AdamW's two
CONTEXT_BYTES = 700 * 2**20  # of a process on a CUDA device
IMAGE_BYTES = 110 * 2**20  # that ResNet-152 saves of one
BARS = ("plain", "offload 50%", "save_on_cpu", "checkpoint", "fsdp")
CAPS = {"offload 75%": 0.75, "offload 25%": 0.25, "offload 50% eager": 0.5}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, and how often. ``host_bytes``: what all that is pinned and stepped on the host may take."""

    device: str
    host_bytes: int
    gpt: GPTTask
    gpt_rows: int
    caps: GPTTask
    caps_rows: int
    host: GPTTask
    host_rows: int
    plans: GPTTask
    plans_rows: int
    resnet: ResNetTask
    resnet_rows: int
    states: GPTTask
    states_rows: int
    turns: int = 7
    steps: int = 2
    warm_seconds: float = 0.3
    minimum_bytes: int = 65536
    batch_cap_bytes: int = 3 * GIB  # where ResNet's activations were not measured

    @property
    def start(self) -> str:
        """How processes are made: forked ones cannot use a CUDA device that their server has touched."""
        return start_of(self.device)


def start_of(device: str) -> str:
    """``spawn`` or, where it may be, ``forkserver``, which imports only once."""
    return "spawn" if device == "cuda" else "forkserver"


def _gpt(layers: int, hidden: int, vocabulary: int = 32768) -> GPTTask:
    return GPTTask(layers=layers, hidden=hidden, heads=hidden // 128, vocabulary=vocabulary)


# A layer's saved bytes grow with its width and its work with the square of it: from about 9,000 on a link of 50 GB/s
# can carry half of the bytes while a device of 600 TFLOP/s computes them. Few such layers fit, so the widest is tried
# first.
WIDE = (_gpt(2, 12288, 8192), _gpt(4, 8192, 16384))
USUAL = (_gpt(8, 4096), _gpt(6, 4096), _gpt(4, 4096), _gpt(8, 2048), _gpt(4, 2048), _gpt(2, 1024))


def row_bytes(task: GPTTask) -> int:
    """Activations of one row, roughly: 40 bytes of every layer's outputs, and logits with their gradients."""
    return task.sequence * (40 * task.layers * task.hidden + 14 * task.vocabulary)


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes of a device, and of its host for pinned copies.

    All variants of a part are alive at once, so their weights must fit together; what they hold while they run is given
    back after each turn. What they offload goes to pinned memory, together about three times plain's activations.
    """

    device_bytes: int
    host_bytes: int

    @property
    def usable(self) -> float:
        """Of the device, less the allocators' gaps."""
        return 0.9 * self.device_bytes

    @property
    def activations(self) -> float:
        """That plain may have."""
        return min(0.25 * self.device_bytes, 0.18 * self.host_bytes)

    def beside_plain(self, task: GPTTask) -> bool:
        """Weights of all variants, gradients and activations of one; gradients are within half of plain's
        activations."""
        weights, contexts = (len(BARS) - 1) * 2 * task.parameters, len(BARS) * CONTEXT_BYTES
        held = weights + contexts + 2 * task.parameters + 1.5 * self.activations
        offloaded = 3 * self.activations + 6 * task.parameters
        few = 2 * task.parameters <= 0.4 * self.activations
        return few and held <= self.usable and offloaded <= 0.8 * self.host_bytes

    def stepped(self, task: GPTTask) -> bool:
        """Plain's states on the device beside the others' weights, and the states of two variants on the host."""
        offloaded = 2.5 * STATE_BYTES * task.parameters
        return (
            self.beside_states(task) >= 2 * row_bytes(task) and offloaded <= 0.8 * self.host_bytes
        )

    def beside_states(self, task: GPTTask) -> float:
        """What is left beside plain's states and the others' weights."""
        return self.usable - (STATE_BYTES + 4) * task.parameters - 3 * CONTEXT_BYTES

    def shared(self, task: GPTTask) -> bool:
        """Several processes of whole models at once; no more than needed to keep the device busy."""
        held = 5 * STATE_BYTES * task.parameters + 7 * CONTEXT_BYTES + 8 * row_bytes(task)
        return task.hidden <= 2048 and held <= self.usable

    def capped(self, task: GPTTask) -> bool:
        """States of plain twice, once with two bytes each, and the weights of those that keep the cap, all at once."""
        held = 34 * task.parameters + 7 * CONTEXT_BYTES + 3 * row_bytes(task)
        offloaded = 3.5 * STATE_BYTES * task.parameters + 6 * row_bytes(task)
        return held <= self.usable and offloaded <= 0.8 * self.host_bytes


def setup_for(device_bytes: int, host_bytes: int) -> Setup:
    """Sizes for a CUDA device with so much free memory and a host with so much for pinned copies."""
    limits = FreeMemory(device_bytes, host_bytes)
    activations = limits.activations
    few = (
        activations / 3
    )  # each variant of ``caps`` pins its offloaded bytes again for every limit that it tries
    gpt = _first((*WIDE, *USUAL), limits.beside_plain)
    caps = _first(USUAL, lambda task: 2 * task.parameters <= 0.22 * few)
    host = _first(USUAL, limits.stepped)
    return Setup(
        device="cuda",
        host_bytes=host_bytes,
        gpt=gpt,
        gpt_rows=_rows(activations, row_bytes(gpt), 32),
        caps=caps,
        caps_rows=_rows(few, row_bytes(caps), 32),
        host=host,
        host_rows=_rows(limits.beside_states(host) / 1.3, row_bytes(host), 16),
        plans=_first(USUAL, limits.shared),
        plans_rows=8,
        resnet=ResNetTask(),
        resnet_rows=max(8, _rows(activations, IMAGE_BYTES, 96) // 8 * 8),
        states=_first(USUAL, limits.capped),
        states_rows=2,
    )


def _first(tasks: tuple[GPTTask, ...], fits: Callable[[GPTTask], bool]) -> GPTTask:
    """The first that fits, or the smallest, which then says itself that it does not."""
    return next((task for task in tasks if fits(task)), tasks[-1])


def _rows(limits: float, each: int, most: int) -> int:
    return max(1, min(most, int(limits / each)))


def dry_setup() -> Setup:
    """Toy sizes for a CPU."""
    gpt = GPTTask(layers=2, hidden=64, heads=2, vocabulary=64, sequence=32)
    return Setup(
        device="cpu",
        host_bytes=4 * GIB,
        gpt=gpt,
        gpt_rows=4,
        caps=gpt,
        caps_rows=4,
        host=gpt,
        host_rows=2,
        plans=gpt,
        plans_rows=4,
        resnet=ResNetTask(depths=(2, 1), width=8, classes=10, image=32),
        resnet_rows=8,
        states=gpt,
        states_rows=1,
        turns=2,
        steps=1,
        warm_seconds=0.0,
        minimum_bytes=1024,
        batch_cap_bytes=400 * 2**10,
    )

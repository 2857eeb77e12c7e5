"""Are two, three and four stages of a model with repeated layers even?  ``python -m benchmarks.balance [--json]``

Models of several kinds, written by others, with so many repeated layers. Each is cut into blocks by its recorded
forward and measured, and divided into stages where the slowest is as fast as can be by these figures, as the planner
does it where each stage has a core of its own. Then the stages run in one process of one thread, forward and backward
of one micro-batch after another, and each is timed alone. ``balance`` is the slowest
stage's time over that of an even split, the mean of all: the bar is 1.2. Stages are timed by turns within each
micro-batch, so what slows the machine down slows all of them; each counts with its median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.teams import Place, plans
from parallax.model.block import can_require_grad
from parallax.model.describe import Chain, as_tuple, describe
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.runtime.batch import TensorRows

STAGES = 2, 3, 4
BAR = 1.2
VOCABULARY = 512
CLASSES = 16


def _transformers(name: str, **sizes: Any) -> nn.Module:
    import transformers

    model: nn.Module = getattr(transformers, name)(
        getattr(transformers, name).config_class(**sizes)
    )
    return model


def _decoder(name: str, layers: int, **more: Any) -> nn.Module:
    return _transformers(
        name,
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=6,
        **more,
    )


class Encoder(nn.Module):
    """torch's own layers, with an embedding and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 192)
        layer = nn.TransformerEncoderLayer(192, 6, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(192, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) → (rows, length, vocabulary)."""
        out: Tensor = self.head(self.encoder(self.embed(tokens)))
        return out


class Residual(nn.Module):
    """Two convolutions, repeated in a list of lists."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.body = nn.ModuleList(
            nn.ModuleList([nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)])
            for _ in range(layers)
        )
        self.head = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """(rows, 3, height, width) → (rows, classes)."""
        x = self.stem(images)
        for first, second in self.body:
            x = x + second(F.relu(first(x)))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def _kinds() -> dict[str, tuple[Callable[[], nn.Module], bool]]:
    """Name → factory, and whether its rows are images."""
    return {
        "Llama, 6 layers": (
            lambda: _decoder("LlamaForCausalLM", 6, num_key_value_heads=2),
            False,
        ),
        "GPT-NeoX, 7 layers": (lambda: _decoder("GPTNeoXForCausalLM", 7), False),
        "Qwen3, 12 layers": (
            lambda: _decoder("Qwen3ForCausalLM", 12, num_key_value_heads=2, head_dim=32),
            False,
        ),
        "Mixtral, 6 layers": (
            lambda: _decoder("MixtralForCausalLM", 6, num_key_value_heads=2, num_local_experts=4),
            False,
        ),
        "BERT, 8 layers": (lambda: _decoder("BertForMaskedLM", 8), False),
        "ViT, 6 layers": (
            lambda: _transformers(
                "ViTForImageClassification",
                hidden_size=192,
                intermediate_size=512,
                num_hidden_layers=6,
                num_attention_heads=6,
                image_size=32,
                patch_size=4,
                num_labels=CLASSES,
            ),
            True,
        ),
        "nn.TransformerEncoder, 5 layers": (lambda: Encoder(5), False),
        "residual convolutions, 9 layers": (lambda: Residual(9), True),
    }


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: ``rows`` of a micro-batch, ``length`` tokens each."""

    repetitions: int = 15
    rows: int = 4
    length: int = 64
    models: Sequence[str] = field(default_factory=lambda: list(_kinds()))


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A model with its batch and loss."""

    name: str
    length: int
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)

    def chain(self) -> Chain:
        """The blocks of its traced forward."""
        build, _ = _kinds()[self.name]
        return describe(build, sample=lambda rows: self.batch(rows).inputs(0, rows))

    def batch(self, rows: int) -> TensorRows:
        """Random tokens and the same as targets, or images and classes."""
        random = torch.Generator().manual_seed(1)
        if _kinds()[self.name][1]:
            images = torch.randn(rows, 3, 32, 32, generator=random)
            return TensorRows(images, torch.randint(CLASSES, (rows,), generator=random))
        tokens = torch.randint(VOCABULARY, (rows, self.length), generator=random)
        return TensorRows(tokens, tokens)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Cross-entropy of every token."""
        logits = outputs if isinstance(outputs, Tensor) else outputs["logits"]
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def cuts(costs: Sequence[float], count: int) -> list[int]:
    """Return the boundaries that divide blocks of ``costs`` into ``count`` stages with the fastest slowest stage."""
    sums = [0.0, *itertools.accumulate(costs)]
    best = {
        0: (0.0, [0])
    }  # end of the stages so far → seconds of the slowest, and where they were cut
    for stage in range(1, count + 1):
        stops = range(stage, len(sums) - count + stage)
        best = {
            stop: min(
                (max(slowest, sums[stop] - sums[start]), [*cut, stop])
                for start, (slowest, cut) in best.items()
                if start < stop
            )
            for stop in stops
        }
    return best[len(costs)][1]


def stage_seconds(
    model: Repeated, chain: Chain, bounds: Sequence[int], sizes: Sizes
) -> list[float]:
    """Forward and backward of each stage between ``bounds``: the median of its times, taken by turns."""
    device = torch.device("cpu")
    stages = [materialise(chain, *pair, device) for pair in itertools.pairwise(bounds)]
    batch = model.batch(sizes.rows)
    taken: list[list[float]] = [[] for _ in stages]
    for repetition in range(-3, sizes.repetitions):
        seconds = [0.0] * len(stages)
        inputs = chain.arguments(batch.inputs(0, sizes.rows))
        passed = []
        for number, blocks in enumerate(stages):
            entering = tuple(t.detach().requires_grad_(can_require_grad(t)) for t in inputs)
            start = time.perf_counter()
            outputs: tuple[Tensor, ...] = entering
            for block in blocks:
                outputs = as_tuple(block(*outputs))
            if number == len(stages) - 1:
                outputs = (model.loss(chain.results(outputs), batch.targets(0, sizes.rows)),)
            seconds[number] += time.perf_counter() - start
            passed.append((entering, outputs))
            inputs = outputs
        gradients: tuple[Tensor | None, ...] = (torch.ones(()),)
        for number in reversed(range(len(stages))):
            entering, outputs = passed.pop()
            pairs = [
                (o, g) for o, g in zip(outputs, gradients) if g is not None and o.requires_grad
            ]
            start = time.perf_counter()
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            seconds[number] += time.perf_counter() - start
            gradients = tuple(tensor.grad for tensor in entering)
        if repetition >= 0:
            for times, spent in zip(taken, seconds):
                times.append(spent)
    return [statistics.median(times) for times in taken]


def run(sizes: Sizes, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A line for every model."""
    found = []
    with tempfile.TemporaryDirectory(prefix="parallax-benchmark-") as cache:
        for name in sizes.models:
            model = Repeated(name=name, length=sizes.length)
            say(f"{name}: measuring its blocks")
            line: dict[str, Any] = {"model": name}
            with plans(model, sizes.rows, Place(), cache) as (costs, _):
                chain = model.chain()
                line["blocks"] = len(chain.blocks)
                for count in STAGES:
                    say(f"{name}: timing {count} stages")
                    seconds = stage_seconds(model, chain, cuts(costs, count), sizes)
                    line[str(count)] = {
                        "balance": max(seconds) * count / sum(seconds),
                        "milliseconds": [1000 * each for each in seconds],
                    }
            found.append(line)
    return found


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repetitions", type=int, default=Sizes.repetitions)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes = Sizes(repetitions=options.repetitions)
    errors = Console(stderr=True)
    with errors.status("starting") as status:
        found = run(sizes, status.update)
    worst = max(line[str(n)]["balance"] for line in found for n in STAGES)
    if options.json:
        print(json.dumps({"sizes": asdict(sizes), "models": found, "worst": worst}))
        return
    table = Table("model", "blocks", *(f"{n} stages" for n in STAGES))
    for line in found:
        shown = [f"{line[str(n)]['balance']:.3f}" for n in STAGES]
        table.add_row(line["model"], str(line["blocks"]), *shown)
    Console().print(table)
    print(f"worst {worst:.3f}, bar {BAR}")


if __name__ == "__main__":
    main()

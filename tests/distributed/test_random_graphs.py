"""Random graphs under random plans equal the plain model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parallax.model.describe import Chain, describe, parameter_names
from parallax.model.materialise import materialise
from parallax.model.precision import PrecisionConfig
from parallax.plan.plan import Directive, Plan
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from tests.distributed.pool import Pool
from tests.plans import DRAINING, make_plan

# Of these; the zoo of benchmarks/ has more, and thorough tests train all of it.
EXAMPLES, MORE = 5, 40
REPLICAS = [
    (1,),
    (3,),
    (1, 1),
    (1, 2),
    (2, 1),
    (1, 3),
    (3, 2),
    (1, 1, 1),
    (2, 1, 2),
    (1, 3, 1),
    (1, 1, 1, 1),
    (1, 2, 1, 1),
]
WIDTH, TOKENS = 4, 5  # square rows: a transpose that is lost does not show in the shape
EXACT = 1e-9
FP64 = PrecisionConfig(parameters="fp64", compute="fp64")


# ---- modules: what they return may be a view, and some change tensors in place


class Turn(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


class Spread(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1, keepdim=True)).expand(-1, WIDTH, -1)


class Split(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x).chunk(2, dim=-1)


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu_()


class Changes(nn.Linear):
    """Works in the memory of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class Matrix(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)  # a product that is not linear's


class Table(nn.Module):
    """No rows in dimension 0."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.empty(1, WIDTH, WIDTH))
        nn.init.normal_(self.values)

    def forward(self) -> Tensor:
        return self.values * 2


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "gated": lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH)),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "convolution": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "embedding": lambda: nn.Embedding(TOKENS, WIDTH),
    "matrix": lambda: Matrix(WIDTH, WIDTH, bias=False),
    "turn": lambda: Turn(WIDTH, WIDTH),
    "spread": lambda: Spread(WIDTH, WIDTH),
    "split": lambda: Split(WIDTH, WIDTH),
    "in place": lambda: InPlace(WIDTH, WIDTH),
    "changes": lambda: Changes(WIDTH, WIDTH),
    "table": Table,
}
FREE = ("join", "add", "mask", "transpose")


@dataclass(frozen=True)
class Node:
    """One step: ``module`` is the number of the graph's module of that kind, or −1 for a step without parameters."""

    operation: str
    sources: tuple[int, int]
    module: int = -1


@dataclass(frozen=True)
class Graph:
    """Value 0 is the input; each node makes one more, ``split`` two. ``outputs`` are joined in the loss, ``spare`` are
    only returned."""

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    spare: tuple[int, ...]
    frozen: frozenset[int]

    @property
    def kinds(self) -> list[str]:
        """By module."""
        found = {node.module: node.operation for node in self.nodes if node.module >= 0}
        return [found[number] for number in sorted(found)]

    def build(self) -> nn.Module:
        """The model."""
        return Model(self)

    def idle(self) -> set[int]:
        """Modules of which one use or all take no part in the loss."""
        made: list[frozenset[int]] = [frozenset()]
        for place, node in enumerate(self.nodes):
            count = {"join": 2, "add": 2, "embedding": 0, "table": 0}.get(node.operation, 1)
            before = frozenset(each for source in node.sources[:count] for each in made[source])
            made += [before | {place}] * (2 if node.operation == "split" else 1)
        used = {place for output in self.outputs for place in made[output]}
        return {
            node.module
            for place, node in enumerate(self.nodes)
            if node.module >= 0 and place not in used
        }


class Model(nn.Module):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.parts = nn.ModuleList(MODULES[kind]() for kind in graph.kinds)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in graph.outputs)
        for number in graph.frozen:
            self.parts[number].requires_grad_(False)

    def forward(self, x: Tensor, tokens: Tensor) -> dict[str, Any]:
        mask = tokens % 2
        values, halved = [x], [False]

        def whole(index: int) -> Tensor:
            return F.pad(values[index], (0, WIDTH // 2)) if halved[index] else values[index]

        for node in self.graph.nodes:
            first, second = node.sources
            made: Any
            if node.operation == "join":
                made = whole(first) + whole(second)
            elif node.operation == "add":
                made = x + whole(first)
                made.add_(whole(second))
            elif node.operation == "mask":
                made = whole(first) * mask.unsqueeze(-1)
            elif node.operation == "transpose":
                made = whole(first).transpose(1, 2)
            elif node.operation == "embedding":
                made = self.parts[node.module](tokens)
            elif node.operation == "table":
                made = self.parts[node.module]()
            elif node.operation == "changes":
                made = self.parts[node.module](whole(first) + 1)
            elif node.operation == "convolution":  # a table is no batch
                made = self.parts[node.module](x + whole(first))
            else:
                made = self.parts[node.module](whole(first))
            parts = [made[0], made[1]] if node.operation == "split" else [made]
            values += parts
            halved += [len(parts) == 2] * len(parts)
        outputs = [head(whole(output)) for head, output in zip(self.heads, self.graph.outputs)]
        return {"outputs": outputs, "spare": [values[spare] for spare in self.graph.spare]}


def loss(returned: dict[str, Any], targets: Tensor) -> Tensor:
    parts = [
        (output - targets).square().mean() / number
        for number, output in enumerate(returned["outputs"], 1)
    ]
    return torch.stack(parts).sum()


def make_batch(rows: int, dtype: torch.dtype) -> TensorRows:
    random = torch.Generator().manual_seed(rows)
    x, targets = (torch.randn(rows, WIDTH, WIDTH, generator=random, dtype=dtype) for _ in range(2))
    return TensorRows(
        {"x": x, "tokens": torch.randint(0, TOKENS, (rows, WIDTH), generator=random)}, targets
    )


# ---- cases


@dataclass(frozen=True)
class Case:
    graph: Graph
    plan: Plan
    rows: int

    def chain(self) -> Chain:
        return chain_of(self.graph)


@lru_cache(maxsize=4)
def chain_of(graph: Graph) -> Chain:
    def sample(rows: int) -> Any:
        return make_batch(rows, torch.float32).inputs(0, rows)

    return describe(graph.build, seed=3, dtype=torch.float64, sample=sample)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    nodes: list[Node] = []
    kinds: list[str] = []
    values = 1
    for _ in range(draw(st.integers(4, 10))):
        operation = draw(st.sampled_from([*MODULES, *FREE]))
        # Mostly what was made last, so that graphs are long; at times what was made long ago.
        far = [draw(st.integers(0, values - 1)), draw(st.integers(0, values - 1))]
        sources = (values - 1 if draw(st.booleans()) else far[0], far[1])
        module = -1
        if operation in MODULES:
            same = [number for number, kind in enumerate(kinds) if kind == operation]
            module = draw(st.sampled_from([*same, len(kinds)]))
            if module == len(kinds):
                kinds.append(operation)
        nodes.append(Node(operation, sources, module))
        values += 2 if operation == "split" else 1
    indices = st.integers(0, values - 1)
    outputs = tuple(draw(st.lists(indices, min_size=1, max_size=3)))
    spare = tuple(draw(st.lists(indices, max_size=1)))
    frozen = draw(st.sets(st.integers(0, max(0, len(kinds) - 1)), max_size=2))
    return Graph(tuple(nodes), outputs, spare, frozenset(frozen & set(range(len(kinds)))))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    graph, rows = draw(graphs()), draw(st.integers(1, 9))
    chain = chain_of(graph)
    blocks = len(chain.blocks)
    schedule = draw(st.sampled_from(sorted(DRAINING)))
    fitting = [each for each in REPLICAS if len(each) <= blocks]
    twice = (
        [each for each in fitting if 1 < len(each) <= blocks // 2]
        if DRAINING[schedule].allows(2)
        else []
    )
    if not twice and not DRAINING[schedule].allows(1):
        schedule = "zb-h1"
    interleave, replicas = (
        (2, draw(st.sampled_from(twice))) if twice else (1, draw(st.sampled_from(fitting)))
    )
    stages = len(replicas) * interleave
    inner = (
        st.sets(st.integers(1, blocks - 1), min_size=stages - 1, max_size=stages - 1)
        if stages > 1
        else st.none()
    )
    plan = make_plan(
        chain,
        replicas=replicas,
        schedule=schedule,
        global_batch=draw(st.sampled_from([rows, 8])),
        microbatch=draw(st.integers(1, 4)),
        swap_limit=60000,
        boundaries=sorted(draw(inner) or ()),
        interleave=interleave,
    )
    mixed = []
    for stage in plan.stages:
        count = stage.stop - stage.start
        directives = draw(st.lists(st.sampled_from(Directive), min_size=count, max_size=count))
        mixed.append(replace(stage, directives=tuple(directives)))
    return Case(
        graph, replace(plan, fingerprint=chain_of(graph).fingerprint(), stages=tuple(mixed)), rows
    )


# ---- the plain model, and the pipeline

Found = tuple[float, dict[str, Tensor]]


def plain(case: Case) -> Found:
    chain, model = case.chain(), case.graph.build().double()
    blocks = materialise(chain, 0, len(chain.blocks), torch.device("cpu"))
    states = [block.state_dict(keep_vars=True) for block in blocks]
    values = {
        name: states[i][inner]
        for name, (i, inner) in parameter_names(chain, range(len(blocks))).items()
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    batch = make_batch(case.rows, torch.float64)
    found = loss(model(**batch.inputs(0, case.rows)), batch.targets(0, case.rows))
    found.backward()
    return found.item(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def piped(case: Case) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.build(
            case.chain(),
            case.plan,
            loss=loss,
            precision=FP64,
            swap=SwapConfig(minimum_bytes=1),
            scratch=Path(folder) / "swap",
        )
        # So that the next runs on re-used state.
        engine.gradients(make_batch(case.rows % 3 + 1, torch.float64))
        total = engine.gradients(make_batch(case.rows, torch.float64))
        gradients = {name: gradient.clone() for name, gradient in engine.gradients_by_name.items()}
        engine.close()
    return total, gradients


def check(pool: Pool, case: Case) -> None:
    """The ranks' gradients are the plain model's; what only the pipeline has is zero."""
    expected_loss, expected = plain(case)
    whole = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    seen = set()
    for found, gradients in pool.run(piped, case.plan.world_size, case):
        assert abs(found - expected_loss) <= EXACT * abs(expected_loss)
        for name, gradient in gradients.items():
            seen.add(name)
            wanted = expected.get(name, torch.zeros_like(gradient))
            assert float((gradient - wanted).norm()) <= EXACT * max(
                float(wanted.norm()), 1e-3 * whole
            ), name
    assert seen >= set(expected)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(MORE, marks=pytest.mark.thorough)])
def test_random_graphs_under_random_plans_equal_the_plain_model(pool: Pool, examples: int) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),  # a smaller failure would cost a new pool for each try
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def all_of_them(case: Case) -> None:
        check(pool, case)

    all_of_them()


# ---- what the graphs are kept from

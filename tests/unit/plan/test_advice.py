"""What a refusal says to type works: typed after the settings that were refused, it takes the refusal away."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.config import compose
from parallax.errors import ConfigError, InfeasiblePlan, UserError
from parallax.plan.config import PlanConfig
from parallax.plan.search.contradiction import Question, check_question
from parallax.plan.search.search import search
from tests.unit.plan.searched import layers
from tests.unit.plan_fakes import cluster

WORD = re.compile(r"\b[a-z]+(?:\.[a-z_]+)+=(?:\[[^\]]*\]|[^\s,;()]+)")


def advised(message: str) -> list[list[str]]:
    """The remedies that a refusal names, each as overrides to type."""
    _, _, text = re.sub(r"these changes fit: ", "use ", message).partition("use ")
    found = [WORD.findall(part) for part in re.split(r", or |, ", text)]
    return [overrides for overrides in found if overrides]


def refusal(overrides: list[str], blocks: int, *, fixed: bool = False) -> str:
    """Why settings are refused before anything is measured; empty where they are not. Read here and not composed,
    which takes a hundred times as long."""
    typed = {
        key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in overrides)
    }
    try:
        check_question(
            Question(
                config=PlanConfig(
                    **{key[5:]: value for key, value in typed.items() if key.startswith("plan.")}
                ),
                blocks=blocks,
                devices=typed["cluster.devices"],
                rows=typed["trainer.global_batch"],
                microbatch=typed.get("trainer.microbatch", "auto"),
                swap=typed.get("swap.tier") != "none",
                gather_loss=typed.get("trainer.gather_loss", False),
                fixed=fixed,
            )
        )
    except UserError as error:
        return str(error)
    return ""


def _one_of(key: str, *values: object) -> st.SearchStrategy[list[str]]:
    return st.sampled_from([[], *([f"{key}={value}"] for value in values)])


SETTINGS = st.tuples(
    st.integers(1, 9).map(lambda n: [f"cluster.devices={n}"]),
    st.integers(1, 9).map(lambda n: [f"trainer.global_batch={n}"]),
    _one_of("trainer.microbatch", 1, 3, 4, 10),
    _one_of("trainer.gather_loss", "true"),
    _one_of("plan.stages", 1, 2, 3, 7),
    _one_of("plan.replicas", 1, 2, 3, "[1]", "[2,1]", "[1,1,2]"),
    _one_of("plan.schedule", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
    _one_of("plan.interleave", 1, 2, 4),
    _one_of("plan.activations", "keep", "offload"),
    _one_of("plan.optimizer", "device", "host"),
    _one_of("plan.parameters", "device", "host"),
    _one_of("plan.shard", "none", "optimizer"),
    _one_of("swap.tier", "none"),
).map(lambda parts: [word for part in parts for word in part])


@settings(max_examples=200, deadline=None)
@given(overrides=SETTINGS, blocks=st.integers(1, 9), fixed=st.booleans())
def test_advice_on_settings_that_exclude_each_other(
    overrides: list[str], blocks: int, fixed: bool
) -> None:
    """Another refusal may be behind the first; following the first advice of each ends in settings that go together,
    after no more refusals than settings were typed."""
    output, typed = list[str](), len(overrides)
    while message := refusal(overrides, blocks, fixed=fixed):
        assert message not in output, (overrides, message)
        output.append(message)
        variants = advised(message)
        assert variants, message
        for variant in variants:
            assert refusal([*overrides, *variant], blocks, fixed=fixed) != message, (
                overrides,
                variant,
            )
        overrides = [*overrides, *variants[0]]
    assert len(output) <= typed


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("config", "microbatch", "swap", "tier"),
    [
        ([], "auto", True, 10**15),
        (["plan.stages=1"], "auto", True, 10**15),
        (["plan.stages=2", "plan.activations=keep"], 4, False, 10**15),
        (["plan.stages=2", "plan.replicas=1", "plan.activations=keep"], 8, True, 10**15),
        (["plan.activations=recompute", "plan.schedule=gpipe"], 2, False, 10**15),
        (["plan.activations=offload"], 8, True, 2**20),
        (["plan.activations=offload", "plan.stages=1"], "auto", True, 3 * 2**20),
        (["plan.replicas=[1,2]"], 8, False, 10**15),
        (["plan.schedule=interleaved"], "auto", False, 10**15),
        (["plan.interleave=3"], "auto", True, 10**15),
        (["plan.stages=2", "plan.schedule=interleaved"], "auto", True, 10**15),
    ],
)
@pytest.mark.parametrize("memory", [3 * 10**6, 30 * 10**6])
def test_advice_on_plans_that_do_not_fit(
    config: list[str], microbatch: Any, swap: bool, tier: int, memory: int
) -> None:
    typed = [
        "cluster.devices=3",
        f"cluster.device_memory={memory}",
        f"cluster.disk={3 * tier}",
        "trainer.global_batch=8",
        f"trainer.microbatch={microbatch}",
        f"swap.tier={'auto' if swap else 'none'}",
        *config,
    ]

    def attempt(overrides: list[str]) -> str:
        requested = compose([*typed, *overrides])
        devices = int(requested.cluster.devices)  # type: ignore[arg-type]
        try:
            machines = cluster(
                devices,
                requested.cluster.memory_of("cpu"),  # type: ignore[union-attr, arg-type]
                tier=_bytes(requested.cluster.disk) // devices,  # type: ignore[union-attr]
            )
            rows, size = requested.trainer.global_batch, requested.trainer.microbatch
            used = check_question(
                Question(
                    config=requested.plan,
                    blocks=5,
                    devices=devices,
                    rows=rows,
                    microbatch=size,
                    swap=requested.swap.offloads,
                )
            )
            search(
                layers(5, 3),
                machines.first(used),
                requested.plan,
                global_batch=rows,
                microbatch=size,
                swap=requested.swap.offloads,
            )
        except (InfeasiblePlan, ConfigError) as error:
            return str(error)
        return ""

    followed: list[str] = []
    while message := attempt(followed):
        variants = advised(message)
        assert variants, message
        for variant in variants:
            left = attempt([*followed, *variant])
            assert left != message, (variant, message)
            assert not left or "fits" not in message, (variant, message)
        followed = [*followed, *variants[0]]


def _bytes(size: int | str) -> int:
    return size if isinstance(size, int) else int(size.removesuffix("MiB")) * 2**20

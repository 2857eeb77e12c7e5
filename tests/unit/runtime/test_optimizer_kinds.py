"""Any optimizer class: what it is, found on small tensors, and its steps in buckets against its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from parallax import ClusterConfig, TensorRows, describe, plan_model
from parallax.errors import ConfigError
from parallax.run.planning import Planned
from parallax.runtime.optim.builder import OptimizerBuilder
from parallax.runtime.optim.config import Group, OptimizerConfig, OptimizerFactory
from parallax.runtime.optim.groups import ParameterGroups, freeze
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.custom import CustomOptimizerConfig
from parallax.runtime.optim.kinds.lion import LionConfig
from parallax.runtime.optim.kinds.muon import MuonConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.swap.optimizer.averaging import AVERAGE
from parallax.swap.optimizer.delaying import PREVIOUS, VERSION

BY_ELEMENTS = [
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
REFUSED = {
    "LBFGS": "without a closure: LBFGS.step.. missing 1 required positional argument: 'closure'",
    "SparseAdam": "SparseAdam does not support dense gradients",
    "Muon": "cannot be built over this model's parameters: Muon only supports 2D parameters",
}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(10, 8),
        nn.Linear(8, 16),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.Linear(16, 10),
    )


def builder_of(config: OptimizerConfig, net: nn.Module | None = None) -> OptimizerBuilder:
    return OptimizerBuilder.of(config, net or make_net())


def names_by_settings(config: OptimizerConfig) -> list[tuple[Group, tuple[str, ...]]]:
    return [(each.settings, each.names) for each in builder_of(config).groups.summaries()]


# ---- nature


@pytest.mark.parametrize("name", BY_ELEMENTS)
def test_torch_steps_elements(name: str) -> None:
    assert builder_of(CustomOptimizerConfig(target=f"torch.optim:{name}")).nature.divides


@pytest.mark.parametrize(
    "config", [CustomOptimizerConfig(target="torch.optim:Adafactor"), MuonConfig()]
)
def test_what_uses_whole_parameters_gets_whole_ones(config: OptimizerConfig) -> None:
    assert not builder_of(config).nature.divides


@pytest.mark.parametrize(
    "config",
    [
        AdamWConfig(),
        SGDConfig(),
        MuonConfig(),
        *(CustomOptimizerConfig(target=f"torch.optim:{name}") for name in ("Adafactor", "Adagrad")),
    ],
    ids=lambda config: config.label,
)
def test_averages_are_one_more_state_of_any_optimizer(config: OptimizerConfig) -> None:
    net = make_net()
    plain = OptimizerBuilder.of(config, net)
    averaged = OptimizerBuilder.of(config, net, averages=True)
    named = dict(net.named_parameters())
    weights = sum(parameter.nbytes for parameter in named.values())
    assert averaged.nature.names() == plain.nature.names() | {AVERAGE}
    assert averaged.nature.divides is plain.nature.divides
    assert averaged.state_bytes(named) == plain.state_bytes(named) + weights
    one, other = plain.build(named), averaged.build(named)
    assert type(other).__name__ == type(one).__name__
    assert isinstance(other, type(one))


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize(
    "config",
    [AdamWConfig(), SGDConfig(), SGDConfig(momentum=0.0), LionConfig(), MuonConfig()],
    ids=lambda config: config.label,
)
def test_versions_are_further_states_of_any_optimizer(
    config: OptimizerConfig, averages: bool, corrects: bool
) -> None:
    net = make_net()
    plain = OptimizerBuilder.of(config, net, averages=averages)
    config = dataclasses.replace(config, delay_correction=corrects)
    delayed = OptimizerBuilder.of(config, net, averages=averages, delays=True)
    named = dict(net.named_parameters())
    weights = sum(parameter.nbytes for parameter in named.values())
    versions = {VERSION, PREVIOUS} if corrects else {VERSION}
    assert delayed.nature.names() == plain.nature.names() | versions
    assert delayed.nature.divides is plain.nature.divides
    assert delayed.state_bytes(named) == plain.state_bytes(named) + len(versions) * weights


@pytest.mark.parametrize("kind", [AdamWConfig, LionConfig, MuonConfig, SGDConfig])
def test_a_rate_below_zero_is_refused(kind: Callable[..., OptimizerConfig]) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lr=-1"):
        kind(lr=-1.0)


def test_every_optimizer_of_torch_is_known() -> None:
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert kinds - {"Optimizer"} == {*BY_ELEMENTS, "Adafactor", *REFUSED}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_plan_can_step_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer=torch.optim:{name}: .*{REFUSED[name]}"):
        _ = builder_of(CustomOptimizerConfig(target=f"torch.optim:{name}")).nature


class Together(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        for grad in grads:
            grad /= norm
        super().step(closure)


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute."""

    count = 0

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad *= 1 / self.count
        super().step(closure)


class CountingInGroups(torch.optim.SGD):
    """Counts its steps in its groups, as many libraries do."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                p.grad *= 1 / group["count"]
                self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
        super().step(closure)


class Noisy(torch.optim.SGD):
    """Draws noise."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad += torch.randn_like(p)
        super().step(closure)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Together, "does not step each parameter by itself"),
        (Counting, "keeps something outside of the states of its parameters"),
        (Noisy, "draws random numbers"),
    ],
)
def test_the_reason_of_a_refusal(kind: type[torch.optim.Optimizer], why: str) -> None:
    def make(groups: Sequence[Group]) -> torch.optim.Optimizer:
        return kind(groups, lr=0.1)  # type: ignore[call-arg]

    with pytest.raises(ConfigError, match=why):
        _ = builder_of(OptimizerFactory(factory=make)).nature


def test_numbers_in_groups_are_states() -> None:
    builder = builder_of(OptimizerFactory(factory=lambda g: CountingInGroups(g, lr=0.1)))
    assert builder.nature.divides


# ---- states


@pytest.mark.parametrize(
    "config",
    [
        AdamWConfig(),
        SGDConfig(),
        SGDConfig(momentum=0.0),
        MuonConfig(),
        *(
            CustomOptimizerConfig(target=f"torch.optim:{name}")
            for name in (*BY_ELEMENTS, "Adafactor")
        ),
    ],
    ids=lambda config: config.label,
)
def test_bytes_of_states_are_those_of_a_step(config: OptimizerConfig) -> None:
    net = make_net()
    named, builder = dict(net.named_parameters()), builder_of(config, net)
    optimizer = builder.build(named)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [v for p in named.values() for v in optimizer.state[p].values()]
    found = sum(value.nbytes for value in states if isinstance(value, Tensor) and value.dim() > 0)
    assert builder.state_bytes(named) == found


# ---- groups


def test_groups_of_the_usual_kinds() -> None:
    matrices = ("0.weight", "1.weight", "3.weight", "4.weight")
    (plain, names), (undecayed, others) = names_by_settings(AdamWConfig())
    assert (plain, names, undecayed) == ({}, matrices, {"weight_decay": 0.0})
    assert set(others) == {"1.bias", "2.weight", "2.bias", "3.bias", "4.bias"}
    assert ({"muon": True}, ("1.weight", "3.weight")) in names_by_settings(MuonConfig())


def test_the_first_group_that_fits_counts() -> None:
    config = AdamWConfig(
        groups=[
            {"match": "*.bias", "lr": 1.0},
            {"type": "LayerNorm", "weight_decay": 0.5},
            {"match": "{3..4}.*|0.*", "dims": 2, "betas": [0.5, 0.5]},
        ]
    )
    found = {name: settings for settings, names in names_by_settings(config) for name in names}
    assert found["2.bias"] == {"weight_decay": 0.0, "lr": 1.0}
    assert found["2.weight"] == {"weight_decay": 0.5}
    assert found["0.weight"] == found["3.weight"] == found["4.weight"] == {"betas": [0.5, 0.5]}
    assert found["1.weight"] == {}


def test_layer_decay_counts_from_the_last_layer() -> None:
    config = AdamWConfig(lr=1.0, layer_decay=0.5, groups=[{"match": "4.*", "lr": 3.0}])
    found = {n: settings["lr"] for settings, names in names_by_settings(config) for n in names}
    rates = [found[f"{index}.weight"] for index in range(5)]
    assert rates == [0.0625, 0.125, 0.25, 0.5, 3.0]


@pytest.mark.parametrize(
    ("group", "why"),
    [
        ({"match": "5.*", "lr": 1.0}, "fits no trained parameter"),
        ({"match": "*.bia", "lr": 1.0}, r"\(did you mean '\d.bias'\?\)"),
        ({"lr": 1.0}, "with at least one of match, type and dims"),
        ({"match": "*", "lrr": 1.0}, "has no lrr; accepted are .*lr"),
        ({"match": "*", "dims": "two"}, "dims=two: accepted is a number of dimensions"),
        ({"match": "*", "freeze": True, "lr": 1.0}, "trains nothing, so lr has no meaning"),
        ("*.bias", "accepted is {match: PATTERN"),
    ],
)
def test_wrong_groups_are_named(group: Group, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        _ = builder_of(AdamWConfig(groups=[group])).nature


def test_a_group_without_parameters_left_is_named() -> None:
    groups = [{"match": "*", "lr": 1.0}, {"match": "1.*", "lr": 2.0}]
    with pytest.raises(
        ConfigError, match=r"match: 1\.\*\} has no parameters left: an earlier group"
    ):
        _ = builder_of(AdamWConfig(groups=groups)).groups


def test_frozen_parameters() -> None:
    """The groups of a frozen model were refused, because none of its trained parameters fits ``freeze``."""
    net, config = make_net(), AdamWConfig(groups=[{"match": "{0..1}.*", "freeze": True}])
    with pytest.raises(ConfigError, match="requires gradients; call"):
        builder_of(config, net)
    freeze(config, net)
    frozen = {name for name, p in net.named_parameters() if not p.requires_grad}
    assert frozen == {"0.weight", "1.weight", "1.bias"}
    trained = {name for each in builder_of(config, net).groups.summaries() for name in each.names}
    assert trained == {name for name, _ in net.named_parameters()} - frozen
    other = dataclasses.replace(config, groups=[{"match": "9.*", "freeze": True}])
    with pytest.raises(ConfigError, match="fits no parameter"):
        freeze(other, net)


def test_a_group_that_freezes_needs_no_trained_parameter() -> None:
    groups = [{"match": "{0..1}.*", "freeze": True}, {"match": "*.bias", "lr": 1.0}]
    net, config = make_net(), AdamWConfig(groups=groups)
    freeze(config, net)
    found = {name for each in ParameterGroups.of(config, net).summaries() for name in each.names}
    assert found == {"2.weight", "2.bias", "3.weight", "3.bias", "4.weight", "4.bias"}


def test_a_frozen_group_of_parameters_that_require_gradients_is_refused() -> None:
    config = AdamWConfig(groups=[{"match": "1.*", "freeze": True}])
    with pytest.raises(ConfigError, match=r"1\.weight requires gradients; call requires_grad_"):
        ParameterGroups.of(config, make_net())


def test_a_model_of_frozen_parameters_is_refused() -> None:
    net, config = make_net(), AdamWConfig(groups=[{"match": "*", "freeze": True}])
    freeze(config, net)
    with pytest.raises(ConfigError, match="no parameter of the model is trained"):
        _ = OptimizerBuilder.of(config, net).nature


def test_a_tied_parameter_has_all_of_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

    config = MuonConfig(groups=[{"match": "head.*", "lr": 1.0}])
    (only,) = builder_of(config, Tied()).groups.summaries()
    assert (only.settings, only.names) == ({"lr": 1.0}, ("embed.weight",))


def test_a_plan_for_the_optimizer_of_a_function() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    chain, rows = describe(lambda: net), TensorRows(torch.randn(4, 8), torch.zeros(4).long())
    cluster = ClusterConfig(kind="cpu", devices=1, device_memory="64MiB")
    planned = plan_model(
        chain,
        nn.functional.cross_entropy,
        rows,
        cluster=cluster,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    )
    assert planned.plan.stages


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("config", [AdamWConfig(), SGDConfig(momentum=0.0)], ids=lambda c: c.label)
def test_a_plan_with_delayed_updates_counts_each_version(
    config: OptimizerConfig, corrects: bool
) -> None:
    """One more byte of states for each byte of parameters, and another for the correction."""
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 4))
    chain, rows = describe(lambda: net), TensorRows(torch.randn(4, 256), torch.zeros(4).long())
    weights = sum(parameter.nbytes for parameter in net.parameters())

    def planned(optimizer: OptimizerConfig, updates: str) -> Planned:
        cluster = ClusterConfig(kind="cpu", devices=1, device_memory="64MiB")
        loss = nn.functional.cross_entropy
        return plan_model(chain, loss, rows, cluster=cluster, optimizer=optimizer, updates=updates)

    usual = planned(config, "synchronous")
    delayed = planned(dataclasses.replace(config, delay_correction=corrects), "delayed")
    versions = 2 if corrects else 1
    assert (usual.plan.updates, delayed.plan.updates) == ("synchronous", "delayed")
    assert delayed.profile.optimizer_bytes == usual.profile.optimizer_bytes + versions
    before, after = (each.plan.prediction.stages[0].memory for each in (usual, delayed))
    assert after["optimizer"] - before.get("optimizer", 0) == versions * weights

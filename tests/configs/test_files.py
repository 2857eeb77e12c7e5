"""Every file below ``configs`` composes and comes back from text; what its options mean."""

import functools
from pathlib import Path

import pytest
import yaml

from parallax.config import RunConfig, compose, dump, load, nodes
from parallax.config import options as options_module
from parallax.errors import ConfigError
from parallax.machine.local import ClusterConfig
from parallax.model.factory.gpt import GPTConfig
from parallax.model.factory.mlp import MLPConfig
from parallax.model.precision import PrecisionConfig
from parallax.plan.analytic.catalog import CatalogClusterConfig
from parallax.plan.analytic.transformer import TransformerConfig
from parallax.plan.config import PlanConfig
from parallax.runtime.optim.kinds.adamw import AdamWConfig
from parallax.runtime.optim.kinds.sgd import SGDConfig
from parallax.train.loop import TrainerConfig
from tests.configs.refused import error_of

CONFIGS = Path(__file__).parents[2] / "configs"


FILES = sorted(path.relative_to(CONFIGS) for path in CONFIGS.glob("*/*.yaml"))


# What an option needs beside itself, because it has no meaning without.
NEEDS = {"custom": ["{group}.target=package.module:factory"]}


@functools.cache
def option(group: str, name: str) -> RunConfig:
    """The defaults with one option of a group."""
    return compose([f"{group}={name}", *(text.format(group=group) for text in NEEDS.get(name, []))])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_option_composes_and_comes_back_from_text(file: Path) -> None:
    group, name = file.parent.name, file.stem
    config = option(group, name)
    assert load(dump(config)) == config
    if group in ("model", "data") or name == "adamw":
        assert getattr(config, group).name == name
    if group == "cluster":
        assert config.cluster.name == ("local" if name == "local" else "catalog")


# An experiment may pin a default, so it is not looked at here.
@pytest.mark.parametrize(
    "file", [file for file in FILES if file.parent.name != "experiment"], ids=str
)
def test_a_file_holds_only_what_differs_from_the_dataclass(file: Path) -> None:
    held = yaml.safe_load((CONFIGS / file).read_text())
    (node,) = held.pop("defaults")
    folder, _, name = node.removeprefix("/").removesuffix("@_here_").rpartition("/")
    defaults = nodes()[folder, name]
    assert not [key for key, value in held.items() if key in defaults and defaults[key] == value]
    assert (CONFIGS / file).read_text().startswith("# "), "says what the option is for"


def test_defaults_leave_everything_to_the_planner() -> None:
    config = compose([])
    assert config.model == GPTConfig()
    assert config.trainer == TrainerConfig()
    assert (config.name, config.seed, config.plan) == ("auto", 1, PlanConfig())
    assert config.cluster == ClusterConfig(), "the budget is what is free"
    assert (config.swap.tier, config.precision.compute) == ("auto", "fp32")


def test_experiments() -> None:
    tiny = compose(["experiment=tiny"])
    assert isinstance(tiny.model, GPTConfig)
    assert (tiny.model.layers, tiny.model.hidden, tiny.model.sequence) == (2, 64, 64)
    assert tiny.trainer.steps <= 5
    assert isinstance(compose(["experiment=mlp"]).model, MLPConfig)
    assert compose(["experiment=tiny", "trainer.steps=7"]).trainer.steps == 7, (
        "the command line comes last"
    )
    assert compose(["experiment=null"]) == compose([])


def test_an_experiment_takes_another_kind_of_cluster_and_of_data() -> None:
    """A budget of CPU processes is none of a GPU, and arguments of one dataset are none of another's."""
    for name in ("frontier", "two_by_two", "wide"):
        typed = ["cluster=dgx_a100", "cluster.nodes=2"]
        planned = compose([f"experiment={name}", *typed])
        assert planned.cluster == compose(typed).cluster
        assert planned.model == compose([f"experiment={name}"]).model
    images = ["data=images", "data.path=photographs"]
    assert (
        compose(["experiment=resnet50", *images]).data
        == compose([*images, "data.validation=0"]).data
    )
    with pytest.raises(ConfigError, match=r"data\.kwargs"):
        compose(["experiment=resnet50", *images, "data.kwargs.pixels=32"])
    with pytest.raises(ConfigError, match=r"model\.adapter"):
        compose(["experiment=lora", "model=mlp"])
    own_model = compose(["experiment=lora", "model=custom", "model.target=mymodel:build"]).model
    assert own_model.adapter == compose(["experiment=lora"]).model.adapter  # type: ignore[union-attr]
    same = compose(["experiment=frontier", "cluster=local"])
    assert same == compose(["experiment=frontier"]), "of the experiment's own kind"
    own = compose(["experiment=frontier"])
    assert (
        compose(["experiment=frontier", "cluster=v100"], own).cluster
        == compose(["cluster=v100"]).cluster
    )


def test_sgd_has_none_of_the_habits_of_adamw() -> None:
    overrides = ["optimizer=sgd"]
    sgd = compose(overrides).optimizer
    assert isinstance(sgd, SGDConfig)
    assert (sgd.momentum, sgd.weight_decay, sgd.clip_norm, sgd.lr) == (0.9, 0, 0, 0.01)
    assert sgd == SGDConfig() == load(dump(compose(overrides))).optimizer
    typed = compose([*overrides, "optimizer.weight_decay=0.2", "optimizer.lr=1"]).optimizer
    assert (typed.weight_decay, typed.lr) == (0.2, 1.0)


def test_defaults_of_other_optimizers() -> None:
    adamw, lion = (compose([f"optimizer={name}"]).optimizer for name in ("adamw", "lion"))
    assert compose([]).optimizer == adamw == AdamWConfig()
    assert (adamw.betas, adamw.weight_decay, adamw.clip_norm) == ((0.9, 0.95), 0.1, 1.0)
    assert (lion.betas, lion.clip_norm) == ((0.9, 0.99), 1.0)
    assert lion.lr * lion.weight_decay == pytest.approx(adamw.lr * adamw.weight_decay, rel=0.2)


def test_option_meanings() -> None:
    assert compose(["swap=off"]).swap.tier == "none"
    assert compose(["swap=disk"]).swap.tier == "disk"
    assert compose(["swap=host"]).swap.tier == "host"
    assert compose(["plan=auto"]).plan.stages == "auto"
    assert compose(["plan=single"]).plan.stages == 1
    bf16, fp64 = compose(["precision=bf16"]).precision, compose(["precision=fp64"]).precision
    assert isinstance(bf16, PrecisionConfig)
    assert isinstance(fp64, PrecisionConfig)
    assert (bf16.parameters, bf16.compute) == ("fp32", "bf16")
    assert (fp64.parameters, fp64.compute) == ("fp64", "fp64")
    mixed = {
        name: str(compose([f"precision={name}"]).precision)
        for name in ("mixed_bf16", "mixed_fp16", "tf32")
    }
    assert mixed == {"mixed_bf16": "bf16", "mixed_fp16": "fp16", "tf32": "tf32"}


def test_a_cluster_to_plan_for_leaves_the_plan_open() -> None:
    config = compose(["cluster=dgx_a100", "cluster.nodes=2"])
    assert isinstance(config.cluster, CatalogClusterConfig)
    assert (config.cluster.nodes, config.cluster.device_memory) == (2, "auto")
    assert config.plan == PlanConfig()
    assert len(config.cluster.build().devices) == 16
    assert compose(["cluster=dgx_a100", "plan=two_stages"]).plan.stages == 2, (
        "settings on the command line take precedence"
    )
    assert compose(["cluster=dgx_a100", "plan.stages=3"]).plan.stages == 3
    assert compose(["experiment=tiny", "cluster=mixed"]).model.layers == 2  # type: ignore[union-attr]
    assert isinstance(compose(["model=transformer", "model.layers=3"]).model, TransformerConfig)


@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name == "cluster"], ids=str)
def test_every_cluster_to_plan_for_can_be_built(file: Path) -> None:
    cluster = option("cluster", file.stem).cluster
    if isinstance(cluster, CatalogClusterConfig):
        assert all(device.memory_bytes > device.reserve_bytes for device in cluster.build().devices)


def test_configs_are_found_in_a_checkout_and_in_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options_module._folder() == CONFIGS
    package = tmp_path / "site-packages" / "parallax"
    package.mkdir(parents=True)
    (package / "configs").symlink_to(CONFIGS)
    expected = compose([])
    monkeypatch.setattr(options_module, "__file__", str(package / "config" / "options.py"))
    assert options_module._folder() == package / "configs"
    assert compose([]) == expected
    (package / "configs").unlink()
    assert error_of().startswith("configs/config.yaml is neither in")


def test_an_unknown_key_in_a_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in CONFIGS.rglob("*.yaml"):
        copy = tmp_path / "configs" / path.relative_to(CONFIGS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    monkeypatch.setattr(options_module, "__file__", str(tmp_path / "config" / "options.py"))
    experiment = tmp_path / "configs" / "experiment" / "mine.yaml"
    experiment.write_text("# @package _global_\ntrainer: {stepz: 3}\n")
    assert error_of("experiment=mine").endswith("(did you mean 'steps'?)")
    experiment.write_text("# @package _global_\ntrainr: {steps: 3}\n")
    assert error_of("experiment=mine").endswith("(did you mean 'trainer'?)")
    for broken in ("a: [1", "defaults: [{override /model: gptt}]", "defaults: [nowhere]"):
        experiment.write_text(f"# @package _global_\n{broken}\n")
        assert "experiment=mine" in error_of("experiment=mine")


def counts_epochs(file: Path) -> bool:
    text = (CONFIGS / file).read_text()
    return "epochs" in text or "warmup" in text


@pytest.mark.parametrize(
    "name",
    [file.stem for file in FILES if file.parent == Path("experiment") and counts_epochs(file)],
)
def test_a_warm_up_in_epochs_ends_within_the_experiment(name: str) -> None:
    config = compose([f"experiment={name}"])
    if config.schedule.unit == "epochs":
        assert config.schedule.warmup < config.trainer.epochs

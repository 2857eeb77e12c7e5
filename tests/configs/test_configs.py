"""Every file below ``configs`` composes, every mistake is one line, and nothing is left behind."""

import dataclasses
import functools
import logging
import os
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import getbase

import parallax.config as config_module
from parallax.config import RunConfig, compose, differences, dump, fingerprint, load
from parallax.errors import ConfigError
from parallax.model.gpt import GPTConfig
from parallax.model.mlp import MLPConfig
from parallax.model.precision import PrecisionConfig
from parallax.plan.analytic.catalog import CatalogClusterConfig
from parallax.plan.analytic.transformer import TransformerConfig
from parallax.plan.config import PlanConfig
from parallax.train.loop import TrainerConfig

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(path.relative_to(CONFIGS) for path in CONFIGS.glob("*/*.yaml"))
CUSTOM = ["model=custom", "model.target=a:b"]
# What an option needs beside itself, because it has no meaning without.
NEEDS = {"custom": ["{group}.target=package.module:factory"]}


@functools.cache
def option(group: str, name: str) -> RunConfig:
    """The main job with one option of a group."""
    return compose([f"{group}={name}", *(text.format(group=group) for text in NEEDS.get(name, []))])


def error_of(*overrides: str) -> str:
    """The message of a refused command line, after the checks that hold for each of them."""
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    message = str(caught.value)
    assert message.isprintable(), "one line, no control characters"
    assert "hydra" not in message.lower() or any("hydra" in text for text in overrides)
    return message


# ---- Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_option_composes_and_comes_back_from_text(file: Path) -> None:
    group, name = file.parent.name, file.stem
    config = option(group, name)
    assert load(dump(config)) == config
    if group in ("model", "data") or name in ("adamw", "local"):
        assert getattr(config, group).name == name
    if group == "cluster":
        assert config.cluster.name == ("local" if name == "local" else "catalog")


# An experiment may pin a default, so it is not looked at here.
@pytest.mark.parametrize(
    "file", [file for file in FILES if file.parent.name != "experiment"], ids=str
)
def test_a_file_holds_only_what_differs_from_the_dataclass(file: Path) -> None:
    group = file.parent.name
    kind = type(getattr(option(group, file.stem), group))
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    held = yaml.safe_load((CONFIGS / file).read_text())
    assert not [key for key, value in held.items() if key != "defaults" and defaults[key] == value]
    assert (CONFIGS / file).read_text().startswith("# "), "says what the option is for"


def test_the_main_job() -> None:
    config = compose([])
    assert config.model == GPTConfig()
    assert config.trainer == TrainerConfig()
    assert (config.name, config.seed, config.plan.stages) == ("auto", 1, 2)
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
        "what was asked for has the last word"
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
    assert config_module._folder() == CONFIGS
    package = tmp_path / "site-packages" / "parallax"
    package.mkdir(parents=True)
    (package / "configs").symlink_to(CONFIGS)
    expected = compose([])
    monkeypatch.setattr(config_module, "__file__", str(package / "config.py"))
    assert config_module._folder() == package / "configs"
    assert compose([]) == expected
    (package / "configs").unlink()
    assert error_of().startswith("configs/config.yaml is neither in")


# ---- Overrides that are accepted -----------------------------------------------------------------


# Fmt: skip.
@pytest.mark.parametrize(
    ("overrides", "path", "expected"),
    [
        (["model=mlp", "model.layers=2"], "model.layers", 2),
        (["model.layers=2", "model=mlp"], "model.layers", 2),
        (["model=gpt", "model=mlp"], "model.name", "mlp"),
        (["+model=mlp"], "model.name", "mlp"),
        (["+trainer.steps=7"], "trainer.steps", 7),
        (["++trainer.steps=7"], "trainer.steps", 7),
        (["trainer.steps=7", "trainer.steps=8"], "trainer.steps", 8),
        (["trainer.microbatch=auto"], "trainer.microbatch", "auto"),
        (["trainer.microbatch=4"], "trainer.microbatch", 4),
        (["plan.replicas=[1,2]"], "plan.replicas", [1, 2]),
        (["plan.replicas=2"], "plan.replicas", 2),
        (["plan.replicas=auto"], "plan.replicas", "auto"),
        (["cluster.device_memory=64MiB"], "cluster.device_memory", "64MiB"),
        (["cluster.device_memory=1048576"], "cluster.device_memory", 1048576),
        (["optimizer.betas=[0.8,0.9]"], "optimizer.betas", (0.8, 0.9)),
        (["optimizer.lr=1"], "optimizer.lr", 1.0),
        (["optimizer.lr=1e-3"], "optimizer.lr", 1e-3),
        (["data.path=2024"], "data.path", "2024"),
        (["data.path='a (b), c=d'"], "data.path", "a (b), c=d"),
        (["data.path=/a:b/*.txt"], "data.path", "/a:b/*.txt"),
        (["logger.events=false"], "logger.events", False),
        (["trainer.steps=${trainer.global_batch}"], "trainer.steps", 16),
        (["trainer.steps=${oc.env:PARALLAX_TEST_STEPS}"], "trainer.steps", 9),
        (["plan.stages=${oc.env:PARALLAX_TEST_STEPS}"], "plan.stages", 9),
        ([*CUSTOM, "model.kwargs.x=1"], "model.kwargs", {"x": 1}),
        ([*CUSTOM, "+model.kwargs.x.y=[1,null]"], "model.kwargs", {"x": {"y": [1, None]}}),
        ([*CUSTOM, "model.kwargs={x:1,y:a}"], "model.kwargs", {"x": 1, "y": "a"}),
        ([*CUSTOM, "model.kwargs.name=z"], "model.kwargs", {"name": "z"}),
        ([*CUSTOM, "model.blocks=[a,b.*]"], "model.blocks", ["a", "b.*"]),
        (["data=custom", "data.target=a:b", "+data.kwargs.x=1"], "data.kwargs", {"x": 1}),
        (
            ["data=custom", "data.target=a:b", "data.kwargs.x=1", "~data.kwargs.x"],
            "data.kwargs",
            {},
        ),
    ],
    ids=str,
)
def test_accepted(
    overrides: list[str], path: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARALLAX_TEST_STEPS", "9")
    config = compose(overrides)
    group, _, key = path.partition(".")
    value = getattr(getattr(config, group), key)
    assert value == expected
    assert type(value) is type(expected)
    assert load(dump(config)) == config


# ---- Overrides that are refused ------------------------------------------------------------------

ROOTS = "groups and keys are name, seed, model, data, cluster"
GPT = "unknown key; model=gpt accepts dropout, heads, hidden, layers, name"
# Fmt: skip.
REFUSED: list[tuple[str, str, str, str]] = [
    # override, how the message begins (key and value), what it says is accepted, nearest name
    ("model.layrs=3", "model.layrs=3: ", GPT, "layers"),
    ("+model.layrs=3", "model.layrs=3: ", GPT, "layers"),
    ("++model.layrs=3", "model.layrs=3: ", GPT, "layers"),
    ("~model.layrs", "~model.layrs: ", "model holds dropout, heads", "layers"),
    ("modle.layers=3", "modle.layers=3: ", ROOTS, "model"),
    ("+modle.layers=3", "modle.layers=3: ", ROOTS, "model"),
    ("++modle.layers=3", "modle.layers=3: ", ROOTS, "model"),
    ("~modle.layers", "~modle.layers: ", ROOTS, "model"),
    ("modle=gpt", "modle=gpt: ", ROOTS, "model"),
    ("+sede=3", "sede=3: ", ROOTS, "seed"),
    ("steps=80", "steps=80: ", ROOTS, "trainer.steps"),
    ("hydra.run.dir=/x", "hydra.run.dir=/x: ", ROOTS, ""),
    ("hydra/job_logging=none", "hydra/job_logging=none: ", ROOTS, ""),
    ("+trainer.x=1", "trainer.x=1: ", "trainer accepts checkpoint_every, eval_batches", ""),
    ("model.kwargs.x=1", "model.kwargs={x: 1}: ", GPT, ""),
    ("experiment.x=1", "experiment={x: 1}: ", ROOTS, ""),
    (
        "model=gptt",
        "model=gptt: ",
        "unknown option; accepted are custom, gpt, huggingface, mlp, transformer",
        "gpt",
    ),
    (
        "cluster=dgx",
        "cluster=dgx: ",
        "unknown option; accepted are cpu, dgx_a100, dgx_h100, l4_pcie",
        "",
    ),
    (
        "cluster.name=locale",
        "cluster.name=locale: ",
        "the option sets it; accepted is cluster=OPTION",
        "local",
    ),
    (
        "cluster.nodes=2",
        "cluster.nodes=2: ",
        "unknown key; cluster=local accepts device_memory, devices",
        "",
    ),
    (
        "+model=gptt",
        "model=gptt: ",
        "unknown option; accepted are custom, gpt, huggingface, mlp",
        "gpt",
    ),
    ("model=null", "model=null: ", "accepted are custom, gpt, huggingface, mlp", ""),
    ("model=[gpt]", "model=[gpt]: ", "accepted are custom, gpt, huggingface, mlp", "gpt"),
    ("trainer={steps:3}", "trainer={steps:3}: ", "accepted are default", ""),
    ("experiment=tny", "experiment=tny: ", "unknown option; accepted are mlp, tiny", "tiny"),
    ("model/gpt=3", "model/gpt=3: ", "accepted is model=OPTION or model.KEY=VALUE", ""),
    ("model@x=gpt", "model@x=gpt: ", "accepted is model=OPTION or model.KEY=VALUE", ""),
    (
        "model.name=mpl",
        "model.name=mpl: ",
        "accepted is model=OPTION of custom, gpt, huggingface, mlp",
        "mlp",
    ),
    ("trainer.steps=abc", "trainer.steps=abc: ", "accepted is a whole number", ""),
    ("trainer.steps=3.5", "trainer.steps=3.5: ", "accepted is a whole number", ""),
    ("trainer.steps=true", "trainer.steps=true: ", "accepted is a whole number", ""),
    ("trainer.steps=null", "trainer.steps=null: ", "accepted is a whole number", ""),
    ("trainer.steps=", "trainer.steps='': ", "accepted is a whole number", ""),
    ("trainer.steps=???", "trainer.steps=???: ", "accepted is a whole number", ""),
    ("trainer.steps=[3]", "trainer.steps=[3]: ", "accepted is a whole number", ""),
    ("trainer.steps.x=3", "trainer.steps={x: 3}: ", "accepted is a whole number", ""),
    ("trainer.steps=${model}", "trainer.steps={dropout: ", "accepted is a whole number", ""),
    ("optimizer.lr=fast", "optimizer.lr=fast: ", "accepted is a finite number", ""),
    ("optimizer.lr=inf", "optimizer.lr=.inf: ", "accepted is a finite number", ""),
    ("optimizer.lr=nan", "optimizer.lr=.nan: ", "accepted is a finite number", ""),
    ("optimizer.lr=-1", "optimizer.lr=-1.0: ", "accepted are numbers above 0", ""),
    (
        "optimizer.betas=[0.9]",
        "optimizer.betas=[0.9]: ",
        "accepted is a list of 2 such as [0.9, 0.95]",
        "",
    ),
    ("optimizer.betas.5=1", "optimizer.betas.5=1: ", "accepted are whole lists such as [1,2]", ""),
    ("optimizer.betas.x=1", "optimizer.betas.x=1: ", "cannot be merged", ""),
    ("logger.events=maybe", "logger.events=maybe: ", "accepted is true or false", ""),
    ("data.path=null", "data.path=null: ", "accepted is text", ""),
    ("cluster.devices=true", "cluster.devices=true: ", "a whole number or text such as auto", ""),
    ("cluster.devices=aut", "cluster.devices=aut: ", "accepted are auto or a whole number", ""),
    (
        "cluster.device_memory=8GX",
        "cluster.device_memory=8GX: ",
        "accepted are bytes such as 8GiB",
        "",
    ),
    (
        "plan.replicas=[1,a]",
        "plan.replicas=[1, a]: ",
        "a whole number or a list, each a whole number",
        "",
    ),
    ("plan.stages=0", "plan.stages=0: ", "accepted are numbers above 0", ""),
    ("model.heads=7", "model.heads=7: ", "must divide model.hidden=320", ""),
    ("swap.tier=hots", "swap.tier=hots: ", "accepted are auto, host, disk, none", "host"),
    ("seed=-1", "seed=-1: ", "accepted are whole numbers from 0", ""),
    ("name=../x", "name=../x: ", "accepted is a folder name", ""),
    ("trainer.steps", "trainer.steps: ", "no value; accepted is trainer.steps=VALUE", ""),
    ("model", "model: ", "no value; accepted is model=OPTION of custom, gpt, huggingface, mlp", ""),
    ("train", "train: ", ROOTS, "trainer"),
    ("", "'': ", ROOTS, ""),
    ("=3", "=3: ", ROOTS, ""),
    ("trainer..steps=3", "trainer..steps=3: ", "cannot be read; accepted is ", ""),
    ("trainer[steps]=3", "trainer[steps]=3: ", "cannot be read; accepted is ", ""),
    (
        "data.path=a(b",
        "data.path=a(b: ",
        "accepted is data.path=VALUE, text with signs in quotes",
        "",
    ),
    ("plan.replicas=[1", "plan.replicas=[1: ", "cannot be read; accepted is ", ""),
    ("trainer.steps=int(abc)", "trainer.steps=int(abc): ", "cannot be read; accepted is ", ""),
    ("trainer.steps=" + "9" * 5000, "trainer.steps=99", "cannot be read; accepted is ", ""),
    ("trainer.steps=" + "[" * 3000, "trainer.steps=[[", "cannot be read; accepted is ", ""),
    (
        "trainer.steps=1,2",
        "trainer.steps=1,2: ",
        "one run takes one value; accepted is trainer.steps=",
        "",
    ),
    ("plan.replicas=1,2", "plan.replicas=1,2: ", "a list is quoted: 'plan.replicas=[1,2]'", ""),
    (
        "model=gpt,mlp",
        "model=gpt,mlp: ",
        "one run takes one value; accepted is model=OPTION of custom",
        "",
    ),
    ("trainer.steps=range(1,3)", "trainer.steps=range(1,3): ", "one run takes one value", ""),
    ("~model", "~model: ", "cannot be removed; accepted is model=OPTION", ""),
    (
        "~trainer.steps",
        "~trainer.steps: ",
        "every key is needed; accepted is a value: trainer.steps=60",
        "",
    ),
    (
        "~trainer.steps=60",
        "~trainer.steps=60: ",
        "cannot be removed; accepted is trainer.steps=VALUE",
        "",
    ),
    ("~seed", "~seed: ", "every key is needed; accepted is a value: seed=1", ""),
    ("~model.layers.x", "~model.layers.x: ", "unknown key; model.layers holds no keys", ""),
    (
        "trainer.steps=${model.layrs}",
        "trainer.steps=${model.layrs}: ",
        "are existing keys",
        "model.layers",
    ),
    (
        "trainer.steps=${oc.env:NO_SUCH}",
        "trainer.steps=${oc.env:NO_SUCH}: ",
        "'NO_SUCH' not found",
        "",
    ),
    ("trainer.steps=${trainer.steps}", "trainer.steps=${trainer.steps}: ", "Recursive", ""),
    (
        "trainer.steps=${nope:3}",
        "trainer.steps=${nope:3}: ",
        "Unsupported interpolation type nope",
        "",
    ),
    (
        'data.path="${"',
        'data.path="${": ',
        "accepted are whole lists such as [1,2], and ${group.key}",
        "",
    ),
    ('trainer.steps="\x1b[31m\n"', r'trainer.steps="\e[31m\n": ', "accepted is a whole number", ""),
    (
        'swap.tier="\x1b[31m\n"',
        r"swap.tier=\x1b[31m\n: ",
        "accepted are auto, host, disk, none",
        "",
    ),
    ('name="a\nb"', r"name=a\nb: ", "accepted is a folder name", ""),
    ("model\x1b.layers=3", r"model\x1b.layers=3: ", ROOTS, "model"),
    ("model.\udc80=3", r"model.\udc80=3: ", "cannot be read; accepted is ", ""),
]


@pytest.mark.parametrize(
    ("override", "begins", "accepted", "near"), REFUSED, ids=[row[0][:40] for row in REFUSED]
)
def test_refused_in_one_line(override: str, begins: str, accepted: str, near: str) -> None:
    message = error_of(override)
    assert message.startswith(begins)
    assert accepted in message
    assert not near or message.endswith(f" (did you mean '{near}'?)")
    assert len(message) < 500


def test_an_option_does_not_accept_the_keys_of_another() -> None:
    assert error_of("model=mlp", "model.heads=2").startswith(
        "model.heads=2: unknown key; model=mlp accepts"
    )


def test_an_unknown_key_in_a_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in CONFIGS.rglob("*.yaml"):
        copy = tmp_path / "configs" / path.relative_to(CONFIGS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    monkeypatch.setattr(config_module, "__file__", str(tmp_path / "config.py"))
    experiment = tmp_path / "configs" / "experiment" / "mine.yaml"
    experiment.write_text("# @package _global_\ntrainer: {stepz: 3}\n")
    assert error_of("experiment=mine").endswith("(did you mean 'steps'?)")
    experiment.write_text("# @package _global_\ntrainr: {steps: 3}\n")
    assert error_of("experiment=mine").endswith("(did you mean 'trainer'?)")
    for broken in ("a: [1", "defaults: [{override /model: gptt}]", "defaults: [nowhere]"):
        experiment.write_text(f"# @package _global_\n{broken}\n")
        assert "experiment=mine" in error_of("experiment=mine")


# ---- Text and back -------------------------------------------------------------------------------


def test_text_comes_back_exactly() -> None:
    odd = (
        r'{a:"${x}",b:"1e3",c:"off",d:"\x1b é",e:[1,[2.5,null,true]],f:{},g:"3",h:3,i:"\n - a: b"}'
    )
    config = compose([*CUSTOM, "optimizer.eps=1e-20", "optimizer.betas=[0.1,0.3]"])
    assert isinstance(config.optimizer.betas, tuple)
    kwargs = yaml.safe_load(odd.replace(":", ": ").replace("a: b", "a:b"))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, kwargs=kwargs))
    text = dump(config)
    assert load(text) == config
    assert dump(load(text)) == text
    assert text.isascii()
    assert fingerprint(load(text)) == fingerprint(config)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps: 60", "steps: many", "trainer.steps=many: accepted is a whole number"),
        ("  steps: 60\n", "", "trainer.steps: missing; trainer accepts checkpoint_every"),
        ("steps: 60", "stepz: 60", "trainer.stepz=60: unknown key; trainer accepts"),
        ("seed: 1", "sead: 1", "sead=1: unknown key; groups and keys are name, seed"),
        ("seed: 1", "seed: 2001-01-01", "seed=2001-01-01: accepted is a whole number"),
        (
            "name: gpt",
            "name: gptt",
            "model.name=gptt: accepted are custom, gpt, huggingface, mlp, transformer (did you mean 'gpt'?)",
        ),
        (
            "name: gpt",
            "name: [gpt]",
            "model.name=['gpt']: accepted are custom, gpt, huggingface, mlp, transformer",
        ),
        ("heads: 5", "heads: 7", "model.heads=7: must divide"),
        ("path: auto", "path: ${oc.env:HOME}", ""),
        (
            "path: auto",
            "path: !!python/name:os.system",
            "the stored configuration is not plain YAML: ",
        ),
        ("seed: 1", "seed: [1", "the stored configuration is not plain YAML: "),
        ("seed: 1", "seed: &a [*a]", "seed="),
    ],
)
def test_stored_text_is_validated_and_is_data_only(old: str, new: str, message: str) -> None:
    text = dump(compose([]))
    assert old in text
    text = text.replace(old, new, 1)
    if not message:
        assert load(text).data.path == "${oc.env:HOME}", "text of a file is never resolved"  # type: ignore[union-attr]
        return
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value).startswith(message)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "text", ["", "3", "[]", "a", "model: 3", "{model: {}}", "? [a]\n: 3", "\x00"]
)
def test_text_that_is_no_configuration(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value).isprintable()


def test_differences_and_fingerprint() -> None:
    a, b = compose([]), compose(["trainer.steps=80", "plan.replicas=[1,2]"])
    assert differences(a, a) == []
    assert differences(a, b) == ["plan.replicas: auto != [1, 2]", "trainer.steps: 60 != 80"]
    assert "model.heads: 5 != absent" in differences(a, compose(["model=mlp"]))
    assert "model.embedding: absent != 16" in differences(a, compose(["model=mlp"]))
    assert fingerprint(a) == fingerprint(compose([])) != fingerprint(b)
    assert len(fingerprint(a)) == 16
    int(fingerprint(a), 16)
    text, number = compose([*CUSTOM, "model.kwargs.x='3'"]), compose([*CUSTOM, "model.kwargs.x=3"])
    assert differences(text, number) == ["model.kwargs.x: '3' != 3"]
    assert fingerprint(text) != fingerprint(number)
    assert fingerprint(compose([*CUSTOM, "model.kwargs={a:1,b:2}"])) == fingerprint(
        compose([*CUSTOM, "model.kwargs={b:2,a:1}"])
    )


# ---- Nothing is left behind ----------------------------------------------------------------------


def composed_and_refused() -> None:
    compose(["model=mlp"])
    error_of("trainer.steps=${nope}")
    error_of("optimizer.betas.5=1")


def test_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handlers, level, environment = logging.root.handlers[:], logging.root.level, dict(os.environ)
    composed_and_refused()
    assert not GlobalHydra.instance().is_initialized()
    assert not HydraConfig.initialized()
    assert "parallax" not in ConfigStore.instance().repo
    assert (logging.root.handlers, logging.root.level) == (handlers, level)
    assert dict(os.environ) == environment
    assert list(tmp_path.iterdir()) == []


def test_inside_another_hydra_program(tmp_path: Path) -> None:
    (tmp_path / "outer.yaml").write_text("x: 3\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.2"):
        base, instance = getbase(), GlobalHydra.instance()
        composed_and_refused()
        assert getbase() == base
        assert GlobalHydra.instance() is instance
        assert hydra.compose("outer").x == 3


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        compose([]).seed = 3  # type: ignore[misc]
    assert all(field.kw_only for field in dataclasses.fields(RunConfig))

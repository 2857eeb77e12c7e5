"""What may be typed after a command: each override is taken as it is meant, each mistake is one line."""

import pytest

from parallax.config import compose, dump, load
from parallax.errors import ConfigError
from tests.configs.refused import CUSTOM, error_of


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
        (
            [*CUSTOM, "model.adapter.peft_type=LORA", "model.adapter.r=8", "~model.adapter.r"],
            "model.adapter",
            {"peft_type": "LORA"},
        ),
        (["model=huggingface", "model.config.x=1", "~model.config.x"], "model.config", {}),
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


ROOTS = "groups and keys are name, seed, task, model, data, cluster"


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
    (
        "+trainer.x=1",
        "trainer.x=1: ",
        "trainer accepts checkpoint_every, epochs, eval_batches",
        "",
    ),
    ("model.kwargs.x=1", "model.kwargs={x: 1}: ", GPT, ""),
    ("experiment.x=1", "experiment={x: 1}: ", ROOTS, ""),
    (
        "model=gptt",
        "model=gptt: ",
        "unknown option; accepted are custom, gpt, huggingface, mlp, timm, transformer",
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
    ("experiment=tny", "experiment=tny: ", "unknown option; accepted are bert, billion, ", "tiny"),
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
        "accepted is a list of 2",
        "",
    ),
    ("debug.steps.5=1", "debug.steps.5=1: ", "accepted are whole lists such as [1,2]", ""),
    ("debug.steps.x=1", "debug.steps.x=1: ", "cannot be merged", ""),
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
    (
        "swap.minimum_bytes=64KiB",
        "swap.minimum_bytes=64KiB: ",
        "accepted are auto or a whole number",
        "",
    ),
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
        "every key is needed; accepted is a value: trainer.steps=0",
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


def test_the_options_that_have_a_key_are_named() -> None:
    """The hint for ``model.target=m:f`` without ``model=custom`` was loss.target."""
    for typed, options in (
        ("model.target=m:f", "model=custom, which has it"),
        ("optimizer.target=m:C", "optimizer=custom, which has it"),
        ("data.seconds=2", "data=audio, which has it"),
        ("optimizer.momentum=0.9", "optimizer=muon or optimizer=sgd, which have it"),
    ):
        assert error_of(typed).endswith(f"; add {options}")


def test_an_argument_of_the_users_factory_is_found() -> None:
    assert error_of("model=custom", "model.depth=6").endswith(
        "(did you mean 'model.kwargs.depth'?)"
    )
    assert error_of("model=custom", "model.trget=m:f").endswith("(did you mean 'target'?)")


def test_errors_of_keys_reach_other_ranks_with_their_message() -> None:
    """Ranks under torchrun raise the first rank's error, rebuilt from its class and text."""
    with pytest.raises(ConfigError) as caught:
        compose(["trainer.stps=3"])
    assert str(type(caught.value)(str(caught.value))) == str(caught.value)


def test_a_correction_without_delay_is_refused() -> None:
    message = error_of("optimizer.delay_correction=true")
    assert message.endswith("use trainer.updates=delayed, or leave it out")
    compose(["optimizer.delay_correction=true", "trainer.updates=delayed"])

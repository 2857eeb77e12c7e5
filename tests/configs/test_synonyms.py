"""Keys of other trainers: the error names the counterpart here, and lists all wrong keys at once."""

import typing

import pytest

from parallax import cli
from parallax.config import RunConfig, compose, dump, load, synonyms
from parallax.config.options import OptionFolders
from parallax.errors import ConfigError
from tests.configs.refused import error_of

FIELD = {
    "batch_size": "trainer.global_batch",
    "per_device_train_batch_size": "trainer.microbatch",
    "gradient_accumulation_steps": "trainer.microbatch",
    "max_steps": "trainer.steps",
    "num_train_epochs": "trainer.",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "max_grad_norm": "optimizer.clip_norm",
    "weight_decay": "optimizer.weight_decay",
    "gpus": "cluster.devices",
    "world_size": "cluster.devices",
    "device": "cluster.kind",
    "fp16": "precision=mixed_fp16",
    "bf16": "precision=mixed_bf16",
    "dataset": "data.path",
    "seq_len": "model.sequence",
    "n_layer": "model.layers",
    "log_interval": "logger.print_every",
    "gradient_checkpointing": "plan.activations",
    "output_dir": "name",
    "num_workers": "data.workers",
}


@pytest.mark.parametrize("group", ["", "trainer."])
@pytest.mark.parametrize("word", FIELD)
def test_terms_of_the_field_point_to_our_keys(word: str, group: str) -> None:
    assert f"(did you mean '{FIELD[word]}" in error_of(f"{group}{word}=1")


def test_what_is_pointed_to_exists() -> None:
    groups = OptionFolders.of()[0].groups
    tree = compose(["model=gpt", "data=text"])
    for key in synonyms._SAME:
        group, sign, option = key.partition("=")
        if sign:
            assert option in groups[group], key
        elif "." not in key:
            assert key in typing.get_type_hints(RunConfig)
        elif key not in ("data.target", "data.collate", "model.pretrained"):  # of other options
            group, _, leaf = key.partition(".")
            assert hasattr(getattr(tree, group), leaf), key
    assert not synonyms._HERE.keys() & synonyms._REMARKS.keys()


@pytest.mark.parametrize("word", ["pin_memory", "tensor_parallel_size"])
def test_terms_without_a_counterpart_name_the_alternative(word: str) -> None:
    assert error_of(f"{word}=4").endswith(f"; {synonyms.remark(word)}")


def test_a_key_of_another_option_is_not_pointed_to() -> None:
    assert "model.heads" not in error_of("model=mlp", "model.n_head=4")


def test_all_wrong_keys_are_named_at_once() -> None:
    message = error_of("batch_size=8", "epochs=3", "trainer.stps=4", "modle=gpt", "optimizer.l=1")
    for each in ("batch_size=8", "epochs=3", "trainer.stps=4", "modle=gpt", "optimizer.l=1"):
        assert message.count(each) == 1
    for each in ("groups and keys are", "trainer accepts", "optimizer=adamw accepts"):
        assert message.count(each) == 1


def test_all_wrong_values_are_named_at_once() -> None:
    message = error_of("trainer.steps=many", "trainer.global_batch=x", "optimizer.lr=fast")
    for each in ("trainer.steps=many", "trainer.global_batch=x", "optimizer.lr=fast"):
        assert message.count(each) == 1


def test_all_wrong_options_are_named_at_once() -> None:
    message = error_of("model=gtp", "swap=onn", "model.target=a:b")
    assert "model=gtp: unknown option" in message
    assert "swap=onn: unknown option" in message
    assert "model.target" not in message, "which may be a key of the option that was meant"


def test_all_wrong_keys_of_a_stored_configuration_are_named_at_once() -> None:
    text = dump(compose([])).replace("  steps:", "  stps:").replace("  lr:", "  learning_rate:")
    with pytest.raises(ConfigError, match=r"learning_rate=.*stps=") as caught:
        load(text)
    assert str(caught.value).isprintable()


def test_options_that_are_settings_are_pointed_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--batch-size", "8"]) == 2
    assert "(did you mean 'trainer.global_batch'?)" in capsys.readouterr().err

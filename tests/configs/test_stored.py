"""A configuration becomes text and comes back, and two are compared."""

import copy
import dataclasses
from typing import Any

import pytest
import yaml

from parallax.config import RunConfig, compose, differences, dump, fingerprint, load
from parallax.errors import ConfigError
from tests.configs.refused import CUSTOM


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
        ("\n  steps: 0", "\n  steps: many", "trainer.steps=many: accepted is a whole number"),
        (
            "  steps: 0\n",
            "",
            "trainer.steps: missing; trainer accepts checkpoint_every",
        ),
        ("\n  steps: 0", "\n  stepz: 0", "trainer.stepz=0: unknown key; trainer accepts"),
        ("seed: 1", "sead: 1", "sead=1: unknown key; groups and keys are name, seed"),
        ("seed: 1", "seed: 2001-01-01", "seed=2001-01-01: accepted is a whole number"),
        (
            "name: gpt",
            "name: gptt",
            "model.name=gptt: accepted are custom, gpt, huggingface, mlp, timm, transformer (did you mean 'gpt'?)",
        ),
        (
            "name: gpt",
            "name: [gpt]",
            "model.name=['gpt']: accepted are custom, gpt, huggingface, mlp, timm, transformer",
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


def test_settings_of_a_later_version_get_their_defaults() -> None:
    """A file of an earlier version lacks a setting or a group; a file that is cut lacks its end."""
    config = compose(["checkpoint.keep=9"])
    whole: dict[str, Any] = yaml.safe_load(dump(config))
    groups = {key: value for key, value in whole.items() if isinstance(value, dict)}
    filled = 0
    for path in [(key,) for key in whole] + [
        (key, inner) for key in groups for inner in whole[key]
    ]:
        tree = copy.deepcopy(whole)
        del (tree if len(path) == 1 else tree[path[0]])[path[-1]]
        added: list[str] = []
        text = yaml.safe_dump(tree, sort_keys=False)
        if path in {(key,) for key in ("model", "data", "cluster", "name", "callbacks")} | {
            (key, "name") for key in groups
        }:
            continue
        read = load(text, added)
        with pytest.raises(ConfigError, match=rf"{path[-1]}: missing|^{path[0]}"):
            load(text)
        filled += 1
        assert added
        assert all(f"{line}.".startswith(".".join(path)) for line in added)
        if path[-1] not in ("checkpoint", "keep"):
            assert differences(config, read) == [], "the setting had its default before"
    assert filled > 100
    for end in range(len(whole)):
        cut = yaml.safe_dump(dict(list(whole.items())[:end]), sort_keys=False)
        with pytest.raises(ConfigError):
            load(cut, [])


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
    assert differences(a, b) == ["plan.replicas: auto != [1, 2]", "trainer.steps: 0 != 80"]
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


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        compose([]).seed = 3  # type: ignore[misc]
    assert all(field.kw_only for field in dataclasses.fields(RunConfig))


def test_interpolations_of_an_option_refer_to_the_resumed_settings() -> None:
    """The experiment sets ``trainer.microbatch: ${trainer.global_batch}``; a resume has resolved it with the default
    batch instead of the run's, so that the command of a run was refused when it was repeated."""
    typed = ["experiment=frontier", "trainer.global_batch=13"]
    first = compose(typed)
    assert first.trainer.microbatch == 13
    for again in (typed, typed[:1], typed[1:], []):
        assert compose(again, first) == first
    assert compose(["experiment=frontier", "trainer.global_batch=5"], first).trainer.microbatch == 5
    both = compose([*typed, "trainer.microbatch=1"])
    assert compose([*typed, "trainer.microbatch=1"], both) == both

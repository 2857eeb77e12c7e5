"""The keys of ``replicas``, and ``compile``."""

from __future__ import annotations

import pytest

from parallax.config import compose, dump, load
from parallax.errors import ConfigError
from parallax.runtime.replicas.config import ReplicasConfig


def test_defaults_and_options() -> None:
    assert compose([]).replicas == ReplicasConfig()
    assert not compose([]).compile
    assert compose(["replicas=powersgd", "replicas.powersgd_rank=4"]).replicas == ReplicasConfig(
        compress="powersgd", powersgd_rank=4
    )
    assert compose(["replicas=sync"]).replicas.batchnorm == "sync"
    changed = compose(["compile=true", "replicas=bf16"])
    assert changed.compile
    assert load(dump(changed)) == changed


@pytest.mark.parametrize(
    "values",
    [{"compress": "int8"}, {"powersgd_rank": 0}, {"batchnorm": "group"}],
    ids=lambda v: next(iter(v)),
)
def test_what_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        ReplicasConfig(**values)  # type: ignore[arg-type]

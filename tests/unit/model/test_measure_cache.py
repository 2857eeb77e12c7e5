"""When a profile is measured again, and when it comes from the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parallax.model.precision import PrecisionConfig
from parallax.model.profiling import cache as cache_module
from parallax.model.profiling import measure as module
from parallax.plan.profile import ModelProfile
from tests.unit.model.test_measure import Both, _fresh, chain_of, linear, profile_of

__all__ = ["_fresh"]


@pytest.mark.slow
def test_a_profile_is_measured_once_and_keyed_by_what_it_depends_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    plain = module._Bench.run
    monkeypatch.setattr(
        module._Bench, "run", lambda self, *rest: runs.append(rest[0]) or plain(self, *rest)
    )
    factory = chain_of(linear(), Both)
    first = profile_of(factory)
    assert runs == [2, 4]
    assert profile_of(factory) == first
    assert runs == [2, 4]

    def fresh(**options: Any) -> None:
        runs.clear()
        profile_of(options.pop("factory", factory), **options)
        assert runs, options

    fresh(factory=chain_of(linear(), linear()))
    fresh(rows=(2, 8))
    fresh(precision=PrecisionConfig(compute="bf16"))
    fresh(minimum_bytes=64)
    fresh(loss=F.l1_loss)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        fresh()
    finally:
        torch.set_num_threads(threads)


def test_a_damaged_cache_is_measured_again(tmp_path: Path) -> None:
    first = profile_of(chain_of(linear()))
    (path,) = tmp_path.rglob("profile-*.json")
    path.write_text(path.read_text()[:-30])
    again = profile_of(chain_of(linear()))
    assert again.blocks[0].moved == first.blocks[0].moved
    assert ModelProfile.load(path) == again


def test_a_profile_of_an_earlier_edition_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    plain = module._Bench.run
    monkeypatch.setattr(
        module._Bench, "run", lambda self, *rest: runs.append(rest[0]) or plain(self, *rest)
    )
    monkeypatch.setattr(cache_module, "CACHE_VERSION", cache_module.CACHE_VERSION - 1)
    profile_of(chain_of(linear()))
    monkeypatch.setattr(cache_module, "CACHE_VERSION", cache_module.CACHE_VERSION + 1)
    profile_of(chain_of(linear()))
    assert runs == [2, 4, 2, 4]

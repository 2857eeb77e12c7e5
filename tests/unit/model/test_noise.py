"""A profile that was measured on a busy machine is marked, and measured again; no test here reads a real clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallax.model.profiling import cache as cache_module
from parallax.model.profiling import measure as module
from parallax.model.profiling.clock import LEAST_SECONDS, NoiseMeter, disturbance
from parallax.plan.profile import NOISY, ModelProfile
from tests.unit.model.test_measure import CPU, chain_of, linear, profile_of


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "SECONDS_PER_BLOCK", 0.0)


@pytest.mark.parametrize(
    ("wall", "waited", "references", "found"),
    [
        (1.0, 0.0, [1e-3] * 9, 1.0),
        (1.8, 0.8, [1e-3] * 9, 1.8),
        (1.0, 0.0, [1e-3, 1e-3, 2e-3, 2e-3, 2e-3], 2.0),  # the cores were slower most of the time
        (1.0, 0.0, [1e-3, 1e-3, 1e-3, 1e-3, 9e-3], 1.0),  # once
        (1.0, -0.1, [], 1.0),
        (1.0, 1.0, [0.0], 1000.0),
        (LEAST_SECONDS / 2, LEAST_SECONDS / 3, [1e-3, 5e-3, 5e-3], 1.0),  # too short to tell
        (0.0, 0.0, [], 1.0),
    ],
)
def test_the_disturbance_of_what_was_timed(
    wall: float, waited: float, references: list[float], found: float
) -> None:
    assert disturbance(wall, waited, references) == pytest.approx(found)


class SteppedClock:
    """Of a thread that has a core for one second of ``share``."""

    def __init__(self, share: float) -> None:
        self.wall, self._share = 0.0, share

    def now(self) -> float:
        self.wall += 0.001
        return self.wall

    def waited_seconds(self) -> float:
        return self.wall * (1 - 1 / self._share)


@pytest.mark.parametrize("share", [1.0, 1.8])
def test_waits_for_a_core_within_parts_are_summed_up(share: float) -> None:
    clock = SteppedClock(share)
    meter = NoiseMeter(CPU, clock, wall=lambda: clock.wall)  # type: ignore[arg-type]
    assert meter.disturbance == 1.0
    for _ in range(3):
        with meter.timed_part():
            clock.wall += 0.2
        clock.wall += 5.0  # between parts
    assert meter.disturbance == pytest.approx(share)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How busy the machine is in each measurement to come."""
    found: list[float] = []
    monkeypatch.setattr(NoiseMeter, "disturbance", property(lambda self: found.pop(0)))
    return found


def kept_profile(folder: Path) -> ModelProfile:
    (path,) = folder.rglob("profile-*.json")
    return ModelProfile.load(path)


def test_a_noisy_profile_is_measured_again_and_a_quiet_one_is_kept(
    tmp_path: Path, busy: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy += [NOISY + 0.3, 1.1]
    noisy = profile_of(chain_of(linear()))
    assert noisy.noisy
    assert kept_profile(tmp_path) == noisy
    assert profile_of(chain_of(linear())) == noisy  # in this process
    monkeypatch.setattr(module, "_measured_here", set())  # in another one
    quiet = profile_of(chain_of(linear()))
    assert not quiet.noisy
    assert kept_profile(tmp_path) == quiet
    assert profile_of(chain_of(linear())) == quiet
    assert busy == []


def test_of_two_noisy_profiles_the_quieter_one_stays(tmp_path: Path, busy: list[float]) -> None:
    busy += [1.8, 2.5]
    first = profile_of(chain_of(linear()))
    assert profile_of(chain_of(linear())) == first == kept_profile(tmp_path)


def test_the_noise_is_in_the_file_and_files_without_it_are_quiet(busy: list[float]) -> None:
    busy += [1.8]
    found = profile_of(chain_of(linear()))
    assert ModelProfile.from_json(found.to_json()).disturbance == 1.8
    assert not ModelProfile.from_json(
        found.to_json().replace('"disturbance": 1.8', '"source": "measured"')
    ).noisy


def test_what_is_timed_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    plain = NoiseMeter.timed_part
    monkeypatch.setattr(NoiseMeter, "timed_part", lambda self: parts.append(1) or plain(self))
    profile_of(chain_of(linear()))
    assert len(parts) >= 4  # whole and halved, at each number of rows


def test_a_forgotten_profile_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: list[float]
) -> None:
    busy += [1.0] * 3
    runs = []
    plain = module._Bench.run
    monkeypatch.setattr(
        module._Bench, "run", lambda self, *rest: runs.append(rest[0]) or plain(self, *rest)
    )
    found, other = profile_of(chain_of(linear())), profile_of(chain_of(linear(), linear()))
    measured = len(runs)
    assert cache_module.remove_cached(replace(found, model="renamed", optimizer_bytes=1.0)) == 1
    assert cache_module.remove_cached(found) == 0
    assert profile_of(chain_of(linear(), linear())) == other
    assert len(runs) == measured
    profile_of(chain_of(linear()))
    assert len(runs) > measured
    (tmp_path / "parallax" / "profile-0.json").write_text(f'{{"fingerprint": "{found.fingerprint}"')
    assert cache_module.remove_cached(found) == 1, "a damaged file is left to whoever reads it"


def test_a_clock_tells_waits_also_where_the_system_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from parallax.model.profiling import clock

    monkeypatch.setattr(clock, "queued_seconds", lambda: 0.0)
    times = {"perf_counter": 9.0, "thread_time": 5.0}
    for name, seconds in times.items():
        monkeypatch.setattr(clock.time, name, lambda seconds=seconds: seconds)
    threads = torch.get_num_threads()
    assert clock.Clock(CPU).waited_seconds() == (4.0 if threads == 1 else 0.0)
    monkeypatch.setattr(clock, "queued_seconds", lambda: 3.0)
    assert clock.Clock(CPU).waited_seconds() == 3.0

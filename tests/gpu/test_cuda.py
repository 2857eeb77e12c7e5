"""The same logic on a CUDA device: streams and pinned memory in place of their null objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallax.machine.cuda import pin
from parallax.machine.device import StreamCopies
from parallax.model.describe import describe
from parallax.model.factory.gpt import GPT, GPTConfig
from parallax.model.precision import PrecisionConfig
from parallax.model.profiling.measure import measure
from parallax.runtime.batch import TensorRows
from parallax.runtime.engine import Engine
from parallax.swap.config import SwapConfig
from parallax.swap.stores.store import DiskStore, HostStore
from tests.distributed.pool import Pool
from tests.plans import make_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20
CONFIG = GPTConfig(layers=4, hidden=256, heads=4, sequence=128)


def batch(rows: int = 8) -> TensorRows:
    tokens = torch.randint(0, 256, (rows, 129), generator=torch.Generator().manual_seed(0))
    return TensorRows(tokens[:, :-1], tokens[:, 1:])


def losses(
    directive: str, tier: str, scratch: Path, replicas: tuple[int, ...] = (1,)
) -> list[float]:
    """Five steps on this rank's device; every rank uses the same one."""
    chain = describe(CONFIG.build)
    plan = make_plan(chain, replicas=replicas, directive=directive, tier=tier, swap_limit=16 * MIB)
    device = torch.device("cuda", 0)
    engine = Engine.build(
        chain,
        plan,
        loss=GPT.loss,
        device=device,
        swap=SwapConfig(minimum_bytes=1024),
        scratch=scratch,
    )
    found: list[Any] = [engine.step(batch()) for _ in range(5)]
    engine.close()
    if directive == "offload":
        assert all(result.swap.bytes_out > 0 for result in found)
    return [result.loss for result in found]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_offload_is_bit_identical_to_keep(tier: str, scratch: Path) -> None:
    assert losses("offload", tier, scratch) == losses("keep", tier, scratch)


def test_ranks_that_share_a_gpu_train_like_one(pool: Pool, scratch: Path) -> None:
    alone = losses("keep", "host", scratch)
    for replicas in ((1, 1), (1, 2)):
        for found in pool.run(losses, sum(replicas), "offload", "host", scratch, replicas):
            assert found == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("kind", [HostStore, DiskStore])
def test_a_storage_survives_offload_and_fetch(kind: type, scratch: Path) -> None:
    copies = StreamCopies(torch.device("cuda", 0))
    options: dict[str, Any] = {} if kind is HostStore else {"threads": 2}
    arguments = (64 * MIB, copies) if kind is HostStore else (scratch, 64 * MIB, copies)
    store = kind(*arguments, **options)
    for seed in range(20):
        source = torch.randint(0, 256, (8 * MIB,), dtype=torch.uint8, device="cuda")
        expected = source.clone()
        slot, written = store.write(source)
        written.wait()
        source.fill_(seed)
        target = torch.empty_like(expected)
        store.read(slot, target).wait()
        assert torch.equal(target, expected)
        store.free(slot)
    store.close()


def test_offload_lowers_the_peak(scratch: Path) -> None:
    peaks = {}
    for directive in ("keep", "offload"):
        chain = describe(CONFIG.build)
        plan = make_plan(
            chain,
            directive=directive,
            tier="host",
            swap_limit=8 * MIB,
            global_batch=16,
            microbatch=16,
        )
        engine = Engine.build(
            chain, plan, loss=GPT.loss, device=torch.device("cuda", 0), scratch=scratch
        )
        peaks[directive] = [engine.step(batch(16)).peak_bytes for _ in range(3)][-1]
        engine.close()
        del engine
        torch.cuda.empty_cache()
    assert peaks["offload"] < 0.75 * peaks["keep"]


def test_blocks_are_measured_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = batch()
    profile = measure(
        describe(CONFIG.build),
        GPT.loss,
        lambda n: (rows.inputs(0, n), rows.targets(0, n)),
        (2, 4),
        device=torch.device("cuda", 0),
        precision=PrecisionConfig(compute="bf16"),
        minimum_bytes=1024,
    )
    layer = profile.blocks[1]
    assert layer.forward_seconds.at(4) > 0
    assert layer.moved.at(4) > layer.moved.at(2) > 0


def test_a_refused_pinning_is_no_failure_of_the_next_kernel() -> None:
    """CUDA keeps an error until the next call reads it, which was an unrelated launch."""
    pinned = torch.ones(2 * MIB, dtype=torch.uint8).pin_memory()
    assert pin(torch.cuda.cudart(), pinned.data_ptr(), MIB)
    assert torch.arange(8, device="cuda").sum().item() == 28

"""Batch normalisation over participants, here one: torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallax.model.layers.norms import BatchNorms, _batch_norm, _Participants, share_alone


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 2), (2, 3, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_it_is_torchs_formula(shape: tuple[int, ...], dtype: torch.dtype, affine: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3 + 10).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    weight, bias = (
        (torch.rand(3, dtype=wide) + 0.5, torch.randn(3, dtype=wide)) if affine else (None, None)
    )
    gradient = torch.randn(shape).to(dtype)
    found = []
    for call in (F.batch_norm, lambda *given: _batch_norm(_Participants(None, 0, 1), *given)):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
        given = leaves if affine else [leaves[0], None, None]
        mean, variance = torch.zeros(3, dtype=wide), torch.ones(3, dtype=wide)
        result = call(given[0], mean, variance, given[1], given[2], True, 0.3, 1e-5)
        assert result.dtype is dtype
        result.backward(gradient)
        found.append([result, mean, variance, *(leaf.grad for leaf in leaves)])
    tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-4
    for expected, value in zip(*found):
        assert torch.allclose(value, expected.to(value.dtype), rtol=tolerance, atol=tolerance)


def test_one_value_has_no_variance() -> None:
    with pytest.raises(ValueError, match=r"replicas\.batchnorm=frozen"):
        _batch_norm(_Participants(None, 0, 1), torch.zeros(1, 3), None, None, None, None, True)


def test_frozen_stays_in_evaluation_mode() -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    norms = BatchNorms("frozen")
    norms.add_block(0, block)
    assert block[0].training
    assert not block[1].training
    block.train()
    norms.freeze_statistics()
    assert not block[1].training
    assert not norms.statistics_differ


def test_statistics_shared_with_no_other_replica_are_torchs() -> None:
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(8, 3)
    expected = block(x)
    assert share_alone(block) == 1
    assert torch.allclose(block(x), expected, atol=1e-6)
    assert block(x).grad_fn.name() == "_SynchronisedBackward"

"""What a caller's state comes back as from a checkpoint: equal to what it was, or it is refused when it is saved."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallax.errors import CheckpointError
from parallax.runtime.checkpoint import caller_state
from parallax.runtime.checkpoint.caller_state import state_text, thaw


def there_and_back(state: Any) -> Any:
    return thaw(json.loads(state_text(state)))


def same(one: Any, other: Any) -> bool:
    """Of the same type and value, inside, too."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        kept = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        return kept and one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            map(same, one.values(), other.values())
        )
    return bool(one == other or (one != one and other != other))


KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers()))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.dictionaries(st.just("__kind__"), inner),
        st.sets(st.integers()),
    ),
)


@given(VALUES)
def test_anything_made_of_these_comes_back_equal(state: Any) -> None:
    assert same(there_and_back(state), state)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64],
    ids=str,
)
def test_tensors_of_every_format(dtype: torch.dtype) -> None:
    plain = torch.randn(3, 4).to(dtype)
    for tensor in (plain, plain.t(), plain[1, 2], plain[:0], plain[0, ::2]):
        back = there_and_back({"it": tensor})["it"]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert back.tolist() == tensor.tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).T,
        np.float32(0.1),
        np.array(math.nan),
        np.zeros((0, 3), np.int8),
        np.array([1, 2], ">i4"),
        np.array([True, False]),
    ],
    ids=repr,
)
def test_arrays_and_their_numbers(array: Any) -> None:
    assert same(there_and_back([array])[0], array)


def test_states_of_generators() -> None:
    """All that people have for the order of their rows."""
    own, numpy = random.Random(3), np.random.default_rng(3)
    torch_own = torch.Generator().manual_seed(3)
    state = there_and_back(
        {"own": own.getstate(), "numpy": numpy.bit_generator.state, "torch": torch_own.get_state()}
    )
    expected = own.random(), numpy.random(), torch.rand(1, generator=torch_own)
    own.setstate(state["own"])
    numpy.bit_generator.state = state["numpy"]
    torch_own.set_state(state["torch"])
    assert (own.random(), numpy.random(), torch.rand(1, generator=torch_own)) == expected


def test_what_is_equal_to_a_plain_kind_comes_back_as_that() -> None:
    assert there_and_back(OrderedDict(a=1)) == {"a": 1}


class Holds:
    pass


def itself() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"rows": iter([1])}, "holds a list_iterator at ['rows']: accepted are numbers, text"),
        ({"a": [1, Holds()]}, "holds a Holds at ['a'][1]"),
        ({"a": torch.Generator()}, "holds a Generator at ['a']"),
        ({"a": torch.eye(2).to_sparse()}, "a tensor of another kind"),
        ({"a": torch.zeros(2, device="meta")}, "a tensor of another kind"),
        ({"a": np.array(["x"])}, "holds an array of <U1 at ['a']"),
        ({"a": 10**400}, "holds an integer of more than 288 digits"),
        ({"a": [10**400]}, "holds an integer of more than 288 digits"),
        ({"a": itself()}, "nested too deep, or contains itself"),
        ({"a\n": Holds()}, r"at ['a\n']"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(state: Any, message: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        state_text(state)
    assert message in str(refused.value)
    assert str(refused.value).isprintable()


def test_what_is_too_large_to_be_read_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"has 2,100,00\d values, and the limit is 2,097,152"):
        state_text({"order": list(range(2_100_000))})
    assert there_and_back({"order": np.arange(2_100_000)})["order"][-1] == 2_099_999
    monkeypatch.setattr(caller_state, "MOST_BYTES", 1000)
    with pytest.raises(CheckpointError, match="the limit is 1000 B: save the inputs to rebuild it"):
        state_text({"order": "x" * 1001})


@pytest.mark.parametrize(
    "found",
    [
        {"__kind__": "module"},
        {"__kind__": ["tuple"]},
        {"__kind__": "tuple"},
        {"__kind__": "tensor", "dtype": "load", "shape": [0], "base64": ""},
        {"__kind__": "tensor", "dtype": "uint8", "shape": [3], "base64": "AAAA====x"},
        {"__kind__": "tensor", "dtype": "uint8", "shape": [4], "base64": "AAAA"},
        {"__kind__": "array", "dtype": "O", "shape": [1], "base64": "AAAAAAAAAAA="},
        {"__kind__": "array", "dtype": "<i8", "shape": ["x"], "base64": "AAAAAAAAAAA="},
        {"__kind__": "dict", "items": [[[], 1]]},
        {"__kind__": "bytes", "base64": 3},
    ],
    ids=str,
)
def test_what_somebody_else_has_written_is_no_more_than_wrong(found: Any) -> None:
    """As any damage of a checkpoint is."""
    with pytest.raises((ValueError, KeyError, TypeError)):
        thaw({"it": found})

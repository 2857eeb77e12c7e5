"""Limits of ``parallax.swap`` that hold, and those that cannot be kept."""

from __future__ import annotations

import copy
import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallax
from parallax.common.units import format_bytes
from parallax.errors import BudgetExceeded, ConfigError
from parallax.machine.host import return_freed_memory
from parallax.swap.lms.scope import Swapping
from tests.unit.swap.test_scope import (
    MIB,
    WIDTH,
    Optimizer,
    adamw,
    bare,
    batches,
    build,
    plain_loop,
    static_bytes,
    tight,
)
from tests.unit.swap_fakes import assert_equal

__all__ = ["tight"]


# ---- limits


def test_a_limit_that_cannot_be_kept_says_why(tight: Callable[..., Swapping]) -> None:
    model = build()
    with (
        pytest.raises(
            BudgetExceeded,
            match=r"limit 500.0 KiB = parameters and buffers .* gradients .* leaves too little",
        ),
        parallax.swap(model, "500KiB"),
    ):
        pass
    optimizer = adamw(model)
    with (
        pytest.raises(
            BudgetExceeded,
            match=r"limit .* activations .* in use .* [\d.]+ KiB more are needed: raise limit",
        ),
        tight(model, optimizer, free_bytes=MIB // 16),
    ):
        plain_loop(model, optimizer)
    (x, y), optimizer = next(batches(1, 8)), adamw(model)
    plain_loop(model, optimizer)
    with (
        pytest.raises(
            BudgetExceeded, match=r"a step of AdamW needs 128.0 KiB of states .* raise limit"
        ),
        tight(model, optimizer, free_bytes=MIB // 16),
    ):
        optimizer.step(lambda: F.cross_entropy(model(x), y).backward())  # type: ignore[arg-type,return-value]
    assert all(
        isinstance(state["exp_avg"], Tensor) for state in optimizer.state_dict()["state"].values()
    )


def uneven() -> nn.Module:
    """The states of its last weight are most of all states."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
    )


MAKING: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], int]] = {
    "adamw": (torch.optim.AdamW, {}, 2),
    "adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}, 3),
    "adamax": (torch.optim.Adamax, {}, 2),
    "adadelta": (torch.optim.Adadelta, {}, 2),
    "adagrad": (torch.optim.Adagrad, {}, 1),
    "asgd": (torch.optim.ASGD, {}, 1),
    "nadam": (torch.optim.NAdam, {}, 2),
    "radam": (torch.optim.RAdam, {}, 2),
    "rmsprop": (torch.optim.RMSprop, {}, 1),
    "rmsprop, all": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, 3),
    "rprop": (torch.optim.Rprop, {}, 2),
    "sgd, momentum": (torch.optim.SGD, {"momentum": 0.9}, 1),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "settings", "states"), MAKING.values(), ids=MAKING)
def test_a_step_without_memory_for_its_largest_piece_steps_nothing(
    kind: Callable[..., Optimizer],
    settings: dict[str, Any],
    states: int,
    tight: Callable[..., Swapping],
) -> None:
    """Refused in the first step too, which would make the states; a slightly larger limit is enough."""
    largest = states * 4 * WIDTH * WIDTH * 4
    for made in (False, True):
        model = uneven()
        optimizer = kind(model.parameters(), lr=1e-3, **settings)
        x = torch.ones(2, WIDTH)
        if made:
            model(x).sum().backward()
            optimizer.step()
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with tight(model, optimizer, free_bytes=largest - 4096, minimum_bytes=MIB // 16):
            model(x).sum().backward()
            for _ in range(2):
                pattern = rf"a step of {kind.__name__} needs .* nothing was stepped: raise limit by 4\.0 KiB"
                with pytest.raises(BudgetExceeded, match=pattern):
                    optimizer.step()
                assert_equal((model.state_dict(), optimizer.state_dict()), before)
        with tight(model, optimizer, free_bytes=largest, minimum_bytes=MIB // 16) as swapping:
            for _ in range(3):
                optimizer.step()
                assert swapping.states[0].device_bytes <= largest


def test_optimizers_without_states_need_no_memory_for_them(tight: Callable[..., Swapping]) -> None:
    """Nor is an optimizer of somebody else's refused for a guess."""

    class Plain(torch.optim.SGD):
        pass

    for kind in (torch.optim.SGD, Plain):
        model = uneven()
        optimizer = kind(model.parameters(), lr=1e-3)
        with tight(model, optimizer, free_bytes=MIB // 64, minimum_bytes=4096):
            for _ in range(3):
                model(torch.ones(2, WIDTH)).sum().backward()
                optimizer.step()


def test_layers_that_are_unfrozen_inside_count(tight: Callable[..., Swapping]) -> None:
    model, other = build(), build()
    for each in (model, other):
        each.layers.requires_grad_(False)

    def loop(model: nn.Module, optimizer: Optimizer) -> list[float]:
        losses = plain_loop(model, optimizer)
        model.layers.requires_grad_(True)
        optimizer.add_param_group({"params": [*model.layers.parameters()]})
        return losses + plain_loop(model, optimizer)

    losses = loop(model, adamw(model.head))
    optimizer = adamw(other.head)
    with tight(other, optimizer) as swapping:
        assert loop(other, optimizer) == losses
        report = swapping.report()
    size = format_bytes(sum(p.nbytes for p in other.parameters()))
    assert f"parameters and buffers {size}, gradients {size}," in report


def test_layers_that_are_unfrozen_beyond_the_limit_are_refused(
    tight: Callable[..., Swapping],
) -> None:
    model = build()
    model.layers.requires_grad_(False)
    limit = sum(p.nbytes for p in model.parameters()) + MIB // 4
    with tight(model, free_bytes=limit - static_bytes(model)):
        model(torch.ones(2, WIDTH)).sum().backward()
        model.layers.requires_grad_(True)
        with pytest.raises(
            BudgetExceeded, match="since layers were unfrozen or added; raise limit"
        ):
            model(torch.ones(2, WIDTH))


def test_auto_takes_what_is_free() -> None:
    model = build()
    with parallax.swap(model) as swapping:
        plain_loop(model, adamw(model))
    assert 16 * MIB < swapping.statistics.limit_bytes < psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": "8 apples"}, "limit=8 apples"),
        ({"limit": 0}, "limit=0"),
        ({"tier": "none"}, "tier=none"),
        ({"tier": "host"}, "use tier=disk"),
        ({"threads": 0}, "threads=0"),
        ({"lb": 1, "swapin_ahead": 2}, "two names"),
        ({"swapin_groupby": 0}, "swapin_groupby=0"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parallax.swap(build(), **options)


def test_a_model_on_no_device() -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(ConfigError, match="Layers is on meta"):
        parallax.swap(model)


def test_report_explains(tight: Callable[..., Swapping]) -> None:
    model = build()
    optimizer = adamw(model)
    scope = tight(model, optimizer)
    assert scope.report().startswith("not entered yet")
    with scope as swapping:
        plain_loop(model, optimizer)
        inside = swapping.report()
    for report in (inside, swapping.report()):
        for part in (
            "limit 1",
            "gradients",
            " out, ",
            "waited",
            "overlapped",
            "high water",
            "disk tier",
            "AdamW",
        ):
            assert part in report
        assert "moved: " in report


# ---- on a limit that the kernel enforces

DEEP, WIDE = 12, 512  # each layer has 1 MiB of weights and saves 4 MiB of 2,048 rows twice

# Beyond what torch itself takes; plain was seen to need more than 142 MiB, swap 100 MiB.
ALLOWED = 120 * MIB


def big_loop(scope: Callable[[nn.Module, Optimizer], Any], layers: int = DEEP) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(layers)])
    optimizer = adamw(model, lr=1e-3)
    x = torch.randn(2048, WIDE, generator=torch.Generator().manual_seed(1))
    losses = []
    with scope(model, optimizer):
        for _ in range(2):
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def limited(scratch: str) -> None:
    """In a process of its own: a plain loop until the kernel says no, then the same loop with a limit."""
    return_freed_memory()
    # What torch loads on first use is not the model's.
    big_loop(lambda model, optimizer: bare(), layers=1)
    status = Path("/proc/self/status").read_text().split()
    limit = int(status[status.index("VmData:") + 1]) * 1024 + ALLOWED
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    failure = ""
    try:
        big_loop(lambda model, optimizer: bare())
    except RuntimeError as error:
        failure = str(error)
    gc.collect()
    losses = big_loop(
        lambda m, o: parallax.swap(m, "56MiB", optimizer=o, directory=scratch, piece_bytes="4MiB")
    )
    print(json.dumps({"failure": failure, "losses": losses}))


@pytest.mark.slow
def test_what_does_not_fit_trains(scratch: Path) -> None:
    command = [
        sys.executable,
        "-c",
        f"from tests.unit.swap.test_scope_limits import limited; limited({str(scratch)!r})",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        unlimited = big_loop(lambda model, optimizer: bare())
        output, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    found = json.loads(output.splitlines()[-1])
    assert "DefaultCPUAllocator: can't allocate memory" in found["failure"]
    assert found["losses"] == unlimited

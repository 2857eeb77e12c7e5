"""A profile as a table: the costs of each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from parallax.common.units import format_bytes, format_seconds, plural
from parallax.plan.profile import BlockCost, ModelProfile


def tell_noise(console: Console, profile: ModelProfile) -> None:
    """Print a warning if the profile was measured on a busy machine."""
    if profile.noisy:
        console.print(
            "the machine was busy while blocks were measured (they took "
            f"{profile.disturbance:.1f} times their processor time): predictions may be off; the next plan "
            "measures again",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def profile_table(profile: ModelProfile, rows: int) -> Table:
    """Return a table of the blocks' costs for a micro-batch of ``rows`` rows, in which consecutive equal blocks share a
    row."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{profile.model} on {profile.device}, {profile.precision}, {profile.source}; for {plural(rows, 'row')}",
        caption=(
            f"{parameters_of(profile)}; for each byte {'that is trained' if _frozen(profile) else 'of them'} "
            f"{profile.gradient_bytes:g} of gradients, {profile.optimizer_bytes:g} of optimizer states, "
            f"{profile.master_bytes:g} of full-precision copies"
        ),
        collapse_padding=True,
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("block")
    for heading in (
        "parameters",
        "forward",
        "backward",
        "saved",
        "offloadable",
        "saved by loss",
        "workspace",
        "output",
    ):
        table.add_column(heading, justify="right")
    for _, run in groupby(profile.blocks, key=lambda block: replace(block, name="")):
        blocks = list(run)
        block = blocks[0]
        table.add_row(
            _names(blocks),
            f"{block.parameters:,}",
            format_seconds(block.forward_seconds.at(rows)),
            format_seconds(block.backward_seconds.at(rows)),
            format_bytes(block.moved.at(rows) + block.stays.at(rows)),
            format_bytes(block.moved.at(rows)),
            format_bytes(block.by_loss.at(rows)),
            format_bytes(max(block.forward_work.at(rows), block.backward_work.at(rows))),
            format_bytes(block.output.at(rows)),
        )
    return table


def parameters_of(profile: ModelProfile) -> str:
    """Return the number of parameters as text and, if some are frozen, also the number of trained ones."""
    total = f"{profile.parameters:,} parameters"
    return f"{total} ({profile.trained:,} trained)" if _frozen(profile) else total


def _frozen(profile: ModelProfile) -> bool:
    return any(block.frozen_bytes for block in profile.blocks)


def _names(blocks: Sequence[BlockCost]) -> str:
    if len(blocks) == 1:
        return blocks[0].name or "(model)"
    return f"{blocks[0].name} … {blocks[-1].name} ({len(blocks)} alike)"

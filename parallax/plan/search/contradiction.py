"""Find settings that no plan can satisfy, before anything is measured.

The numbers of stages, replicas, devices, blocks and rows decide whether any pipeline is possible. This check needs
neither a model profile nor the machine's speed, which take a minute to measure, so it runs first. The error names each
contradiction with its numbers, and changes that were verified to remove it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parallax.errors import ConfigError, InfeasiblePlan
from parallax.plan.config import AUTO, PlanConfig
from parallax.plan.microbatches import balanced_sizes, sizes
from parallax.plan.plan import Directive
from parallax.plan.profile import ModelProfile
from parallax.plan.rows import micro_batch_count


@dataclass(frozen=True, kw_only=True)
class Question:
    """The constraints of a planning request, in numbers.

    ``rows``         rows of a batch
    ``microbatch``   rows of a micro-batch, or auto
    ``swap``         the plan may offload
    ``fixed``        the ranks have started, so a plan must use every device
    ``model``        what error messages call the model
    ``gather_loss``  one loss is computed over all rows of a batch
    """

    config: PlanConfig
    blocks: int
    devices: int
    rows: int
    microbatch: int | str = AUTO
    swap: bool = True
    fixed: bool = False
    model: str = "the model"
    gather_loss: bool = False

    @property
    def used(self) -> int:
        """The number of devices that a plan uses. The used devices are the first ones of the cluster.

        Configured stages and replicas, or too few rows in a batch, may leave some devices unused.
        """
        if self.fixed:
            return self.devices
        if (ranks := self.config.ranks) is not None:
            return min(self.devices, ranks)
        each = self.rows if self.config.replicas == AUTO else int(str(self.config.replicas))
        return min(self.devices, each * max(self.pipeline_ranks))

    @property
    def pipeline_ranks(self) -> Sequence[int]:
        """The numbers of pipeline ranks that the configured stages and replicas allow if every device is used."""
        stages, replicas, listed = self.config.stages, self.config.replicas, self.replicas
        if stages != AUTO or listed is not None:
            return [len(listed) if listed is not None else int(stages)]
        if replicas != AUTO:
            pipeline_ranks = self.devices // int(str(replicas))
            return [pipeline_ranks if self.fixed else max(1, min(pipeline_ranks, self.blocks))]
        return range(1, min(self.blocks, self.devices) + 1)

    @property
    def replicas(self) -> list[int] | None:
        """The replicas of each stage if the user listed them, otherwise None."""
        requested = self.config.replicas
        return list(requested) if isinstance(requested, list | tuple) else None

    @property
    def interleaves(self) -> bool:
        """Whether the settings request several stages per device."""
        return self.config.has_virtual_stages


def check_question(question: Question) -> int:
    """Check the settings, and return the number of devices that a plan uses (:attr:`Question.used`).

    Raises :class:`InfeasiblePlan` if no pipeline is possible, and :class:`ConfigError` if the settings exclude one
    another on any machine.
    """
    _check_settings(question)
    if reason := _contradiction(question):
        remedies = list(dict.fromkeys(_remedies(question)))
        raise InfeasiblePlan(f"{reason}; use {', or '.join(remedies)}")
    return question.used


def check_rows(rows: int, microbatch: int | str) -> None:
    """Raise :class:`ConfigError` if a micro-batch would have more rows than the batch."""
    if microbatch != AUTO and int(microbatch) > rows:
        raise ConfigError(
            f"trainer.microbatch={microbatch}: it is more than the {rows} row(s) of a batch; use "
            f"trainer.microbatch={rows} or less, or trainer.global_batch={microbatch}"
        )


def _check_settings(question: Question) -> None:
    """Raise :class:`ConfigError` for settings that exclude each other, whatever the model and the devices are."""
    config = question.config
    check_rows(question.rows, question.microbatch)
    if config.activations == Directive.OFFLOAD and not question.swap:
        raise ConfigError(
            "plan.activations=offload needs a tier: swap.tier is none; use swap.tier=auto, or plan.activations=auto"
        )
    if not question.swap and "host" in (config.optimizer, config.parameters):
        key = "optimizer" if config.optimizer == "host" else "parameters"
        raise ConfigError(
            f"plan.{key}=host needs a host tier for the optimizer's step: swap.tier is none; use swap.tier=auto, or "
            f"plan.{key}=device"
        )
    _check_gathering(question)


def _check_gathering(question: Question) -> None:
    """Raise :class:`ConfigError` if the schedule cannot compute one loss over all rows.

    This loss needs the outputs of all micro-batches. A schedule that starts backwards earlier can compute it only if a
    step has a single micro-batch, which makes a pipeline useless. So such a schedule is accepted only if the user sets
    a micro-batch of all rows.
    """
    config, pipeline_ranks = question.config, max(1, *question.pipeline_ranks)
    if not question.gather_loss or question.microbatch == question.rows:
        return
    several = 2 if question.microbatch == AUTO else int(question.microbatch)
    count = micro_batch_count(question.rows, several)
    if any(s.forwards_first(pipeline_ranks, count, s.interleaves[0]) for s in config.schedules):
        return
    requested = "schedule" if config.schedule != AUTO else "interleave"
    freed = "" if config.interleave in (AUTO, 1) else " plan.interleave=auto"
    # Steps that overlap need several micro-batches.
    whole = (
        ""
        if all(s.continues for s in config.schedules)
        else f", or trainer.microbatch={question.rows}"
    )
    raise ConfigError(
        f"plan.{requested}={getattr(config, requested)} starts backward before the forward of all micro-batches, and "
        f"trainer.gather_loss=true computes one loss over all of them: use plan.schedule=gpipe{freed}{whole}"
    )


def _contradiction(question: Question) -> str:
    """Return a text on the first contradiction between the settings, or ''."""
    reasons = (_of_stages, _of_replicas, _of_rows, _of_interleaving)
    return next((reason for find in reasons if (reason := find(question))), "")


def _of_stages(question: Question) -> str:
    stages, listed = question.config.stages, question.replicas
    if listed is not None and stages not in (AUTO, len(listed)):
        return f"plan.stages={stages} with plan.replicas={_list(listed)}: the list must have one number for each stage"
    count = len(listed) if listed is not None else stages
    if count != AUTO and int(count) > question.blocks:
        requested = f"plan.stages={stages}" if listed is None else f"plan.replicas={_list(listed)}"
        return f"{requested}: {count} stages for {question.blocks} block(s) of the model, and every stage needs one"
    if count != AUTO and listed is None and int(count) > question.devices:
        return f"plan.stages={stages} with {question.devices} device(s): every stage needs one"
    return ""


def _of_replicas(question: Question) -> str:
    config, devices, listed = question.config, question.devices, question.replicas
    if (ranks := config.ranks) is not None:
        requested = f"plan.replicas={_requested(config)}"
        requested = (
            requested if listed is not None else f"plan.stages={config.stages} with {requested}"
        )
        if question.fixed and ranks != devices:
            return f"{requested} uses {ranks} device(s), and {devices} rank(s) were started"
        return (
            f"{requested} needs {ranks} devices, and there are {devices}" if ranks > devices else ""
        )
    if config.replicas == AUTO:
        return ""
    count = int(str(config.replicas))
    if count > devices:
        return f"plan.replicas={count} needs {count} devices, and there are {devices}"
    if question.fixed and (devices % count or devices // count > question.blocks):
        most = f"and at most {question.blocks} stage(s), one for each block of the model"
        return f"plan.replicas={count} does not use {devices} device(s): every stage has {count} of them, {most}"
    return ""


def _of_rows(question: Question) -> str:
    """Return a text if some replica would have no row of a batch, otherwise ''."""
    config, listed, rows = question.config, question.replicas, question.rows
    most = (
        max(listed)
        if listed is not None
        else 1
        if config.replicas == AUTO
        else int(str(config.replicas))
    )
    if most > rows:
        return (
            f"plan.replicas={_requested(config)}: {most} replicas share the {rows} row(s) of a batch, and each needs "
            "one"
        )
    if (
        question.fixed
        and config.replicas == AUTO
        and question.devices > rows * max(question.pipeline_ranks)
    ):
        most = max(question.pipeline_ranks)
        return (
            f"cluster.devices={question.devices} with trainer.global_batch={rows}: up to {most} stage(s), each "
            "with a replica for each row of a batch, occupy fewer devices"
        )
    return ""


def _of_interleaving(question: Question) -> str:
    """Return a text if the settings contradict interleaving (several stages per pipeline rank), otherwise ''.

    Interleaving needs at least two pipeline ranks, a block for each of their stages, and equally many devices per
    pipeline rank. If the schedule groups micro-batches, the number of pipeline ranks must divide the number of
    micro-batches (Narayanan et al. 2021, section 2.2).
    """
    config, blocks, devices = question.config, question.blocks, question.used
    if not question.interleaves or (
        config.interleave == AUTO and all(s.grouping is not None for s in config.schedules)
    ):
        return ""
    name = (
        f"plan.schedule={config.schedule}"
        if config.interleave == AUTO
        else f"plan.interleave={config.interleave}"
    )
    requested = sorted({each for s in config.schedules for each in config.interleaves(s)})
    several = [count for count in question.pipeline_ranks if count > 1]
    if not several:
        return f"{name} with {_stages(question)}: several stages per device need two pipeline ranks or more"
    thick = [count for count in several if count * min(requested) <= blocks]
    if not thick:
        needed = f"{min(requested)} to each of {min(several)} makes {min(requested) * min(several)} stages"
        return f"{name} with {_stages(question)}: {needed}, more than the {blocks} block(s) of the model"
    even = [
        count
        for count in thick
        if min(requested) == 1 or question.replicas is not None or devices % count == 0
    ]
    if not even:
        counts = " or ".join(map(str, thick))
        return f"{name} needs as many devices on every pipeline rank, and {devices} cannot be divided by {counts}"
    batches = [
        micro_batch_count(question.rows, size) for size in sizes(question.rows, question.microbatch)
    ]
    free = question.microbatch == AUTO and any(
        balanced_sizes(question.rows, devices // count, count) for count in even
    )
    if (
        min(requested) > 1
        and all(schedule.grouped for schedule in config.schedules)
        and not free
        and not any(batch % count == 0 for batch in batches for count in even)
    ):
        found = " or ".join(map(str, sorted(set(batches))))
        counts = " or ".join(map(str, even))
        return (
            f"{name}: {counts} pipeline ranks do not divide the {found} micro-batch(es) of a batch"
        )
    return ""


def _remedies(question: Question) -> Iterator[str]:
    """Yield one or two changes of the settings, the smallest first, each of which alone removes every contradiction."""
    found = 0
    for changed, text in _changes(question):
        if question.fixed and changed.devices != question.devices:
            continue  # the ranks have started
        if text and not _contradiction(changed) and not _excludes(changed):
            yield text
            found += 1
            if found == 2:
                return


def _excludes(question: Question) -> bool:
    """Return whether the settings exclude each other, whatever the model and the devices are."""
    try:
        _check_settings(question)
    except ConfigError:
        return True
    return False


def _changes(question: Question) -> Iterator[tuple[Question, str]]:
    config, listed = question.config, question.replicas
    if listed is not None:
        requested = replace(config, stages=len(listed))
        text = f"plan.stages={len(listed)} " if config.stages not in (AUTO, len(listed)) else ""
        text += f"cluster.devices={sum(listed)}" if sum(listed) != question.devices else ""
        yield replace(question, config=requested, devices=sum(listed)), text.strip()
    elif config.stages != AUTO and config.replicas != AUTO:
        devices = int(config.stages) * int(str(config.replicas))
        yield replace(question, devices=devices), f"cluster.devices={devices}"
    if config.replicas != AUTO:
        yield replace(question, config=replace(config, replicas=AUTO)), "plan.replicas=auto"
    if config.stages != AUTO:
        most = max(1, min(question.blocks, question.devices))
        for stages in range(most, 0, -1):
            yield replace(question, config=replace(config, stages=stages)), f"plan.stages={stages}"
            if config.replicas != AUTO:
                freed = replace(config, stages=stages, replicas=AUTO)
                yield replace(question, config=freed), f"plan.stages={stages} plan.replicas=auto"
        yield replace(question, devices=int(config.stages)), f"cluster.devices={config.stages}"
    if question.microbatch != AUTO:
        for size in sizes(question.rows, AUTO):
            yield replace(question, microbatch=size), f"trainer.microbatch={size}"
    for fewer in range(question.devices - 1, max(0, question.devices - 64), -1):
        yield replace(question, devices=fewer), f"cluster.devices={fewer}"
    yield replace(question, rows=question.devices), f"trainer.global_batch={question.devices}"
    if question.interleaves:
        plain = replace(config, schedule=AUTO, interleave=AUTO)
        yield replace(question, config=plain), "plan.schedule=auto plan.interleave=auto"
    free = replace(question, config=PlanConfig(), microbatch=AUTO)
    typed = config.freed + ("" if question.microbatch == AUTO else " trainer.microbatch=auto")
    useful = min(question.devices, question.blocks * question.rows)
    yield replace(free, devices=useful), f"{typed} cluster.devices={useful}"
    yield replace(free, rows=question.devices), f"{typed} trainer.global_batch={question.devices}"


def _list(counts: Sequence[int]) -> str:
    return f"[{','.join(map(str, counts))}]"


def _requested(config: PlanConfig) -> str:
    requested = config.replicas
    return _list(list(requested)) if isinstance(requested, list | tuple) else str(requested)


def _stages(question: Question) -> str:
    return f"plan.stages={question.config.stages} and {question.devices} device(s)"


def check_counted_loss(profile: ModelProfile, rows: int, *, gather_loss: bool) -> None:
    """Raise :class:`ConfigError` if ``profile`` was measured with another loss than the plan computes.

    The plan is for batches of ``rows`` rows. With ``gather_loss``, it computes one loss over all rows of a batch.
    """
    counted = profile.gathered_rows
    if counted == (rows if gather_loss else 0):
        return
    has = f"one loss over {counted} rows" if counted else "a loss for each micro-batch"
    requested = f"trainer.gather_loss={str(gather_loss).lower()}"
    raise ConfigError(
        f"{requested} trainer.global_batch={rows}: the profile of {profile.model} counts {has}; measure it again with "
        "these settings"
    )

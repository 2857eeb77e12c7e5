"""Find out where the seconds of a run's steps went, and which change of the settings would save most.

The files of a run hold its plan, the plan's inputs, every action of the last steps, and the status of each rank. From
these, a simulation of the run is fitted to the measurements: the seconds of the blocks, the slowness of single ranks,
the speed of the offload tier, and the reading of rows. Then each of these causes is removed from the simulation in
turn, which shows what it costs. Each change of the settings is planned and simulated too, while all other quantities
keep their measured values::

    profile, cluster, plan ──> fit to the spans ──> model of the run ──┬─ without a cause ──> what it costs
                                                                       └─ under a change  ──> its predicted step
"""

from parallax.run.diagnosis.changes import Change, Diagnosis, diagnose
from parallax.run.diagnosis.measured import Measured

__all__ = ["Change", "Diagnosis", "Measured", "diagnose"]

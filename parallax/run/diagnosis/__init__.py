"""Where the seconds of a run's steps went, and which change of its settings would save most.

A run's files hold its plan, the plan's inputs, every action of the last steps, and the status of each rank. From these
the run is modelled in the simulator, cause by cause: the measured seconds of the blocks, the slowness of single ranks,
the speed of the offload tier, and the reading of rows. Then each cause is removed from the model in turn, and each
change of the settings is planned and simulated, while all other quantities keep their measured values::

    profile, cluster, plan ──> fit to the spans ──> model of the run ──┬─ without a cause ──> what it costs
                                                                       └─ under a change  ──> its predicted step
"""

from parallax.run.diagnosis.changes import Change, Diagnosis, diagnose
from parallax.run.diagnosis.measured import Measured

__all__ = ["Change", "Diagnosis", "Measured", "diagnose"]

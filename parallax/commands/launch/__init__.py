"""``parallax launch``: a run, or all points of a sweep, as a job of a batch system."""

from parallax.commands.launch.command import EXAMPLES, add_arguments, run

__all__ = ["EXAMPLES", "add_arguments", "run"]

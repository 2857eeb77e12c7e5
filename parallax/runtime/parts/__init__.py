"""Checkpoints whose parts are on several nodes: which are complete, which files to copy, and which start of a run may
save."""

"""Checkpoints whose files are spread over several nodes: which are complete, which files must be copied, and which
start of a run may save."""

"""Checkpoints whose parts are on several nodes: which are whole, which files to copy, and which start of a run may
save."""

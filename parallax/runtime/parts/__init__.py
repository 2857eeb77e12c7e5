"""Checkpoints whose files are spread over several nodes.

The modules find the complete checkpoints, copy missing files between nodes, and decide which start of a run may save.
"""

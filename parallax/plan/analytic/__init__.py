"""Compute profiles and clusters from published figures, to plan for hardware that is not available."""

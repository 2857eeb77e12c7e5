"""Profiles and clusters from published figures, for hardware that is not available."""

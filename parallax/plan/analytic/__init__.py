"""Profiles and clusters from numbers, for what is not at hand."""

"""Simulate action lists (timeline and peaks), and correct profiles with the measurements of a run."""

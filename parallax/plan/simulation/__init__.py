"""Simulate the action lists of a plan (timeline and peaks), and correct profiles with the measurements of a run."""

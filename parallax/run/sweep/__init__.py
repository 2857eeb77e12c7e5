"""Run the points of a sweep from one command, each in its own process, and record their outcomes."""

"""The planner against published measurements: ``python -m benchmarks.validation FILE.csv…``."""

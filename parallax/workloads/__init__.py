"""Models and rows of the experiments in docs/workloads.md."""

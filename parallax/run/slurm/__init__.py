"""Runs as jobs of Slurm: the batch script, and what it does on the nodes."""

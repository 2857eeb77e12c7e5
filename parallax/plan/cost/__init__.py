"""Compute the seconds and bytes that a pipeline stage costs a rank, by term."""

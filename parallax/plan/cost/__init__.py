"""Compute the seconds and bytes that a pipeline stage costs a rank, divided into terms such as gradients."""

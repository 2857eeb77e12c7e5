"""Checks of a step's numbers: where the first NaN or Inf comes from, and whether all ranks have the same rows."""

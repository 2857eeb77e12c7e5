"""Checks of a step's numbers: which tensor has the first NaN or Inf, and whether all ranks have the same rows."""

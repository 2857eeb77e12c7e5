"""Whether a step's numbers can be trusted: where the first NaN or Inf comes from, and whether all ranks have the same
rows."""

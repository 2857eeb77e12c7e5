"""Whether a step's numbers can be trusted: where one that is not finite comes from, and whether computing repeats."""

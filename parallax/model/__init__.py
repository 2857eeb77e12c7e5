"""A module as a chain of blocks, and what each block costs."""

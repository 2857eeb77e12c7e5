"""A program in blocks: where it is cut, and each block as a module whose sizes follow from what it is given."""

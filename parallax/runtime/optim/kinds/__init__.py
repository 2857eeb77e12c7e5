"""The kinds of optimizers: one module for each."""

"""Loggers, which send the figures of a run to other programs: one module for each destination, and the thread that
sends."""

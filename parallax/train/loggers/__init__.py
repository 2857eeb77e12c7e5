"""Loggers of a run: one module for each destination of its figures, and the thread that feeds one."""

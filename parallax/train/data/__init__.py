"""Rows to train on, one module for each option of ``data=``."""

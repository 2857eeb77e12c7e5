"""Failure detection: find the rank that failed, and report it once."""

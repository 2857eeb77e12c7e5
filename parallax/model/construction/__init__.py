"""Deferred initialization: record a model's constructor without allocating memory, and replay it for one stage."""

"""Deferred initialization: record a model's constructor without memory, and replay it for one stage."""

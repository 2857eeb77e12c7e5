"""Layers whose result must not depend on how rows are partitioned."""

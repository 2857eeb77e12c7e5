"""Preflight: compare the resources that a run's ranks need on this host with those it has, before the run starts."""

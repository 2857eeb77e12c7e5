"""Preflight: compares the resources that the ranks of a run need with those of this host, before the run starts."""

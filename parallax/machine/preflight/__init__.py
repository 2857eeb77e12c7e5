"""Check, before a run starts, that this host has the resources that the run's ranks need."""

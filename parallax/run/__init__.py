"""A run: what is asked, its directory, its processes, and another plan where one drifts."""

"""A run: its configuration, plan, directory and processes, and a new plan if measured times drift."""

"""A run: its configuration, plan, directory and processes, and a new plan where measured times drift."""

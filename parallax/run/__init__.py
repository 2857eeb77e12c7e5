"""A run: its settings, plan, directory and processes, and a new plan if measured times differ from the prediction."""

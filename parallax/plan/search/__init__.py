"""From a question to one plan."""

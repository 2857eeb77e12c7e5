"""The training loop and its rows."""

"""Measurements of a rank while it trains: memory, the times of actions, the results of steps."""

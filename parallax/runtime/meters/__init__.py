"""Meters of a rank while it trains: memory, spans, results of steps."""

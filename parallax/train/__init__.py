"""The training loop and the rows that it trains on."""

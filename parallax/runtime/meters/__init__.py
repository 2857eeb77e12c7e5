"""What is measured of a rank while it trains."""

"""``parallax.swap(...)``: Large Model Support in any training loop."""

"""The tier contract, and its stores: host memory and disk."""

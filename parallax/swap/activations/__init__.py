"""Saved activations, moved below the device between forward and backward."""

"""Offloading of saved activations between forward and backward."""

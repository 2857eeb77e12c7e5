"""Tiers below the device, and the manager that moves saved activations between them."""

"""Tensors between ranks."""

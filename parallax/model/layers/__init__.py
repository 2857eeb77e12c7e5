"""Layers whose results must not depend on the plan: changing buffers, dropout, BatchNorm, sparse gradients."""

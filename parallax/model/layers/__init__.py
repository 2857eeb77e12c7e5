"""Layers whose results must not depend on the plan: buffers that a forward changes, dropout, BatchNorm, sparse
gradients.
"""

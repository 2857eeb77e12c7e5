"""Find the cost of a model's blocks, by measuring them or by counting on fake tensors."""

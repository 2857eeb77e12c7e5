"""Find the costs of a model's blocks, by measuring on the device or by counting operators on fake tensors."""

"""The cost of a model's blocks: measured, or counted on fake tensors."""

"""What the blocks of a model cost: measured, or counted without a device."""

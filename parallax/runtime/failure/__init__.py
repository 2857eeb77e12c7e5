"""Who failed, said once."""

"""Several hosts as one: where the ranks are, what one of them finds, told to all, and the links between nodes."""

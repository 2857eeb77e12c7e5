"""A checkpoint whose parts lie on several nodes: which are whole, what is copied where, and which start may save."""

"""Many runs from one command: the points of a sweep, each in a process of its own, and their outcomes."""

"""Many runs from one command: which points there are, each as a process of its own, what became of them."""

"""The commands of ``parallax``, one module each, with ``EXAMPLES``, ``add_arguments(parser)`` and ``run(parsed)``,
which returns the exit code.

Only the module of the command on the command line is imported, so that planning does not load the libraries of
training.
"""

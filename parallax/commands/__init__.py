"""The commands of ``parallax``. Each is a module with ``EXAMPLES``, ``add_arguments(parser)`` and ``run(parsed)``,
which returns the exit code.

Only the module of the typed command is imported, so that planning does not load the libraries of training.
"""

"""The commands of ``parallax``, one module each, with ``EXAMPLES``, ``add_options`` and ``run``.

A module has ``EXAMPLES``, ``add_arguments(parser)`` and ``run(parsed)``, which returns the exit code. Only the module
of the command that was typed is imported, so that planning does not wait for what only training needs.
"""

"""``parallax import``: make a run's first checkpoint from weights of other libraries.

This is the inverse of :mod:`parallax.run.export`. Names and shapes are compared before anything is written. Then each
tensor is read, converted to the number format of the master weights, and written.
"""

from parallax.run.imports.importing import Imported, import_run, import_settings
from parallax.run.imports.sources import SOURCES

__all__ = ["SOURCES", "Imported", "import_run", "import_settings"]

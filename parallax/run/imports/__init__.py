"""``parallax import``: make a run's first checkpoint from weights of other libraries.

The inverse of :mod:`parallax.run.export`. Names and shapes are compared before anything is written; then each tensor is
read, converted to the number format of the masters, and written.
"""

from parallax.run.imports.importing import Imported, import_run, import_settings
from parallax.run.imports.sources import SOURCES

__all__ = ["SOURCES", "Imported", "import_run", "import_settings"]

"""``parallax import``: a run's first checkpoint from what others have trained.

The other way of :mod:`parallax.run.export`. Names and shapes are compared before anything is written; then one tensor
after another is read, brought into the number format of the masters, and written.
"""

from parallax.run.imports.importing import Imported, import_run, import_settings
from parallax.run.imports.sources import SOURCES

__all__ = ["SOURCES", "Imported", "import_run", "import_settings"]

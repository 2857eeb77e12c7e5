"""``python -m parallax`` is the command ``parallax``."""

import sys

from parallax.cli import main

sys.exit(main())

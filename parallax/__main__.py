"""``python -m parallax`` is the command ``parallax``."""

from parallax.common.signals import install_early_handlers

install_early_handlers()  # what follows imports for seconds

import sys  # noqa: E402

from parallax.cli import main  # noqa: E402

sys.exit(main())

"""``python -m parallax`` is the command ``parallax``."""

from parallax.common.signals import heed_from_the_start

heed_from_the_start()  # what follows imports for seconds

import sys  # noqa: E402

from parallax.cli import main  # noqa: E402

sys.exit(main())

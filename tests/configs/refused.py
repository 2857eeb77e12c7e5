"""Command lines that are refused, and one that names what is the user's own."""

import pytest

from parallax.config import compose
from parallax.errors import ConfigError

CUSTOM = ["model=custom", "model.target=a:b"]


def error_of(*overrides: str) -> str:
    """The message of a refused command line, after the checks that hold for each of them."""
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    message = str(caught.value)
    assert message.isprintable(), "one line, no control characters"
    assert "hydra" not in message.lower() or any("hydra" in text for text in overrides)
    return message

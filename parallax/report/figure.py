"""A picture of 1600 × 900, drawn without a window and written whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def new_figure() -> Any:
    """An empty matplotlib figure; the import takes 0.3 s, so it waits until somebody draws."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 9), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Any, path: Path) -> None:
    """Write ``figure`` in place of ``path``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)

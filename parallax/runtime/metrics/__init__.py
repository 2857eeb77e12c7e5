"""Metrics of evaluated and trained rows, computed by torchmetrics on the last stage."""

from parallax.runtime.metrics.config import MetricConfig, MetricsConfig
from parallax.runtime.metrics.metrics import Metrics

__all__ = ["MetricConfig", "Metrics", "MetricsConfig"]

"""Metrics of the rows that a run evaluates and trains on, computed by torchmetrics on the last stage."""

from parallax.runtime.metrics.config import MetricConfig, MetricsConfig
from parallax.runtime.metrics.metrics import Metrics

__all__ = ["MetricConfig", "Metrics", "MetricsConfig"]

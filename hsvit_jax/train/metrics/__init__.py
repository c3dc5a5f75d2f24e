"""Metrics of a run, from process 0: JSON lines, loggers, progress, curves."""

from hsvit_jax.train.metrics.curves import draw_curves, forgiven
from hsvit_jax.train.metrics.log import (
    MetricLog,
    best_before_patience_ended,
    measured,
    read_metrics,
    series,
    to_line,
)
from hsvit_jax.train.metrics.loggers import check as check_loggers
from hsvit_jax.train.metrics.progress import Progress

__all__ = [
    "MetricLog",
    "Progress",
    "best_before_patience_ended",
    "check_loggers",
    "draw_curves",
    "forgiven",
    "measured",
    "read_metrics",
    "series",
    "to_line",
]

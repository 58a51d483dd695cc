"""A callback, a logger and a strategy for instep."""

from instep_example_plugin.callback import BestMetric
from instep_example_plugin.logger import SQLiteLogger
from instep_example_plugin.strategy import AveragedGradients

__all__ = ["AveragedGradients", "BestMetric", "SQLiteLogger"]

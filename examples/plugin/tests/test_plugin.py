"""What every plug-in can test: that it keeps the rules which instep relies on."""

from instep_example_plugin import AveragedGradients, BestMetric, SQLiteLogger
from instep_example_plugin.logger import read

from instep.testing import check_callback, check_logger, check_strategy


def test_the_callback_keeps_its_state_over_a_restart():
    """A resumed run ends with the same best value."""
    check_callback(BestMetric)


def test_the_logger_has_each_step_once():
    """Also after a run that failed and was resumed."""
    check_logger(SQLiteLogger, read=lambda logger: read(str(logger.log_dir)))


def test_the_strategy_trains_like_one_process():
    """Losses, weights and checkpoints are those of one process."""
    check_strategy(AveragedGradients, devices=2)

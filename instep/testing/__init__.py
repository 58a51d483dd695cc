"""Contract tests that authors of callbacks, loggers, strategies, modules and data modules run on their own classes.

Each check is a function that a test calls. The function makes small runs on the CPU in a temporary folder. If a rule is
broken, it raises a `ContractError`, which is an `AssertionError` and names the rule. No test framework is needed.

Example in a test file of a package::

    from instep.testing import check_callback, check_logger, check_strategy
    from my_package import MyCallback, MyLogger, MyStrategy

    def test_the_callback():
        check_callback(MyCallback)

    def test_the_logger():
        check_logger(MyLogger, read=lambda logger: logger.rows())

    def test_the_strategy():
        check_strategy(MyStrategy, devices=2)
"""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.testing.callback import check_callback as check_callback
    from instep.testing.data import check_datamodule as check_datamodule
    from instep.testing.logger import check_logger as check_logger
    from instep.testing.module import check_module as check_module
    from instep.testing.runs import ContractError as ContractError
    from instep.testing.strategy import check_strategy as check_strategy

__all__, __getattr__, __dir__ = loads(__name__)

"""Loggers whose package is not installed say how to get it, when they are made."""

from __future__ import annotations

import re

import pytest

from instep.errors import MissingPackageError
from instep.loggers import NAMES, logger_class
from instep.utils import imports


@pytest.mark.parametrize("name", [name for name in NAMES if logger_class(name)._NEEDS])
def test_a_missing_package_is_an_error_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "find_spec", lambda package: None)
    package, extra = logger_class(name)._NEEDS or ("", None)
    command = f"pip install 'instep[{extra}]'" if extra else f"pip install {package}"
    with pytest.raises(MissingPackageError, match=re.escape(command)):
        logger_class(name)()


def test_options_of_every_logger_do_not_go_to_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "find_spec", lambda package: object())
    for name in ("comet_ml", "clearml", "swanlab", "dvclive", "aim"):
        logger = logger_class(name)(save_dir="logs", name="first", version="one", prefix="p", flush_timeout_s=3)
        assert (logger.name, logger.version, logger.save_dir) == ("first", "one", "logs"), name
        assert (logger._prefix, logger._flush_timeout_s) == ("p-", 3)

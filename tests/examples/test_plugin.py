"""The example of a package of plug-ins: its own tests pass, and its entry points name its classes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from instep import Logger, Strategy
from tests.helpers.spawn import run_command

REPO = Path(__file__).parents[2]
PLUGIN = REPO / "examples" / "plugin"


@pytest.mark.dist
@pytest.mark.extras  # starts eight processes, one after another
def test_the_tests_of_the_plugin_package_pass(tmp_path: Path) -> None:
    done = run_command(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PLUGIN / "tests")],
        env={"PYTHONPATH": os.pathsep.join([str(PLUGIN), str(REPO)])},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib")
def test_entry_points_of_the_plugin_package_name_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib  # late: see above

    monkeypatch.syspath_prepend(PLUGIN)
    groups = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]["entry-points"]
    assert groups.keys() == {"instep.loggers", "instep.strategies"}
    for group, base in (("instep.loggers", Logger), ("instep.strategies", Strategy)):
        for place in groups[group].values():
            assert issubclass(resolve_name(place), base)

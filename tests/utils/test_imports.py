"""The one door to optional packages: missing, of a wrong version, and without metadata."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module, metadata
from pathlib import Path

import pytest

from instep import callbacks
from instep.errors import MissingPackageError
from instep.utils import imports
from instep.utils.imports import without_collections


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Install a stand-in for a package, of some version."""
    imports._versions.cache_clear()
    monkeypatch.syspath_prepend(tmp_path)
    wanted = ["stand-in-pkg>=2.1; extra == 'toys'", "stand-in-pkg>=2.1; extra == 'all'"]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)

    def install(version: str | None) -> None:
        monkeypatch.delitem(sys.modules, "stand_in_pkg", raising=False)
        (tmp_path / "stand_in_pkg.py").write_text("value = 1\n")
        if version is not None:
            folder = tmp_path / f"stand_in_pkg-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: stand-in-pkg\nVersion: {version}\n")

    yield install
    imports._versions.cache_clear()


@pytest.mark.parametrize("version", ["2.1", "2.1.0.post1", "3.0rc1", "2.2+cu128", None])
def test_a_version_in_the_range_or_without_metadata_loads(installed, version):
    installed(version)
    assert imports.require("stand_in_pkg", extra="toys", purpose="playing").value == 1
    imports.check_installed("stand_in_pkg", extra="toys", purpose="playing")


@pytest.mark.parametrize(
    ("extra", "install"), [("toys", r"pip install 'instep\[toys\]'"), (None, r"pip install 'stand_in_pkg>=2\.1'")]
)
def test_a_version_out_of_the_range_is_named_with_what_is_wanted(installed, extra, install):
    installed("2.0.9")
    words = rf"^playing needs stand_in_pkg>=2\.1, and 2\.0\.9 is installed\. Run: {install}$"
    for door, name in ((imports.require, "stand_in_pkg"), (imports.check_installed, "stand_in_pkg")):
        with pytest.raises(MissingPackageError, match=words):
            door(name, extra=extra, purpose="playing")


@pytest.mark.parametrize("door", [imports.require, imports.check_installed])
def test_a_missing_package_is_named_with_its_install(door):
    with pytest.raises(MissingPackageError, match=r"^playing needs the package 'no_such_pkg'\..* 'instep\[toys\]'$"):
        door("no_such_pkg", extra="toys", purpose="playing")


def test_an_import_that_fails_inside_the_package_is_its_own_error(installed, tmp_path):
    installed("2.1")
    (tmp_path / "stand_in_pkg.py").write_text("import no_such_pkg\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_pkg"):
        imports.require("stand_in_pkg", extra="toys", purpose="playing")


def test_a_name_of_another_package_is_answered_with_what_there_is_here():
    with pytest.raises(AttributeError, match=r"'SWA': use .* or StochasticWeightAveraging"):
        _ = callbacks.SWA
    with pytest.raises(AttributeError, match=r"'CSVLogger': use instep\.loggers\.CSVLogger"):
        _ = callbacks.CSVLogger


def test_the_range_is_that_of_the_project_s_own_metadata():
    wanted = [line for line in metadata.requires("instep") or () if line.startswith("ray")]
    assert wanted
    assert all("ray>=2.30" in line for line in wanted)


@pytest.mark.parametrize("collects", [True, False])
def test_imports_without_collections_leave_the_collector_as_it_was(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with without_collections():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
        with pytest.raises(ModuleNotFoundError), without_collections():
            import_module("no_such_module")
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_threads_look_up_versions_at_once_though_the_collector_runs_python() -> None:
    before, interval_s = gc.get_threshold(), sys.getswitchinterval()

    def run_python(*_: object) -> None:
        list(range(50))

    gc.callbacks.append(run_python)
    gc.set_threshold(5)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(imports._versions.__wrapped__, ["torch", "numpy", "packaging"] * 60))
    finally:
        gc.callbacks.remove(run_python)
        gc.set_threshold(*before)
        sys.setswitchinterval(interval_s)
    assert [range_ for _, range_ in found] == [None] * 180

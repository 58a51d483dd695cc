from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch

from instep import Accelerator, Trainer
from instep.accelerator import ProjectConfiguration
from instep.callbacks import ModelCheckpoint
from instep.errors import MissingPackageError, SettingError
from instep.loggers import CSVLogger
from instep.utils.paths import local_path, to_path
from tests.helpers.object_store import need_packages


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("runs/a", Path("runs/a")),
        (Path("/x"), Path("/x")),
        ("file:///data/a%20b", Path("/data/a b")),
        ("file://localhost/data", Path("/data")),
        ("local:///data", Path("/data")),
        ("s3:/b/x", Path("s3:/b/x")),  # no URL
    ],
)
def test_what_is_on_this_machine_is_a_plain_path(value: str | Path, expected: Path) -> None:
    assert type(to_path(value)) is type(expected)
    assert to_path(value) == expected


def test_a_tilde_is_the_home_folder_wherever_a_path_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert to_path("~/a") == local_path(Path("~/a")) == tmp_path / "a"
    assert ModelCheckpoint(dirpath="~/a").dirpath == str(tmp_path / "a")
    assert Trainer(default_root_dir="~/a", logger=False).default_root_dir == str(tmp_path / "a")
    assert CSVLogger("~/a").save_dir == str(tmp_path / "a")
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration("~/a", automatic_checkpoint_naming=True), log_with="csv"
    )
    assert accelerator.project_dir == accelerator.logging_dir == str(tmp_path / "a")
    accelerator.init_trackers("mine")
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save(1, "~/object.pt")
    assert accelerator.save_state().is_relative_to(tmp_path / "a")
    assert accelerator.save_state("~/b").parent == tmp_path
    assert accelerator.load_state("~/b").parent == tmp_path
    accelerator.end_training()
    assert not (tmp_path / "~").exists()


def test_a_local_path_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "upath", None)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert to_path("file:///x") == Path("/x")
    with pytest.raises(MissingPackageError, match=r"memory://x needs .*pip install 'instep\[remote\]'"):
        to_path("memory://x")


def test_a_url_stays_one() -> None:
    need_packages()
    path = to_path("s3://bucket/run")
    assert str(path / "step-1" / "x.json") == "s3://bucket/run/step-1/x.json"
    assert str(path.parent) == "s3://bucket/"
    assert str(path.absolute()) == "s3://bucket/run"
    assert to_path(path) == path
    assert to_path(str(path)) == path
    assert pickle.loads(pickle.dumps(path)) == path  # rank 0 tells the others


def test_options_are_kept_and_passed_on() -> None:
    need_packages()
    import upath  # late: optional

    given = upath.UPath("s3://bucket/run", endpoint_url="http://here", anon=True)
    root = to_path(given)
    assert root.storage_options == {**given.storage_options, "use_listings_cache": False}  # type: ignore[attr-defined]
    assert to_path("s3://bucket/run/step-1", like=root) == root / "step-1"
    assert to_path("memory://x", like=root) == to_path("memory://x")
    assert to_path("x", like=root) == Path("x")
    assert type(to_path(upath.UPath("/data/x"))) is type(Path("/data/x"))


@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_the_package_of_a_protocol_is_named(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_packages()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(MissingPackageError, match=f"{protocol}://b/x needs .*pip install (gcsfs|adlfs)"):
        to_path(f"{protocol}://b/x")


def test_an_unknown_protocol_is_refused() -> None:
    need_packages()
    with pytest.raises(SettingError, match=r"xyz://b/x: .*xyz"):
        to_path("xyz://b/x")

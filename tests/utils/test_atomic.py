"""A file has its old content or its new one, and nothing else is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.utils.atomic import create_exclusive, creating, replace, replacing


def fail(_: object) -> None:
    raise ValueError("half")


@pytest.mark.parametrize("sync", [True, False])
def test_replacing_takes_effect_at_the_end_and_not_after_an_error(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    with pytest.raises(ValueError, match="half"), replacing(path, sync) as part:
        fail(part.write_text("half"))
    assert path.read_text() == "old"
    with replacing(path, sync) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("folder", [True, False])
def test_creating_never_takes_a_name_that_something_has(tmp_path: Path, folder: bool) -> None:
    def write(part: Path) -> None:
        if folder:
            part.mkdir()
            part = part / "inner"
        part.write_text("new")

    path = tmp_path / "made"
    with creating(path) as part:
        write(part)
    assert (path / "inner" if folder else path).read_text() == "new"
    with pytest.raises(FileExistsError), creating(path) as part:
        write(part)
    with pytest.raises(ValueError, match="half"), creating(tmp_path / "other") as part:
        fail(write(part))
    assert list(tmp_path.iterdir()) == [path]


def test_small_files_are_created_once_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    assert create_exclusive(path, b"mine")
    assert not create_exclusive(path, b"yours")
    replace(path, b"later")
    assert path.read_bytes() == b"later"
    assert list(tmp_path.iterdir()) == [path]

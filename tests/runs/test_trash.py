"""What is removed is one run, whole, and it comes back until the trash is emptied; labels stay with their run."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from instep.cli.main import main
from instep.errors import FolderInUseError, UsageError
from instep.runs import find_runs
from instep.runs.trash import empty, find_trash, remove
from tests.checkpoint.test_lease import holder
from tests.runs.test_folder import write_run
from tests.trainer.toys import Toy, loader, quiet


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and where each link leads."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {
        str(path.relative_to(folder)): os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        for path in found
    }


def test_a_run_is_moved_whole_and_comes_back_and_nothing_behind_its_links_is_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, outside = write_run(tmp_path / "runs/version_0"), tmp_path / "outside"
    other = write_run(tmp_path / "runs/version_1")
    outside.mkdir()
    (outside / "kept").write_text("mine")
    (run / "link").symlink_to(outside)
    (run / "file").symlink_to(outside / "kept")
    (run / "loggers").mkdir()
    (run / "loggers/up").symlink_to("../..")
    before = files(run)
    with pytest.raises(SystemExit):
        main(["runs", "rm"])
    assert main(["runs", "rm", str(run)]) == 1, "nobody can be asked here"
    assert files(run) == before
    shown = capsys.readouterr().err
    assert "version_0: 3 files, 0.000" in shown
    assert "links, whose targets stay: " in shown
    assert main(["runs", "rm", str(run), "--yes"]) == 0
    assert not run.exists()
    assert [each.folder for each in find_runs(tmp_path)] == [other]
    back = capsys.readouterr().out.splitlines()[-1].strip()
    subprocess.run(shlex.split(back), check=True)
    assert files(run) == before
    remove(run)
    assert main(["runs", "empty-trash", "."]) == 1
    assert main(["runs", "empty-trash", ".", "--yes"]) == 0
    assert (find_trash(tmp_path), files(outside)) == ([], {"kept": b"mine"})
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"version_1"}


def test_a_run_that_another_process_trains_is_never_moved(tmp_path: Path) -> None:
    mine = {"host": socket.gethostname(), "pid": os.getpid()}
    running = write_run(tmp_path / "runs/version_0", status="running", **mine)
    with pytest.raises(UsageError, match=r"is running \(host .*, pid [0-9]+\): stop it first"):
        remove(running)
    saving = write_run(tmp_path / "runs/version_1")  # its status says that it is done; its lease says the truth
    (saving / "checkpoints").mkdir()
    with holder(saving / "checkpoints") as process:
        assert process.stdout.readline()
        with pytest.raises(FolderInUseError, match="is in use"):
            remove(saving)
    assert len(find_runs(tmp_path)) == 2
    assert remove(saving).is_dir(), "its process is gone"


def test_what_is_no_run_of_this_user_is_never_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "runs/version_0")
    (tmp_path / "runs/linked").symlink_to(run)
    lightning = tmp_path / "lightning_logs/version_0"
    lightning.mkdir(parents=True)
    (lightning / "metrics.csv").write_text("step,loss\n1,2\n")
    for path, why in (
        (tmp_path / "runs/linked", "is a link"),
        (lightning, "is no run of instep"),
        (tmp_path / "runs", "is no run of instep"),
        (tmp_path / "missing", "is no run of instep"),
    ):
        with pytest.raises(UsageError, match=why):
            remove(path)
        assert main(["runs", "rm", str(path), "--yes"]) == 1
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(UsageError, match="belongs to another user"):
            remove(run)
    trash = tmp_path / f"runs/.instep_trash-{os.geteuid()}"
    trash.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="is no folder of yours"):
        remove(run)
    assert find_trash(tmp_path) == []
    trash.unlink()
    (trash / "not ours").mkdir(parents=True)
    moved = remove(run)
    assert find_trash(tmp_path) == [moved]
    for path in (trash, trash / "not ours", tmp_path / "lightning_logs"):
        with pytest.raises(UsageError, match="is no removed run"):
            empty(path)
    empty(moved)
    assert (trash / "not ours").is_dir()


def test_a_run_has_a_name_from_its_start_and_labels_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = quiet(max_steps=1, default_root_dir=tmp_path, name="first try", logger="csv")
    trainer.fit(Toy(), loader())
    folder = str(Path(trainer.log_dir or ""))
    for words in (
        ["name", "first try", "baseline, <b>warm</b>"],
        ["tag", folder, "paper", "good"],
        ["tag", "baseline, <b>warm</b>", "good", "--remove"],
        ["note", folder, "two\nlines"],
        ["archive", folder],
    ):
        assert main(["runs", *words]) == 0, words
    assert json.loads(Path(folder, "label.json").read_text()) == {
        "name": "baseline, <b>warm</b>", "tags": ["paper"], "note": "two\nlines", "archived": True
    }  # fmt: skip
    capsys.readouterr()
    assert main(["runs", "ls"]) == 0
    assert "baseline" not in capsys.readouterr().out
    assert main(["runs", "ls", "--all", "--where", "tag=paper"]) == 0
    assert "baseline, <b>warm</b>" in capsys.readouterr().out
    for words, why in (
        (["name", folder, "a\x1b[2J"], r"the character \\x1b"),
        (["name", folder, "x" * 10_000], "10,000 characters"),
        (["note", folder, "x\u202e"], r"the character \\u202e"),
        (["tag", folder, "a b"], "is no word"),
        (["tag", folder, *map(str, range(40))], "at most 32 tags"),
        (["name", "nowhere", "x"], "none of the 1 runs below"),
    ):
        assert main(["runs", *words]) == 1, words
        assert re.search(why, capsys.readouterr().err), words
    assert main(["runs", "name", folder, ""]) == 0
    assert find_runs(tmp_path)[0].label.name == "first try"

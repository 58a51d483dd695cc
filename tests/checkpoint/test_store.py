from __future__ import annotations

import math
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from instep.checkpoint import CheckpointStore, LocalFiles, Writer, find_checkpoint, is_checkpoint, scan
from instep.checkpoint.manifest import Manifest, read_manifest
from instep.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FolderInUseError,
    SettingError,
    UnsavableStateError,
)
from tests.checkpoint.helpers import flip, left_over, path_of, value_of, writes
from tests.helpers.faults import FaultPlan


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


def test_what_is_saved_verifies_and_reads_back(store: CheckpointStore) -> None:
    path = store.save(1200, writes(0.5), info={"kind": "full", "epoch": 3}, run_id="abc")
    assert path == store.root / "step-00001200-1"
    assert store.verify(path) == []
    assert left_over(store) == []
    reader = store.read(path)
    assert value_of(reader) == 0.5
    assert reader.state("rank-0")["rank"] == 0
    assert reader.has("trainer.json")
    assert not reader.has("manifest.json")
    (found,) = store.scan()
    assert (found.path, found.step, found.attempt, found.kind) == (path, 1200, 1, "full")
    assert found.manifest.run_id == "abc"
    assert found.manifest.world_size == 1
    assert found.manifest.info == {"kind": "full", "epoch": 3}
    assert set(found.manifest.versions) == {"instep", "torch", "python"}
    assert set(found.manifest.files) == {path.name for path in path.iterdir()} - {"manifest.json"}


def test_files_that_somebody_else_writes_into_the_folder_become_part_of_it(store: CheckpointStore) -> None:
    store.files.trace = log = FaultPlan()

    def write(writer: Writer) -> None:
        writer.json("own.json", 1)
        (writer.folder / "model" / ".cache").mkdir(parents=True)
        for name in ("notes.txt", ".hidden", "model/config.json", "model/manifest.json"):
            (writer.folder / name).write_text(name)

    path = store.save(1, write)
    files = store.read(path).manifest.files
    # A manifest's name is free in a folder below.
    assert sorted(files) == ["model/config.json", "model/manifest.json", "notes.txt", "own.json"]
    synced = {p.name for op, p in log.operations if op in ("fsync", "fsync_folder")}
    assert {"notes.txt", "config.json", "model"} <= synced
    assert store.verify(path) == []
    flip(path / "model" / "config.json", 0)
    assert len(store.verify(path)) == 1
    store.delete(path)
    assert not path.exists()


def test_weights_are_a_plain_safetensors_file(store: CheckpointStore) -> None:
    path = store.save(1, writes(2.0))
    assert load_file(path / "model.safetensors")["weight"].tolist() == [2.0] * 40


def test_the_same_step_again_is_a_new_attempt(store: CheckpointStore) -> None:
    first, second = store.save(7, writes(1.0)), store.save(7, writes(2.0))
    assert (first.name, second.name) == ("step-00000007-1", "step-00000007-2")
    assert (value_of(store.read(first)), value_of(store.read(second))) == (1.0, 2.0)
    newest = store.newest_verified()
    assert newest is not None
    assert newest.path == second


def test_one_number_orders_all_saves_of_a_step_whatever_their_names(store: CheckpointStore) -> None:
    paths = [
        store.save(7, writes(1.0)),
        store.save(7, writes(2.0), name="best"),
        store.save(9, writes(3.0), name="best"),
    ]
    assert [path.name for path in paths] == ["step-00000007-1", "best-2", "best-3"]
    assert [found.path.name for found in store.scan()] == ["best-3", "best-2", "step-00000007-1"]


def test_a_broken_folder_is_never_written_into(store: CheckpointStore) -> None:
    (store.root / "step-00000007-4").mkdir(parents=True)
    assert store.save(7, writes(1.0)).name == "step-00000007-5"


@pytest.mark.parametrize("name", ["", ".x", "a/b", "..", "a\\b", "x" * 200])
def test_names_that_are_no_plain_word_cannot_name_a_checkpoint(store: CheckpointStore, name: str) -> None:
    with pytest.raises(SettingError, match="cannot name a checkpoint"):
        store.save(1, writes(1.0), name=name)
    assert not store.root.exists()


def test_a_negative_step_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(SettingError, match="no count of steps"):
        store.save(-1, writes(1.0))


@pytest.mark.parametrize("name", ["../x", "manifest.json", ".x", "a/b"])
def test_wrong_file_names(store: CheckpointStore, name: str) -> None:
    with pytest.raises(SettingError, match="cannot name a file"):
        store.save(1, lambda writer: writer.json(name, 1))
    assert left_over(store) == []


def test_an_empty_store_has_no_newest_and_no_best_checkpoint(store: CheckpointStore) -> None:
    assert store.scan() == []
    assert store.newest_verified() is None
    assert store.resolve("auto") is None
    for keyword in ("last", "best"):
        with pytest.raises(CheckpointNotFoundError, match="has no checkpoint"):
            store.resolve(keyword)
    assert store.sweep() == []
    assert not store.root.exists()


# What fails leaves nothing.


def test_a_save_that_cannot_be_committed_leaves_what_another_one_committed_meanwhile(store: CheckpointStore) -> None:
    other = CheckpointStore(store.root, LocalFiles())
    theirs: list[Path] = []

    def overtake(operation: str, path: Path, detail: Any) -> None:
        if operation == "rename":
            store.files.trace = None
            theirs.append(detail)
            shutil.copytree(path, detail)

    store.files.trace = overtake
    with pytest.raises(CheckpointError, match="could not commit"):
        store.save(1, writes(1.0))
    assert [info.path for info in other.scan()] == theirs
    assert other.verify(theirs[0]) == []
    assert left_over(store) == []


def test_two_saves_of_one_process_do_not_share_a_folder(store: CheckpointStore) -> None:
    inner: list[Path] = []

    def write(writer: Writer) -> None:
        writer.json("before.json", 1)
        inner.append(CheckpointStore(store.root).save(1, writes(2.0)))
        writes(1.0)(writer)

    outer = store.save(1, write)
    assert [value_of(store.read(path)) for path in (outer, *inner)] == [1.0, 2.0]
    assert store.verify(outer) == store.verify(inner[0]) == []


def test_an_exception_while_writing_removes_what_was_written(store: CheckpointStore) -> None:
    store.save(1, writes(1.0))

    def write(writer: Writer) -> None:
        writes(2.0)(writer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(2, write)
    assert [path.name for path in store.root.iterdir()] == ["step-00000001-1"]


def test_state_that_cannot_be_encoded_is_named(store: CheckpointStore) -> None:
    with pytest.raises(UnsavableStateError, match=r"callbacks\['ema'\]\[1\] is a builtins.object"):
        store.save(1, lambda writer: writer.state("callbacks", {"ema": [1, object()]}))
    with pytest.raises(UnsavableStateError, match=r"trainer.json is not JSON.*writer.state"):
        store.save(1, lambda writer: writer.json("trainer.json", {"score": math.nan}))
    with pytest.raises(UnsavableStateError, match="the checkpoint's info"):
        store.save(1, writes(1.0), info={"score": torch.ones(1)})
    assert list(store.root.iterdir()) == []


def test_two_files_of_one_name(store: CheckpointStore) -> None:
    def write(writer: Writer) -> None:
        writer.json("a.json", 1)
        writer.json("a.json", 2)

    with pytest.raises(CheckpointError, match="written twice"):
        store.save(1, write)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_save_in_a_read_only_folder_is_an_error_that_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="could not start a checkpoint"):
        CheckpointStore(tmp_path / "x").save(1, writes(1.0))


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(CheckpointError, match=r"could not (start|list)"):
        CheckpointStore(tmp_path / "x").save(1, writes(1.0))
    with pytest.raises(CheckpointError, match="could not list"):
        CheckpointStore(tmp_path / "x").scan()


def test_the_root_does_not_move_with_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore("here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.save(1, writes(1.0)).parent == tmp_path / "here"


# What is on the disk when save returns.


def test_the_order_of_operations_survives_a_power_loss(store: CheckpointStore) -> None:
    store.files.trace = log = FaultPlan()
    final = store.save(1, writes(1.0))
    synced: set[Path] = set()
    written: set[Path] = set()
    operations = log.operations
    (temp,) = {path for operation, path in operations if operation == "rename"}
    rename = operations.index(("rename", temp))
    for operation, path in operations[:rename]:
        if operation == "create" and path.name == "manifest.json":
            assert synced == written, "the manifest came before a file was on the disk"
        if operation in ("create", "write"):
            assert path not in synced, f"{path} was changed after its fsync"
            written.add(path)
        elif operation == "fsync":
            synced.add(path)
    assert {path.name for path in synced} == {path.name for path in final.iterdir()}
    assert operations[rename - 1] == ("fsync_folder", temp)
    assert operations[rename + 1 :] == [("fsync_folder", store.root)]
    made = [path for operation, path in operations if operation == "mkdir"]
    for folder in made[:-1]:
        assert ("fsync_folder", folder.parent) in operations[:rename]


def test_no_file_is_a_pickle(store: CheckpointStore) -> None:
    path = store.save(1, writes(1.0))
    for file in path.iterdir():
        data = file.read_bytes()
        assert not zipfile.is_zipfile(file)
        assert data[:1] != b"\x80"  # the first byte of every pickle since protocol 2
        if file.suffix == ".safetensors":
            assert data[8:9] == b"{"
        else:
            assert file.suffix == ".json"
            assert data[:1] in b'{["'


# Torn and damaged folders are never taken.


def damage_no_manifest(path: Path) -> str:
    (path / "manifest.json").unlink()
    return "has no manifest.json"


def damage_empty_manifest(path: Path) -> str:
    (path / "manifest.json").write_bytes(b"")
    return "manifest.json is cut short or damaged"


def damage_manifest_bit(path: Path) -> str:
    flip(path / "manifest.json", 30)
    return "manifest.json is cut short or damaged"


def damage_missing(path: Path) -> str:
    (path / "optimizer.safetensors").unlink()
    return "optimizer.safetensors is missing"


def damage_truncated(path: Path) -> str:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-1])
    return f"model.safetensors has {len(data) - 1} bytes instead of {len(data)}"


def damage_emptied(path: Path) -> str:
    (path / "trainer.json").write_bytes(b"")
    return "trainer.json has 0 bytes"


def damage_header_length(path: Path) -> str:
    flip(path / "model.safetensors", 0, 3)
    return "model.safetensors differs"


def damage_header(path: Path) -> str:
    flip(path / "model.safetensors", 30)
    return "model.safetensors differs"


def damage_tensor(path: Path) -> str:
    flip(path / "rank-0.safetensors", -1, 6)
    return "rank-0.safetensors differs"


def damage_json(path: Path) -> str:
    flip(path / "trainer.json", 12)
    return "trainer.json differs"


def damage_folder_for_file(path: Path) -> str:
    (path / "trainer.json").unlink()
    (path / "trainer.json").mkdir()
    return "trainer.json"


DAMAGES = [function for name, function in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda function: function.__name__[7:])
def test_a_damaged_checkpoint_is_passed_over_and_the_reason_named(
    store: CheckpointStore, damage: Callable[[Path], str]
) -> None:
    older, newer = store.save(1, writes(1.0)), store.save(2, writes(2.0))
    why = damage(newer)
    assert any(why in problem for problem in store.verify(newer))
    assert store.verify(older) == []
    for choose in (lambda: store.resolve("auto"), lambda: store.resolve("last")):
        with pytest.warns(UserWarning, match="step-00000002-1 is passed over") as caught:
            assert path_of(choose()) == older
        assert why in str(caught[0].message)
    with pytest.raises(CheckpointError, match=r"step-00000002-1"):
        value_of(store.read(newer))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.json", "rank-0.safetensors", "trainer.json"])
def test_every_byte_is_checked(store: CheckpointStore, name: str) -> None:
    path = store.save(1, writes(1.0))
    whole = (path / name).read_bytes()
    for position in range(len(whole)):
        flip(path / name, position, position % 8)
        (problem,) = store.verify(path)
        assert problem.startswith(f"{name} differs")
        (path / name).write_bytes(whole)
    assert store.verify(path) == []


def test_a_folder_without_a_checkpoint_that_verifies_is_an_error(store: CheckpointStore) -> None:
    path = store.save(1, writes(1.0))
    (path / "trainer.json").unlink()
    for keyword, advice in (("auto", "start afresh"), ("last", "path of another one\\.")):
        with (
            pytest.warns(UserWarning, match="passed over"),
            pytest.raises(CorruptCheckpointError, match=rf"(?s)none .* verifies:\n  step-00000001-1: .*{advice}"),
        ):
            store.resolve(keyword)
    with pytest.warns(UserWarning, match="passed over"):
        assert store.newest_verified() is None


def test_an_older_broken_one_is_not_looked_at(store: CheckpointStore) -> None:
    older, newer = store.save(1, writes(1.0)), store.save(2, writes(2.0))
    (older / "manifest.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert path_of(store.resolve("last")) == newer


def test_stray_files_and_folders_do_not_matter(store: CheckpointStore) -> None:
    path = store.save(1, writes(1.0))
    (path / "notes.txt").write_text("mine")
    (path / "model.pt").write_bytes(b"\x80\x04.")
    (store.root / "latest").write_text("step-00000009-1")
    (store.root / "plots-2").mkdir()
    (store.root / "plots-2" / "a.png").write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert path_of(store.resolve("last")) == path
    assert store.verify(path) == []


def test_a_copy_of_a_checkpoint_under_a_name_of_ones_own_is_a_checkpoint(store: CheckpointStore) -> None:
    path = store.save(1, writes(1.0))
    path.rename(store.root / "good one")
    assert is_checkpoint(store.root / "good one")
    assert path_of(store.resolve("last")) == store.root / "good one"


def test_reading_without_verification_is_for_what_was_verified(store: CheckpointStore) -> None:
    path = store.save(1, writes(1.0))
    flip(path / "rank-0.safetensors", -1)
    assert store.read(path, verify=False).state("rank-0")["rank"] == 0
    with pytest.raises(CorruptCheckpointError, match=r"rank-0\.safetensors differs"):
        store.read(path).state("rank-0")


def test_reading_a_missing_file_names_those_that_are_there(store: CheckpointStore) -> None:
    path = store.save(1, writes(1.0))
    with pytest.raises(
        CheckpointNotFoundError, match=r"has no scheduler.json; it has model.safetensors, optimizer.json"
    ):
        store.read(path).state("scheduler")
    with pytest.raises(CheckpointNotFoundError, match="has no manifest"):
        store.read("step-00000099-1")
    assert value_of(store.read(path.name)) == 1.0


# Keywords and paths.


def test_best_is_verified_too(store: CheckpointStore) -> None:
    paths = [
        store.save(step, writes(1.0), info={"monitor": "acc", "mode": "max", "score": score, "kind": kind})
        for step, (score, kind) in enumerate([(0.5, "full"), (0.9, "weights"), (math.nan, "full"), (0.7, "full")])
    ]
    assert path_of(store.resolve("best")) == paths[1]
    assert path_of(store.resolve("best", kind="full")) == paths[3]
    flip(paths[1] / "trainer.json", 3)
    with pytest.warns(UserWarning, match="step-00000001-1 is passed over"):
        assert path_of(store.resolve("best")) == paths[3]
    with pytest.raises(CheckpointNotFoundError, match="with a score"):
        store.resolve("best", monitor="loss")


def test_a_run_continues_from_full_checkpoints_only(store: CheckpointStore) -> None:
    full = store.save(1, writes(1.0))
    weights = store.save(2, writes(2.0), info={"kind": "weights"})
    assert path_of(store.resolve("auto")) == full
    assert path_of(store.resolve("last")) == weights
    assert path_of(store.resolve("last", kind="full")) == full


def test_a_path_without_the_attempt_is_the_latest_one(store: CheckpointStore) -> None:
    for step in (1, 12, 2):
        store.save(step, writes(1.0), name="mine")
    assert find_checkpoint(store.root / "mine").name == "mine-3"
    assert find_checkpoint(store.root / "mine-1").name == "mine-1"
    assert [find_checkpoint(store.root / name).name for name in ("mine.ckpt", "mine-1.ckpt", "last.ckpt")] == [
        "mine-3", "mine-1", "mine-3"
    ]  # as Lightning's users write it; "last" is what was saved last  # fmt: skip
    with pytest.raises(CheckpointNotFoundError, match=r"there is no checkpoint .*other.*mine-3, mine-2, mine-1"):
        find_checkpoint(store.root / "other")
    (store.root / "mine-3" / "manifest.json").unlink()
    assert find_checkpoint(store.root / "mine").name == "mine-2"
    with pytest.raises(CheckpointNotFoundError, match="has no manifest"):
        find_checkpoint(store.root / "mine-3")
    (store.root / "mine-2" / "manifest.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match="manifest"):
        find_checkpoint(store.root / "mine-2")


# Deleting and sweeping.


def test_deleting_a_checkpoint_twice_leaves_the_others(store: CheckpointStore) -> None:
    kept, gone = store.save(1, writes(1.0)), store.save(2, writes(2.0))
    store.delete(gone)
    store.delete(gone)
    assert [found.path for found in store.scan()] == [kept]
    assert left_over(store) == []


def test_delete_leaves_everything_else_alone(store: CheckpointStore, tmp_path: Path) -> None:
    path = store.save(1, writes(1.0))
    other = CheckpointStore(tmp_path / "other")
    (store.root / "notes").mkdir()
    for victim in (other.save(1, writes(1.0)), store.root, store.root / "notes", path / "model.safetensors"):
        with pytest.raises(CheckpointError, match="left alone"):
            store.delete(victim)
        assert victim.exists()


def test_sweep_removes_what_the_dead_left_and_nothing_else(store: CheckpointStore) -> None:
    kept = store.save(1, writes(1.0))
    dead = {".deleting-step-00000001-1"}
    for name in dead | {".saving-x-1@elsewhere-1-01234567", ".git"}:
        (store.root / name).mkdir()
        (store.root / name / "file").write_text("")

    def write(writer: Writer) -> None:
        (mine,) = (path for path in store.root.iterdir() if path.name.startswith(".saving-step-00000002"))
        assert {path.name for path in store.sweep()} == dead
        assert mine.exists()
        writes(2.0)(writer)

    store.save(2, write)
    assert left_over(store) == [".git", ".saving-x-1@elsewhere-1-01234567"]
    store.sweep(of_other_hosts=True)
    assert left_over(store) == [".git"]
    assert len(store.scan()) == 2
    assert kept.exists()


def test_a_failed_clean_up_does_not_hide_the_error(store: CheckpointStore) -> None:
    def trace(operation: str, path: Path, detail: object) -> None:
        if operation == "unlink":
            raise OSError(5, "Input/output error")

    failing = CheckpointStore(store.root, LocalFiles(trace))

    def write(writer: Writer) -> None:
        writes(1.0)(writer)
        raise ValueError("the error")

    with pytest.warns(UserWarning, match="could not remove"), pytest.raises(ValueError, match="the error"):
        failing.save(1, write)
    assert store.scan() == []
    assert value_of(store.read(store.save(1, writes(3.0)))) == 3.0


def test_a_run_folder_for_a_checkpoint_is_answered_with_the_newest_in_it(tmp_path: Path) -> None:
    newest = CheckpointStore(tmp_path / "version_0" / "checkpoints").save(3, lambda writer: writer.state("trainer", {}))
    with pytest.raises(CheckpointNotFoundError, match=f"The newest in it is {newest}"):
        find_checkpoint(tmp_path / "version_0")


def test_a_save_reads_no_manifest_whose_step_it_knows_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, writes(1.0))
        store.save(step, writes(1.0), name="best")
    read: list[str] = []

    def noted(folder: Path) -> Manifest:
        read.append(folder.name)
        return read_manifest(folder)

    monkeypatch.setattr(scan, "read_manifest", noted)
    store.save(3, writes(1.0))
    store.save(2, writes(1.0), name="other")
    assert read == ["best-3", "step-00000003-1"], "each one that came since the last look, once"
    assert CheckpointStore(tmp_path).scan()[0].path.name == "other-4"  # what is loaded is read anew
    later = tmp_path / "best-3" / "manifest.json"
    later.write_bytes(replace(read_manifest(later.parent), step=2, attempt=9).to_bytes())
    assert store.save(2, writes(1.0), name="again").name == "again-10"  # another file under the same name


def test_a_word_that_means_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="newest"):
        CheckpointStore(tmp_path).resolve("newest")


def test_a_folder_that_is_given_twice_is_looked_at_once(store: CheckpointStore) -> None:
    path = store.save(1, writes(1.0))
    flip(path / "model.safetensors", -1)
    with pytest.warns(UserWarning, match="passed over") as caught:
        assert store.newest_verified(also=[store.root]) is None
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="passed over") as caught, pytest.raises(CorruptCheckpointError):
        store.resolve("last", also=[store.root])
    assert len(caught) == 1


def test_nothing_is_committed_by_a_run_that_lost_its_folder_while_it_wrote(store: CheckpointStore) -> None:
    class Lost:
        gone, serial = False, None

        def check(self) -> None:
            if self.gone:
                raise FolderInUseError("it is another run's now")

    lease = Lost()

    def write(writer: Writer) -> None:
        writes(1.0)(writer)
        lease.gone = True

    store.lease = lease  # type: ignore[assignment]
    with pytest.raises(FolderInUseError):
        store.save(1, write)
    assert store.scan() == []
    assert left_over(store) == []

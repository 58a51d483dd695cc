"""A store on a real object store, and on fsspec's memory."""

from __future__ import annotations

import errno
import gc
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoint import (
    CheckpointStore,
    find_checkpoint,
    hashing,
    is_checkpoint,
    load_weights,
    remote,
    write_tensors,
)
from instep.checkpoint import files as retry
from instep.checkpoint.files import LocalFiles
from instep.checkpoint.hashing import hash_file
from instep.checkpoint.remote import RemoteFiles
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, MissingPackageError
from instep.state import PartialState
from instep.utils.paths import to_path
from tests.checkpoint.helpers import ACTIONS, NEW, OLD, path_of, save_same_step, value_of, writes
from tests.helpers.faults import FaultPlan, exit_status_of
from tests.helpers.object_store import Bucket, need_packages
from tests.helpers.spawn import run_ranks


@pytest.fixture(params=["s3", "memory"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The folder of a run."""
    need_packages()
    if request.param == "s3":
        yield f"{request.getfixturevalue('bucket').url}/run"
    else:
        import fsspec  # late: optional

        name = f"memory://{uuid.uuid4().hex}"
        yield f"{name}/run"
        fsspec.filesystem("memory").store.clear()


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr(retry, "sleep", made.append)
    return made


def test_everything_that_a_folder_can(url: str) -> None:
    store = CheckpointStore(url)
    assert isinstance(store.files, RemoteFiles)
    assert store.scan() == []
    assert store.resolve("auto") is None
    old = store.save(3, writes(OLD), info={"epoch": 1})
    new = store.save(3, writes(NEW))
    assert (str(old), str(new)) == (f"{url}/step-00000003-1", f"{url}/step-00000003-2")
    assert [info.path for info in store.scan()] == [new, old]
    assert store.scan()[1].manifest.info == {"epoch": 1}
    assert store.verify(new) == store.verify("step-00000003-2") == store.verify_together(str(new)) == []
    assert value_of(store.read(new)) == value_of(store.read(new, verify=False)) == NEW
    assert path_of(store.resolve("last")) == new
    assert is_checkpoint(str(new))
    assert find_checkpoint(f"{url}/step-00000003") == new
    assert load_weights(f"{url}/step-00000003")["tied"][3] == NEW
    store.delete(new)
    store.delete(new)
    assert path_of(store.resolve("last")) == old
    assert CheckpointStore(url).sweep(of_other_hosts=True) == []
    with pytest.raises(CheckpointNotFoundError, match="step-00000009"):
        find_checkpoint(f"{url}/step-00000009")
    with pytest.raises(CheckpointError, match="not a checkpoint of"):
        store.delete("memory://elsewhere/step-00000003-1")


def test_a_file_url_is_the_local_disk(tmp_path: Path) -> None:
    need_packages()
    store = CheckpointStore(f"file://{tmp_path}/run")
    assert isinstance(store.files, LocalFiles)
    assert store.save(1, writes(OLD)) == tmp_path / "run" / "step-00000001-1"


def test_what_is_damaged_is_passed_over(bucket: Bucket) -> None:
    store = CheckpointStore(f"{bucket.url}/run")
    paths = [store.save(step, writes(float(step))) for step in range(5)]
    bucket.put("run/step-00000004-1/manifest.json", bucket.get("run/step-00000004-1/manifest.json")[:-9])
    bucket.put("run/step-00000003-1/model.safetensors", bucket.get("run/step-00000003-1/model.safetensors")[:-1])
    flipped = bytearray(bucket.get("run/step-00000002-1/optimizer.safetensors"))
    flipped[-1] ^= 1
    bucket.put("run/step-00000002-1/optimizer.safetensors", bytes(flipped))
    bucket.client.delete_object(Bucket=bucket.name, Key="run/step-00000001-1/trainer.json")
    with pytest.warns(UserWarning, match="passed over") as caught:
        assert path_of(store.resolve("last")) == paths[0]
    texts = [str(warning.message) for warning in caught]
    for text, what in zip(texts, ["cut short or damaged", "bytes instead of", "differs", "is missing"], strict=True):
        assert what in text
    with pytest.raises(CorruptCheckpointError, match="differs"):
        store.read(paths[2]).state("optimizer")
    with pytest.raises(CorruptCheckpointError, match=r"trainer.json is missing"):
        store.read(paths[1]).json("trainer.json")


def test_a_folder_without_a_manifest_is_no_checkpoint_and_no_cause_for_a_warning(url: str) -> None:
    store = CheckpointStore(url)
    kept = store.save(1, writes(OLD))

    def write(writer: Any) -> None:
        writes(NEW)(writer)
        assert path_of(store.resolve("last")) == kept  # while the files of the newer one are there already
        assert [path.name for path, _ in store.files.leftovers(store.root)] == ["step-00000002-1"]
        assert CheckpointStore(url).sweep(of_other_hosts=True) == []  # who writes there lives

    store.save(2, write)


def test_what_a_dead_save_left_is_swept_and_nothing_else(bucket: Bucket) -> None:
    store = CheckpointStore(f"{bucket.url}/run")
    kept = store.save(1, writes(OLD))
    bucket.put("run/data-7/mine.txt", b"a folder of somebody else's that is named like a checkpoint")
    bucket.put("run/step-00000002-1/.owner", b"elsewhere-17-0123abcd")
    bucket.put("run/step-00000002-1/model.safetensors", b"a part")
    bucket.put("run/step-00000003-1/.owner", b"")
    assert [path.name for path in store.sweep()] == ["step-00000003-1"]
    assert [path.name for path in store.sweep(of_other_hosts=True)] == ["step-00000002-1"]
    assert {key.split("/")[1] for key in bucket.keys()} == {kept.name, "data-7"}  # noqa: SIM118


def test_a_name_that_another_save_has_taken_is_left_to_it(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(f"{bucket.url}/run")
    folders = RemoteFiles.folders

    def folders_before_the_other_began(self: RemoteFiles, root: Path) -> list[str]:
        found = folders(self, root)
        bucket.put("run/step-00000001-1/.owner", b"elsewhere-17-0123abcd")
        return found

    monkeypatch.setattr(RemoteFiles, "folders", folders_before_the_other_began)
    assert store.save(1, writes(OLD)).name == "step-00000001-2"
    assert bucket.get("run/step-00000001-1/.owner") == b"elsewhere-17-0123abcd"


def test_listings_are_not_cached(bucket: Bucket) -> None:
    import upath  # late: optional

    given = CheckpointStore(upath.UPath(f"{bucket.url}/run"))  # its options would let fsspec cache
    assert given.scan() == []
    path = given.save(1, writes(OLD))
    assert len(given.scan()) == 1
    for key in bucket.keys():  # noqa: SIM118
        bucket.client.delete_object(Bucket=bucket.name, Key=key)
    assert given.scan() == []
    assert not is_checkpoint(path)


def test_a_large_file_is_uploaded_in_parts(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PART_BYTES", 5 * 2**20)
    monkeypatch.setattr(hashing, "_WRITE_BYTES", 5 * 2**20)
    monkeypatch.setattr(remote, "_RANGE_BYTES", 2**20 + 1)
    store = CheckpointStore(f"{bucket.url}/run")
    weight = torch.randn(3 * 2**20)
    path = store.save(1, lambda writer: writer.tensors("model.safetensors", {"w": weight, "short": weight[:7]}))
    tag = bucket.client.head_object(Bucket=bucket.name, Key="run/step-00000001-1/model.safetensors")["ETag"]
    assert tag.strip('"').endswith("-3"), "the tag of an object says in how many parts it came"
    assert store.verify(path) == []
    assert torch.equal(store.read(path).tensors("model.safetensors")["w"], weight)
    assert bucket.unfinished() == []


def test_a_failed_upload_is_given_up_and_never_finished(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PART_BYTES", 5 * 2**20)
    seen: list[list[str]] = []

    def trace(operation: str, path: Path, detail: Any) -> None:
        if operation == "close" and path.name == "model.safetensors":
            seen.append(bucket.unfinished())
            raise OSError(errno.EACCES, "no")

    store = CheckpointStore(f"{bucket.url}/run", RemoteFiles(trace))
    with pytest.raises(CheckpointError, match=r"could not write s3://.*model.safetensors: no after 12,583,\d+ of"):
        store.save(1, lambda writer: writer.tensors("model.safetensors", {"w": torch.zeros(3 * 2**20)}))
    gc.collect()
    assert seen == [["run/step-00000001-1/model.safetensors"]]
    assert bucket.unfinished() == []
    assert bucket.keys() == []


def test_the_errors_of_a_library_are_os_errors(bucket: Bucket, no_pauses: list[float]) -> None:
    from botocore.exceptions import EndpointConnectionError, NoCredentialsError  # late: optional

    store = CheckpointStore(f"{bucket.url}/run")
    fs: Any = store.root.fs  # type: ignore[attr-defined]
    pipe_file, left = fs.pipe_file, [1]

    def unreachable_once(path: str, *args: Any, **kwargs: Any) -> Any:
        if path.endswith("manifest.json") and left[0]:
            left[0] -= 1
            raise EndpointConnectionError(endpoint_url="http://nowhere")
        return pipe_file(path, *args, **kwargs)

    fs.pipe_file = unreachable_once
    try:
        with pytest.warns(UserWarning, match=r"is tried again in another folder: .*nowhere"):
            assert store.save(1, writes(OLD)).name == "step-00000001-2"
        assert no_pauses == [retry.PAUSES_S[0]]

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise NoCredentialsError

        fs.pipe_file = refuse
        with pytest.raises(
            CheckpointError, match=r"could not start a checkpoint in s3://.*Unable to locate credentials"
        ):
            store.save(2, writes(NEW))
        assert len(no_pauses) == 1
    finally:
        del fs.pipe_file


class Odd(OSError):
    """Made of other things than a number and a text."""

    def __init__(self, key: str, *, cause: str) -> None:
        super().__init__(f"{key}: {cause}")


def test_an_error_of_a_kind_of_its_own_keeps_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    need_packages()
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}/run")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Odd("run", cause="the server is odd")

    monkeypatch.setattr(store.root.fs, "pipe_file", refuse)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="the server is odd"):
        store.save(1, writes(OLD))


def test_a_file_that_does_not_say_how_much_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of SFTP."""
    need_packages()
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}/run")
    fs: Any = store.root.fs  # type: ignore[attr-defined]
    memory_file: Any = type(fs.open(f"/{uuid.uuid4().hex}", "wb"))
    write = memory_file.write
    monkeypatch.setattr(memory_file, "write", lambda self, data: write(self, data) and None)
    path = store.save(1, writes(NEW))
    assert value_of(store.read(path)) == NEW


def test_a_bucket_that_does_not_exist_is_named(bucket: Bucket) -> None:
    with pytest.raises(CheckpointError, match=r"s3://no-such-bucket/run: .*does not exist"):
        CheckpointStore("s3://no-such-bucket/run").save(1, writes(OLD))


def test_small_objects_appear_once_and_change_at_once(url: str) -> None:
    files, path = RemoteFiles(), to_path(url) / ".lease"
    assert files.create_exclusive(path, b"one")
    assert not files.create_exclusive(path, b"two")
    assert files.read(path, 100) == b"one"
    files.replace(path, b"three")
    assert files.read(path, 100) == b"three"
    assert files.entries(to_path(url)) == {".lease": False}
    files.remove(path)
    files.remove(path)
    assert files.entries(to_path(url)) == {}


def test_weights_alone_from_a_url(url: str, tmp_path: Path) -> None:
    root = to_path(url)
    weights = {"w": torch.randn(9)}
    record = write_tensors(root / "x.safetensors", weights)
    assert torch.equal(load_weights(f"{url}/x.safetensors")["w"], weights["w"])
    torch.save(weights, tmp_path / "x.pt")
    (root / "x.pt").write_bytes((tmp_path / "x.pt").read_bytes())
    assert torch.equal(load_weights(f"{url}/x.pt")["w"], weights["w"])
    write_tensors(tmp_path / "x.safetensors", weights)
    assert record == hash_file(tmp_path / "x.safetensors")


def test_files_of_others_are_taken_in(url: str) -> None:
    def write(writer: Any) -> None:
        writes(OLD)(writer)
        (writer.folder / "tokenizer" / "vocabulary.txt").write_text("a b c")

    store = CheckpointStore(url)
    path = store.save(1, write)
    assert "tokenizer/vocabulary.txt" in store.scan()[0].manifest.files
    assert store.verify(path) == []


def test_a_missing_package_is_named_with_its_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "upath", None)
    with pytest.raises(MissingPackageError, match=r"s3://b/run needs .*pip install 'instep\[remote\]'"):
        CheckpointStore("s3://b/run")


# ---- killed


class Sent(FaultPlan):
    """Only what reaches the store: small files are in memory until they are closed."""

    def __call__(self, operation: str, path: Path, detail: Any = None) -> None:
        if operation in ("put", "close", "unlink"):
            super().__call__(operation, path, detail)


def kills(name: str, count: int) -> range:
    """Operations to kill at: every second one; a save into the same step takes those that one into a new step skips."""
    return range({"save_then_delete_the_old": 7, "save_same_step": 1}.get(name, 0), count, 2)


def kill_everywhere(url: str, name: str, counted: str) -> int:
    import s3fs  # noqa: F401  once, not in every child
    import upath  # noqa: F401

    (action,) = (action for action in ACTIONS if action.__name__ == name)

    def count() -> None:
        CheckpointStore(f"{url}/count").save(1, writes(OLD))
        log = Sent()
        action(CheckpointStore(f"{url}/count", RemoteFiles(log)))
        Path(counted).write_text(str(len(log.operations)))

    assert exit_status_of(count) == 0
    for number in kills(name, int(Path(counted).read_text())):
        root = f"{url}/{number}"

        def killed(number: int = number, root: str = root) -> None:
            CheckpointStore(root).save(1, writes(OLD))
            action(CheckpointStore(root, RemoteFiles(Sent().kill_at(number))))

        assert exit_status_of(killed) == -signal.SIGKILL
    return int(Path(counted).read_text())


@pytest.mark.extras
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [action.__name__ for action in ACTIONS])
def test_a_kill_at_any_operation_leaves_the_old_or_the_new(name: str, bucket: Bucket, tmp_path: Path) -> None:
    (count,) = run_ranks(kill_everywhere, 1, bucket.url, name, str(tmp_path / "count"), timeout_s=3500.0)
    assert count == (8 if name != "save_then_delete_the_old" else 8 + 1 + 8)  # .owner, 6 files, manifest; and all again
    (action,) = (action for action in ACTIONS if action.__name__ == name)
    seen: list[float] = []
    for number in kills(name, count):
        store = CheckpointStore(f"{bucket.url}/{number}")
        newest = store.newest_verified()  # a warning would be an error
        assert newest is not None
        seen.append(value_of(store.read(newest.path)))
        store.sweep()
        assert store.files.leftovers(store.root) == []
        if number % 4 > 1 and seen[-1] == OLD:
            action(store)  # the same command again
            assert value_of(store.read("step-00000002-1" if action is not save_same_step else "step-00000001-2")) == NEW
    assert set(seen) == ({OLD, NEW} if name == "save_then_delete_the_old" else {OLD})
    assert seen == sorted(seen), "the new one was there and went away again"
    assert bucket.unfinished() == []  # small files are put at once


# ---- several ranks


def save_together(url: str) -> tuple[list[str], float, list[str], str]:
    rank = PartialState(cpu=True).process_index
    store = CheckpointStore(url)
    path = store.save(7, writes(OLD))
    new = store.save(7, writes(NEW))
    store.delete(path)

    def fail(writer: Any) -> None:
        writes(9.0)(writer)
        if rank == 1:
            raise ValueError("rank 1 cannot")

    try:
        store.save(8, fail)
    except Exception as error:
        text = type(error).__name__
    assert path_of(store.resolve("last")) == new
    assert store.read(new).state(f"rank-{rank}")["rank"] == rank
    return sorted(store.scan()[0].manifest.files), value_of(store.read(new)), store.verify_together(new), text


@pytest.mark.dist
def test_two_ranks_save_together(bucket: Bucket) -> None:
    first, second = run_ranks(save_together, 2, f"{bucket.url}/run")
    assert first[:3] == second[:3]
    assert first[1:] == (NEW, [], "RemoteError")
    assert second[3] == "ValueError"
    assert {key.split("/")[1] for key in bucket.keys()} == {"step-00000007-2"}  # noqa: SIM118


def save_in_memory(url: str) -> None:
    CheckpointStore(url).save(1, writes(OLD))


@pytest.mark.dist
def test_ranks_do_not_share_memory_and_are_told_so() -> None:
    need_packages()
    with pytest.raises(AssertionError, match=r"rank 0 sees no such file\. All ranks must see one file system"):
        run_ranks(save_in_memory, 2, "memory://run")

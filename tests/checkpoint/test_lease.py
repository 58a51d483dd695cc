"""One run owns a folder: takers on this host and another one, suspended and killed holders, races, faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from instep.checkpoint import CheckpointStore, LocalFiles, lease
from instep.checkpoint.lease import Lease
from instep.errors import CheckpointError, FolderInUseError, LeaseLostError
from instep.utils import process_id
from tests.checkpoint.helpers import writes
from tests.helpers.object_store import Bucket
from tests.helpers.spawn import HANG_S, start_command

HOLD = """
import signal, sys
from pathlib import Path
from instep.checkpoint.lease import Lease
held = Lease.take(Path(sys.argv[1]), "another run", interval_s=0.02)
print(held.number, flush=True)
signal.pause()
"""
OWN = """
import signal, sys
from instep.checkpoint import CheckpointStore
from instep.checkpoint.lease import Lease
store = CheckpointStore(sys.argv[1])
held = Lease.take(store.root, "another run", store.files, interval_s=0.05)
print(held.number, flush=True)
signal.pause()
"""
TICK_S = 0.02


def holder(root: Path) -> Any:
    """Another process that holds the lease, once its first line was read."""
    return start_command([sys.executable, "-c", HOLD, str(root)])


def files_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def content(held: Lease) -> dict[str, Any]:
    return json.loads(held.path.read_bytes())


def as_if_elsewhere(held: Lease, **changes: Any) -> None:
    """Make a lease's file that of a process on another host, about which nothing can be known from here."""
    held._stop.set()
    lease._held.pop(held._id, None)
    told = {**content(held), "owner": "elsewhere_0123abcd-1-0123abcd", "host": "elsewhere", **changes}
    held.path.write_text(json.dumps(told))


def end_unnoticed(process: Any) -> None:
    """SIGKILL, and wait for the end without asking how it was: the process stays in the table of processes."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)  # another process's file: there is nothing to wait on


def test_numbers_go_up_and_the_highest_stays(tmp_path: Path) -> None:
    root = tmp_path / "new" / "folder"
    for number in (1, 2, 3):
        held = Lease.take(root, "run")
        assert (held.number, files_in(root)) == (number, [f".lease-{number:08d}"])
        held.check()
        held.release()
        held.release()
        assert content(held)["released"] is True
    with pytest.raises(LeaseLostError):
        Lease(root, 2, LocalFiles(), "run", 1.0).check()


def test_the_same_run_takes_it_again_and_another_one_does_not(tmp_path: Path) -> None:
    first = Lease.take(tmp_path, "run")
    link = tmp_path.with_name(tmp_path.name + "-link")
    link.symlink_to(tmp_path)
    second = Lease.take(link, "run")
    assert second is first
    with pytest.raises(FolderInUseError, match="which is this process"):
        Lease.take(tmp_path, "other")
    first.release()
    second.check()
    with pytest.raises(FolderInUseError):
        Lease.take(tmp_path, "other")
    second.release()
    Lease.take(tmp_path, "other").release()


def test_a_living_process_keeps_it_and_a_killed_one_loses_it_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        assert process.stdout.readline() == "1\n"
        for number in (None, signal.SIGSTOP):  # suspended is not ended
            if number is not None:
                process.send_signal(number)
            with pytest.raises(FolderInUseError, match=rf"run another run \(host .*, pid {process.pid}: ") as caught:
                Lease.take(tmp_path, "mine")
            assert str(tmp_path / ".lease-00000001") in str(caught.value)
            assert caught.value.path == tmp_path
        end_unnoticed(process)
        mine = Lease.take(tmp_path, "mine")
        assert mine.number == 2
        mine.release()


def test_a_job_that_was_started_again_takes_it_from_its_earlier_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be(job: str, restart: int) -> None:
        monkeypatch.setenv("INSTEP_JOB_ID", job)
        monkeypatch.setenv("INSTEP_RESTART", str(restart))

    be("job", 1)
    first = Lease.take(tmp_path, "run")
    of_another_host = {"id": "x", "owner": "other_12345678-9-abcdef01", "interval_s": 1000.0}
    first.path.write_text(json.dumps({**content(first), **of_another_host}))
    be("job", 2)
    second = Lease.take(tmp_path, "run")  # at once: the host of the first one cannot be asked
    assert second.number == 2
    with pytest.raises(LeaseLostError):
        first.check()
    for job, restart in (("other job", 3), ("job", 2)):
        be(job, restart)
        with pytest.raises(FolderInUseError):
            Lease.take(tmp_path, "other run")
    second.release()
    first.release()


def test_only_one_of_many_takers_gets_it(tmp_path: Path) -> None:
    start, got = threading.Barrier(8), []

    def take(number: int) -> None:
        start.wait()
        try:
            got.append(Lease.take(tmp_path, f"run {number}"))
        except FolderInUseError:
            pass

    for _ in range(10):
        threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        assert files_in(tmp_path) == [got[0].path.name]
        got.pop().release()


def test_a_number_that_was_swept_away_is_not_given_again(tmp_path: Path) -> None:
    """A taker that slept between looking and making: in the meantime others had its number, and a higher one."""
    released = Lease.take(tmp_path, "first")
    released.release()

    class Slow(LocalFiles):
        def create_exclusive(self, path: Path, data: bytes) -> bool:
            if path.name.endswith("2"):
                for _ in range(2):
                    Lease.take(tmp_path, "quick").release()
                assert files_in(tmp_path) == [".lease-00000003"]
            return super().create_exclusive(path, data)

    late = Lease.take(tmp_path, "late", Slow())
    assert (late.number, files_in(tmp_path)) == (4, [".lease-00000004"])
    late.release()


# ---- another host


def test_of_another_host_the_counter_is_watched(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dead = Lease.take(tmp_path, "theirs", interval_s=0.1)
    as_if_elsewhere(dead)
    before = time.monotonic()
    mine = Lease.take(tmp_path, "mine")
    assert time.monotonic() - before >= 0.3
    assert "host elsewhere, pid" in capfd.readouterr().err
    with pytest.raises(LeaseLostError, match=r"run mine .* has taken it over"):
        dead.check()
    mine.release()


def test_a_lease_on_an_object_store_keeps_the_second_run_out(bucket: Bucket) -> None:
    url = f"{bucket.url}/run"
    mine, theirs = CheckpointStore(url), CheckpointStore(url)
    with start_command([sys.executable, "-c", OWN, url]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        wait_for(lambda: json.loads(bucket.get("run/.lease-00000001"))["counter"] > 2)
        with pytest.raises(FolderInUseError, match=rf"run another run \(host .*, pid {process.pid}: "):
            mine.own("mine")
        end_unnoticed(process)
        mine.own("mine")
    assert bucket.keys() == ["run/.lease-00000002"]
    mine.save(1, writes(1.0))
    assert mine.lease is not None
    as_if_elsewhere(mine.lease, interval_s=0.1)
    theirs.own("theirs")
    with pytest.raises(LeaseLostError, match="run theirs"):
        mine.save(2, writes(2.0))
    assert [info.step for info in theirs.scan()] == [1]
    theirs.save(3, writes(3.0))
    assert theirs.lease is not None
    theirs.lease.release()
    assert json.loads(bucket.get("run/.lease-00000003"))["released"] is True
    assert [info.step for info in theirs.scan()] == [3, 1]


def test_of_another_host_a_beat_is_a_sign_of_life(tmp_path: Path) -> None:
    theirs = Lease.take(tmp_path, "theirs", interval_s=30.0)
    as_if_elsewhere(theirs)

    class Changes(LocalFiles):
        """The lease changes after each look at it."""

        def __init__(self, **changes: Any) -> None:
            super().__init__()
            self.changes = changes

        def read(self, path: Path, most: int) -> bytes:
            before = super().read(path, most)
            as_if_elsewhere(theirs, **self.changes)
            return before

    with pytest.raises(FolderInUseError, match="host elsewhere"):
        Lease.take(tmp_path, "mine", Changes(counter=7))
    Lease.take(tmp_path, "mine", Changes(counter=7, released=True)).release()


def test_clocks_have_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Lease.take(tmp_path, "theirs", interval_s=TICK_S)
    for jump_s in (-1e9, 1e9):
        os.utime(held.path, (time.time() + jump_s,) * 2)
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: 2e9 + jump_s)
        held.check()
        with pytest.raises(FolderInUseError):
            Lease.take(tmp_path, "mine")
    held.release()


def test_an_empty_lease_is_watched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".lease-00000007").touch()  # its maker was killed, on a file system without links
    monkeypatch.setattr(lease, "INTERVAL_S", 0.05)
    held = Lease.take(tmp_path, "mine")
    assert held.number == 8
    held.release()


def test_the_namespace_of_process_ids_is_part_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, stat = process_id.this_process(), os.stat

    def other(path: Any, *args: Any, **kwargs: Any) -> Any:
        return stat("/" if str(path) == "/proc/self/ns/pid" else path, *args, **kwargs)

    assert process_id.is_gone(mine) is False
    monkeypatch.setattr(os, "stat", other)  # the same host name in another container
    assert process_id.is_gone(mine) is None


# ---- the holder


def test_the_counter_goes_on_after_a_fault(tmp_path: Path) -> None:
    failed = threading.Event()

    class Faulty(LocalFiles):
        def replace(self, path: Path, data: bytes) -> None:
            if not failed.is_set():
                failed.set()
                raise OSError(5, "a short fault", str(path))
            super().replace(path, data)

    held = Lease.take(tmp_path, "run", Faulty(), interval_s=TICK_S)
    wait_for(lambda: content(held)["counter"] >= 3)
    assert failed.is_set()
    held.run_id = "resumed"
    wait_for(lambda: content(held)["run_id"] == "resumed")
    held.release()
    assert content(held)["released"] is True


def test_a_lease_that_cannot_be_renewed_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    enough = threading.Event()

    class Full(LocalFiles):
        faults = 0

        def replace(self, path: Path, data: bytes) -> None:
            self.faults += 1
            if self.faults > 7:
                enough.set()
            raise OSError(28, "No space left on device", str(path))

    held = Lease.take(tmp_path, "run", Full(), interval_s=TICK_S)
    assert enough.wait(HANG_S)
    held.release()
    said = capfd.readouterr().err
    assert said.count("could not be renewed") == 1
    assert "No space left on device" in said


def test_the_counter_goes_on_after_the_folder_was_away(tmp_path: Path) -> None:
    looked = threading.Event()

    class Away(LocalFiles):
        away = False

        def entries(self, folder: Path) -> dict[str, bool]:
            if self.away:
                looked.set()
                return {}
            return super().entries(folder)

    files = Away()
    held = Lease.take(tmp_path, "run", files, interval_s=TICK_S)
    files.away = True
    assert looked.wait(HANG_S)
    files.away = False
    before = content(held)["counter"]
    wait_for(lambda: content(held)["counter"] > before + 1)
    held.release()


def test_the_thread_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    code = HOLD.replace("signal.pause()", "")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=HANG_S, stdout=subprocess.DEVNULL)
    Lease.take(tmp_path, "next").release()


def test_a_forked_child_does_not_release(tmp_path: Path) -> None:
    held = Lease.take(tmp_path, "run")
    child = os.fork()
    if child == 0:
        held.release()
        os._exit(0)
    os.waitpid(child, 0)
    held.check()
    assert content(held)["released"] is False
    held.release()


# ---- what the store makes of it


def test_who_lost_the_folder_commits_and_deletes_nothing(tmp_path: Path) -> None:
    mine = Lease.take(tmp_path, "mine")
    store = CheckpointStore(tmp_path, lease=mine)
    first = store.save(1, writes(1.0))
    as_if_elsewhere(mine, released=True)
    theirs = Lease.take(tmp_path, "theirs")
    with pytest.raises(LeaseLostError, match="run theirs"):
        store.save(2, writes(2.0))
    with pytest.raises(LeaseLostError, match="run theirs"):
        store.delete(first)
    with pytest.raises(LeaseLostError):
        store.sweep()
    assert files_in(tmp_path) == [theirs.path.name, "step-00000001-1"]
    theirs.release()


def test_a_holder_whose_lease_was_removed_writes_nothing(tmp_path: Path) -> None:
    held = Lease.take(tmp_path, "mine")
    held.path.unlink()
    with pytest.raises(LeaseLostError, match="is gone"):
        CheckpointStore(tmp_path, lease=held).save(1, writes(1.0))
    held.release()
    assert files_in(tmp_path) == []


def test_a_folder_that_was_taken_away_is_called_so_and_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "run"
    held = Lease.take(root, "mine")
    store = CheckpointStore(root, lease=held)
    root.rename(tmp_path / "elsewhere")
    for act in (held.check, store.sweep, lambda: store.save(1, writes(1.0))):
        with pytest.raises(LeaseLostError, match=f"the folder {root} does not exist any more") as caught:
            act()
        assert "suspended" not in str(caught.value)
    assert not root.exists()
    held.release()


def test_the_owner_sweeps_what_other_hosts_left(tmp_path: Path) -> None:
    left = tmp_path / ".saving-step-00000003-1@elsewhere-1-0123abcd"
    left.mkdir()
    CheckpointStore(tmp_path).clean_stale()
    assert left.exists()
    held = Lease.take(tmp_path, "mine")
    CheckpointStore(tmp_path, lease=held).clean_stale()
    assert not left.exists()
    held.release()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"cannot be saved in {tmp_path}/file/folder"):
        Lease.take(tmp_path / "file" / "folder", "run")

    def full(operation: str, path: Path, detail: Any) -> None:
        if operation == "create_exclusive":
            raise OSError(28, "No space left on device", str(path))

    with pytest.raises(CheckpointError, match=r"No space left on device .*lease-00000001"):
        Lease.take(tmp_path / "full", "run", LocalFiles(full))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="Permission denied"):
        Lease.take(tmp_path, "run")


@pytest.mark.parametrize(
    "content",
    [
        "[" * 30_000,
        '{"interval_s": ' + "1" * 5000 + "}",
        '{"interval_s": "x", "owner": 5, "pid": [], "job": {}}',
        '{"interval_s": 1e300, "owner": "elsewhere-1-01234567"}',
        '{"interval_s": -1, "job": [1, 2, 3], "released": "no"}',
        '{"owner": "' + "9" * 5000 + '-99999999999999999999-01234567"}',
        "[]",
        "\ud800",
    ],
    ids=["deep", "digits", "kinds", "long wait", "negative", "owner", "list", "no text"],
)
def test_a_lease_that_anybody_wrote_is_watched_for_a_short_time(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lease-00000004").write_bytes(content.encode("utf-8", "surrogatepass"))
    waited: list[float] = []
    monkeypatch.setattr(lease.time, "monotonic", lambda: sum(waited))
    monkeypatch.setattr(lease.time, "sleep", waited.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    taken = Lease.take(tmp_path, "a run", interval_s=1000)
    assert taken.number == 5
    assert sum(waited) <= 200
    taken.release()


def test_what_a_lease_says_is_shown_without_escapes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = {"owner": "elsewhere-1-01234567", "pid": 1, "host": "\x1b[2J", "run_id": "x" * 10_000, "interval_s": 0.01}
    (tmp_path / ".lease-00000004").write_text(json.dumps(content))
    Lease.take(tmp_path, "a run", interval_s=1000).release()
    said = capfd.readouterr().err
    assert "\x1b" not in said
    assert len(said) < 2000

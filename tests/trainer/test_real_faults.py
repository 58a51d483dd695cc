"""Faults of real file systems and files, as a run meets them: full, read-only, vanished, cut short, damaged."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Callback
from instep.callbacks import ModelCheckpoint
from instep.checkpoint import CheckpointStore, load_weights, store
from instep.cli.main import main
from instep.errors import CheckpointError, FolderInUseError, InstepError
from tests.checkpoint.helpers import flip
from tests.checkpoint.victim import digest
from tests.helpers.faults import exit_status_of
from tests.helpers.mounts import set_read_only, tmpfs
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Toy, loader, quiet


class Wide(Toy):
    """About 400 kB of weights, so that a small disk is full soon."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(10_000, 10)
        for parameter in self.wide.parameters():
            parameter.requires_grad_(False)


class At(Callback):
    """Does something once a step is done."""

    def __init__(self, step: int, act: Any) -> None:
        self.step = step
        self.act = act

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.act()


class From(Callback):
    """The name of the checkpoint that the run went on from."""

    name = ""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.name = "" if trainer.resumed_from is None else trainer.resumed_from.path.name


def went_on_from(trainer: Any) -> str:
    return next(callback.name for callback in trainer.callbacks if isinstance(callback, From))


def fit(root: Path, *callbacks: Callback, module: Toy | None = None, **settings: Any) -> Any:
    """Four steps an epoch, each saved."""
    savers = [] if any(isinstance(c, ModelCheckpoint) for c in callbacks) else [ModelCheckpoint(every_n_train_steps=1)]
    given = {"max_epochs": 1, "enable_checkpointing": True, "default_root_dir": root}
    trainer = quiet(**{**given, "callbacks": [From(), *callbacks, *savers], **settings})
    torch.manual_seed(1)
    trainer.fit(module or Toy(), loader(shuffle=True), ckpt_path="auto")
    return trainer


def store_of(root: Path) -> CheckpointStore:
    (folder,) = root.glob("instep_runs/version_*/checkpoints")
    return CheckpointStore(folder)


def weights_after(root: Path, **settings: Any) -> str:
    return digest(fit(root, **settings).model.state_dict())


# ---- disks


def test_a_disk_that_is_full_ends_the_run_with_path_and_bytes_and_keeps_the_old(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 1_000_000) as disk:  # two checkpoints, and not a third
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors: No space left .* of \d.* bytes are free"
        ) as caught:
            fit(disk, ModelCheckpoint(every_n_train_steps=1, save_top_k=-1), module=Wide())
        assert str(disk) in str(caught.value)
        kept = store_of(disk)
        assert [(info.step, kept.verify(info.path)) for info in kept.scan()] == [(2, []), (1, [])]
        assert not list(kept.root.glob(".saving-*"))
        saver = ModelCheckpoint(every_n_train_steps=1)  # the same run, keeping one less
        shutil.rmtree(kept.scan()[1].path)
        assert fit(disk, saver, module=Wide()).global_step == 4


@pytest.mark.parametrize("background", [False, True])
def test_training_goes_on_on_a_full_disk_where_it_may(background: bool, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 1_000_000) as disk:
        saver = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, on_error="warn", background=background)
        with pytest.warns(UserWarning, match=r"was not saved, and training goes on.*No space left"):
            trainer = fit(disk, saver, module=Wide())
        assert trainer.global_step == 4
        kept = store_of(disk)
        assert [info.step for info in kept.scan()] == [2, 1], "what was not saved is not listed"
        assert all(kept.verify(info.path) == [] for info in kept.scan())


class FullStderr(io.StringIO):
    """Lies on the disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "stderr")


def test_a_log_on_the_full_disk_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(what: str) -> None:
        raise ValueError(what)

    done: list[str] = []
    module = Toy()
    module.on_train_start = lambda: fail("the first")
    module.teardown = lambda stage: fail("another one, to be printed")
    trainer = quiet(max_epochs=1)
    monkeypatch.setattr(sys, "stderr", FullStderr())
    monkeypatch.setattr(trainer.strategy, "teardown", lambda: done.append("teardown"))
    with pytest.raises(ValueError, match="the first"):
        trainer.fit(module, loader())
    assert done == ["teardown"], "what comes after the one that could not be printed is done too"


def limited_files(folder: str) -> str:
    """With RLIMIT_FSIZE: one file is too large, as with a quota."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    root = Path(folder)
    fit(root, module=Wide(), max_epochs=1)
    before = [info.path.name for info in store_of(root).scan()]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        fit(root, module=Wide(), max_epochs=2)
    except InstepError as error:
        text = str(error)
    else:
        text = "no error"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [info.path.name for info in store_of(root).scan()] == before
    assert fit(root, module=Wide(), max_epochs=2).global_step == 8
    return text


@pytest.mark.dist
def test_a_file_size_limit(tmp_path: Path) -> None:
    (text,) = run_ranks(limited_files, 1, str(tmp_path))
    assert "File too large" in text
    assert str(tmp_path) in text


def test_a_read_only_folder_is_found_before_the_first_step(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 1_000_000) as disk:
        set_read_only(disk)
        for saver in (ModelCheckpoint(), ModelCheckpoint(dirpath=disk / "own")):
            module = Toy()
            root = tmp_path if saver.dirpath else disk
            with pytest.raises(InstepError, match="Read-only file system") as caught:
                fit(root, saver, module=module)
            assert str(disk) in str(caught.value)
            assert module.seen == []


def test_a_folder_that_turns_read_only_in_the_middle(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 1_000_000) as disk:
        with pytest.raises(InstepError, match="Read-only file system") as caught:
            fit(disk, At(2, lambda: set_read_only(disk)), ModelCheckpoint(every_n_train_steps=1, save_top_k=-1))
        assert str(disk) in str(caught.value)
        set_read_only(disk, False)
        assert [info.step for info in store_of(disk).scan()] == [1]
        assert weights_after(disk) == weights_after(tmp_path / "whole")


def test_a_folder_that_vanishes_in_the_middle(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with pytest.raises(InstepError) as caught:
        fit(root, At(2, lambda: root.rename(tmp_path / "elsewhere")))  # at once: other threads write into it
    assert str(root) in str(caught.value)
    assert weights_after(root) == weights_after(tmp_path / "whole")


# ---- two runs


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    def second() -> None:
        with pytest.raises(FolderInUseError, match=str(os.getppid())):
            fit(tmp_path, max_epochs=9)

    codes: list[int] = []
    fit(tmp_path, At(2, lambda: codes.append(exit_status_of(second))))
    assert codes == [0]
    assert [info.step for info in store_of(tmp_path).scan()] == [4]


# ---- files


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that was stopped after steps 1 and 2 were saved, and what it would have come to."""
    root = tmp_path_factory.mktemp("saved")
    fit(root, ModelCheckpoint(every_n_train_steps=1, save_top_k=-1), max_steps=2)
    assert [info.step for info in store_of(root).scan()] == [2, 1]
    return root, weights_after(tmp_path_factory.mktemp("whole"))


NAMES = [
    "model.safetensors",
    "optimizer.json",
    "trainer.json",
    "rank-00000.json",
    "rank-00000.safetensors",
    "manifest.json",
]


def falls_back(saved: tuple[Path, str], root: Path, damage: Any) -> None:
    """Damage the newest: the same command says so, goes on from the one before, and comes to the same."""
    shutil.copytree(saved[0], root, dirs_exist_ok=True)
    newest = store_of(root).scan()[0].path
    assert {file.name for file in newest.iterdir()} >= set(NAMES)
    damage(newest)
    assert store_of(root).verify(newest) != []
    with pytest.warns(UserWarning, match=rf"{re.escape(newest.name)} is passed over"):
        trainer = fit(root)
    assert went_on_from(trainer) == "step-00000001-1"
    assert digest(trainer.model.state_dict()) == saved[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("left", ["none", "half", "all but one byte"])
def test_a_run_falls_back_from_a_truncated_file(name: str, left: str, saved: tuple[Path, str], tmp_path: Path) -> None:
    def cut(newest: Path) -> None:
        size = (newest / name).stat().st_size
        os.truncate(newest / name, {"none": 0, "half": size // 2, "all but one byte": size - 1}[left])

    falls_back(saved, tmp_path, cut)


def positions(path: Path) -> dict[str, int]:
    """One byte of every kind in a file."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}
    begin = 8 + int.from_bytes(data[:8], "little")
    return {
        "header length": 0,
        "header": 20,
        "first of data": begin,
        "middle of data": (begin + len(data)) // 2,
        "last of data": len(data) - 1,
    }


def test_a_flipped_bit_of_every_kind_is_found(saved: tuple[Path, str], tmp_path: Path) -> None:
    newest = store_of(saved[0]).scan()[0].path
    copy = tmp_path / newest.name
    shutil.copytree(newest, copy)
    own, kinds = CheckpointStore(tmp_path), 0
    for file in sorted(copy.iterdir()):
        for kind, position in positions(file).items():
            for bit in (0, 7):
                flip(file, position, bit)
                assert own.verify(copy) != [], f"{file.name}: {kind}, bit {bit}"
                flip(file, position, bit)
                kinds += 1
    assert own.verify(copy) == []
    assert kinds >= 2 * (2 * 5 + 4 * 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_makes_auto_fall_back(name: str, saved: tuple[Path, str], tmp_path: Path) -> None:
    falls_back(saved, tmp_path, lambda newest: flip(newest / name, max(positions(newest / name).values()) // 2 + 1))


# ---- clocks


def test_the_clock_set_back_changes_nothing(saved: tuple[Path, str], tmp_path: Path) -> None:
    """The newest by step is the oldest by every clock."""
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    newest, before = (info.path for info in store_of(tmp_path).scan())
    for folder, time_s in ((newest, 1.0), (before, 4e9)):
        for path in (*folder.iterdir(), folder):
            os.utime(path, (time_s, time_s))
    created = json.loads((newest / "manifest.json").read_text())["created"]
    assert created > "2000"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = fit(tmp_path)
    assert went_on_from(trainer) == newest.name
    assert digest(trainer.model.state_dict()) == saved[1]


def test_a_run_whose_clock_jumps_back_goes_on_from_its_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    class SetBack(store.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz).replace(year=1971)

    keep = {"every_n_train_steps": 1, "save_top_k": -1}
    fit(tmp_path, ModelCheckpoint(**keep), max_steps=1)
    monkeypatch.setattr(store, "datetime", SetBack)
    fit(tmp_path, ModelCheckpoint(**keep), max_steps=2)
    created = [info.manifest.created[:4] for info in store_of(tmp_path).scan()]
    assert created[0] == "1971"
    assert created[1] > created[0]
    assert went_on_from(fit(tmp_path, ModelCheckpoint(**keep))) == "step-00000002-1"


# ---- code in the place of data

PEER_NAMES = [
    *("pytorch_model.bin", "optimizer.bin", "scheduler.bin", "sampler.bin", "scaler.pt", "random_states_0.pkl"),
    *("custom_checkpoint_0.pkl", "last.ckpt", "epoch=0-step=4.ckpt", ".metadata", "__0_0.distcp", "model.pt"),
    *("model.pth", "training_args.bin", "mp_rank_00_model_states.pt", "hparams.yaml", "model_extra.json"),
]


class RunsCode:
    """Unpickled, it makes a folder."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def read_all_ways(root: Path, path: Path) -> list[str]:
    """Every way of instep to read a path; what came of each."""
    outcomes = []
    ways = [
        lambda: load_weights(path),
        lambda: Toy.load_from_checkpoint(path),
        lambda: quiet(default_root_dir=root / "new").fit(Toy(), loader(), ckpt_path=path),
        lambda: quiet(default_root_dir=root / "new").validate(Toy(), loader(), ckpt_path=path, verbose=False),
        lambda: CheckpointStore(path.parent).resolve("auto"),
        lambda: CheckpointStore(path.parent).verify(path),
        *(lambda words=words: main(words) for words in cli_ways(root, path)),
    ]
    for way in ways:
        try:
            outcomes.append(repr(way()))
        except (Exception, SystemExit) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def cli_ways(root: Path, path: Path) -> list[list[str]]:
    given = str(path)
    return [
        ["checkpoint", "ls", given],
        ["checkpoint", "verify", given],
        ["checkpoint", "show", given],
        ["checkpoint", "diff", given, given],
        ["checkpoint", "convert", given, str(root / "out.safetensors")],
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [*PEER_NAMES, *NAMES])
def test_no_code_in_a_file_of_any_name_runs(name: str, saved: tuple[Path, str], tmp_path: Path) -> None:
    """In a checkpoint, in a folder of its own, and by itself; as a plain pickle and as torch.save writes one.

    The code is the whole content of one of the two files, and an entry of a dict in the other, by turns of the names.
    """
    canary = tmp_path / "pwned"
    turn = [*PEER_NAMES, *NAMES].index(name) % 2
    for plain in (True, False):
        content = {"state_dict": RunsCode(canary)} if plain == turn else RunsCode(canary)
        root = tmp_path / f"{plain}"
        shutil.copytree(saved[0], root)
        newest = store_of(root).scan()[0].path
        alone = root / "folder" / name
        alone.parent.mkdir()
        for target in (newest / name, alone):
            zipped = io.BytesIO()
            torch.save(content, zipped)
            target.write_bytes(pickle.dumps(content) if plain else zipped.getvalue())
        for path in (newest, alone, alone.parent):
            outcomes = read_all_ways(root, path)
            assert not canary.exists(), (path, outcomes)
        fit(root, max_epochs=1)
        assert not canary.exists()


def test_a_pickle_that_is_read_without_care_runs_code(tmp_path: Path) -> None:
    """The test above can fail: read without care, the same bytes run."""
    pickle.loads(pickle.dumps(RunsCode(tmp_path / "pwned")))
    assert (tmp_path / "pwned").is_dir()

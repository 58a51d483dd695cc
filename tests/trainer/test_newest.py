"""The newest full state of a run that goes on by itself, beside what its ModelCheckpoints keep."""

from __future__ import annotations

import errno
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Trainer
from instep.callbacks import ModelCheckpoint, Timer
from instep.checkpoint import CheckpointStore, LocalFiles
from instep.errors import CheckpointError, UsageError
from tests.trainer.toys import Toy, loader, quiet

SCORES = [5.0, 4.0, 6.0, 7.0, 3.0, 8.0, 9.0, 9.5]  # an epoch; the best are epochs 1, then 4
STEPS = 4  # an epoch


class Crash(Exception):
    """What ends a run."""


class Scored(Toy):
    """Logs a score after each epoch's validation; may fail before a step."""

    def __init__(self) -> None:
        super().__init__()
        self.die: int | None = None
        self.began = -1
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.1)

    def on_train_start(self) -> None:
        self.began = self.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.die:
            raise Crash
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("score", SCORES[self.current_epoch])


def fit(root: Path, savers: Any, die: int | None = None, ckpt_path: Any = "auto", **settings: Any) -> Scored:
    module = Scored()
    module.die = die
    trainer = quiet(
        **{"max_epochs": 8, "num_sanity_val_steps": 0, **settings},
        callbacks=savers(root),
        enable_checkpointing=True,
        default_root_dir=root,
    )
    try:
        trainer.fit(module, loader(), loader(3), ckpt_path=ckpt_path)
    except Crash:
        assert die is not None
    return module


def one(**what: Any) -> Any:
    return lambda root: [ModelCheckpoint(root / "a", monitor="score", **what)]


def two(second: str, **what: Any) -> Any:
    return lambda root: [
        ModelCheckpoint(root / "a", filename="least", monitor="score", **what),
        ModelCheckpoint(root / second, filename="most", monitor="score", mode="max", **what),
    ]


def there(root: Path) -> dict[str, tuple[int, str]]:
    """Step and kind of each checkpoint, by its folder and name."""
    found = [info for folder in ("a", "b") for info in CheckpointStore(root / folder).scan()]
    return {f"{info.path.parent.name}/{info.path.name}": (info.step, info.kind) for info in found}


@pytest.mark.parametrize(
    ("savers", "kept"),
    [  # others are drawn in tests/model_runs
        (one(), 1),
        (one(every_n_train_steps=3, background=True), 1),
        (two("b", save_top_k=2, background=True, on_error="warn"), 4),
    ],
)
def test_a_crash_goes_back_to_the_last_occasion_to_save_whatever_is_kept(savers: Any, kept: int, tmp_path: Path):
    undisturbed = fit(tmp_path / "undisturbed", savers)
    for die in (14, 31):
        root = tmp_path / str(die)
        fit(root, savers, die)
        assert len(there(root)) <= kept + 1
        module = fit(root, savers)
        occasion = 3 if any(saver.every_n_train_steps for saver in savers(root)) else STEPS
        assert module.began == die // occasion * occasion
        assert all(
            torch.equal(ours, whole) for ours, whole in zip(module.parameters(), undisturbed.parameters(), strict=True)
        )
        assert len(there(root)) <= kept + 1


@pytest.mark.parametrize("background", [False, True])
def test_nothing_is_written_twice_and_the_old_newest_goes_once_the_new_one_verified(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved: list[tuple[int, int]] = []
    publish = LocalFiles.publish

    def counting(files: LocalFiles, folder: Path, final: Path, manifest: bytes) -> None:
        publish(files, folder, final, manifest)
        saved.append((int(b"".join(manifest.split(b'"step": ')[1:2]).split(b",")[0]), len(there(tmp_path))))

    monkeypatch.setattr(LocalFiles, "publish", counting)
    fit(tmp_path, one(background=background))
    assert [step for step, _ in saved] == [STEPS * (epoch + 1) for epoch in range(8)]
    assert max(most for _, most in saved) == 3, "the best, the old newest and the new one"
    assert there(tmp_path) == {"a/step-00000020-1": (20, "full"), "a/step-00000032-1": (32, "full")}
    saved.clear()
    fit(tmp_path / "weights", one(save_weights_only=True))
    kinds = sorted(there(tmp_path / "weights").values())
    assert kinds == [(20, "weights"), (32, "full")], "what is ranked stays weights alone"


def test_the_old_newest_goes_where_another_saver_is_the_first_now(tmp_path: Path):
    def savers(root: Path) -> list[ModelCheckpoint]:
        return [ModelCheckpoint(root / "a", monitor="score"), ModelCheckpoint(root / "b", monitor="step")]

    fit(tmp_path, savers, die=14)
    assert set(there(tmp_path)) == {"a/step-00000008-1", "a/step-00000012-1", "b/step-00000004-1"}
    fit(tmp_path, lambda root: savers(root)[::-1], die=18)
    assert set(there(tmp_path)) == {"a/step-00000008-1", "b/step-00000016-1", "b/step-00000004-1"}


def test_the_newest_is_never_ranked(tmp_path: Path):
    savers = one()(tmp_path)
    fit(tmp_path, lambda _: savers)
    (saver,) = savers
    assert list(saver.best_k_models) == [saver.best_model_path] == [str(tmp_path / "a" / "step-00000020-1")]
    again = one()(tmp_path)
    fit(tmp_path, lambda _: again, max_epochs=8)
    assert again[0].best_model_path == saver.best_model_path
    assert again[0].best_model_score == 3.0


def preempted(root: Path, savers: Any) -> None:
    class Signals(Scored):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 14:
                self.trainer.set_trigger("preempted", "SIGTERM")

    trainer = quiet(
        max_epochs=8, num_sanity_val_steps=0, callbacks=savers(root), enable_checkpointing=True, trigger_every=1
    )
    with pytest.raises(SystemExit) as ended:
        trainer.fit(Signals(), loader(), loader(3), ckpt_path="auto")
    assert (ended.value.checkpoint.parent.name, Path(ended.value.checkpoint).is_dir()) == ("a", True)


@pytest.mark.parametrize("savers", [two("b"), one(train_time_interval=timedelta(days=1))])
def test_a_preemption_replaces_the_newest_instead_of_adding_one(savers: Any, tmp_path: Path):
    preempted(tmp_path, savers)
    assert (15, "full") in there(tmp_path).values() or (14, "full") in there(tmp_path).values()
    assert len(there(tmp_path)) <= len(savers(tmp_path)) + 1
    assert fit(tmp_path, savers).began in (14, 15)
    assert len(there(tmp_path)) <= len(savers(tmp_path)) + 1


@pytest.mark.parametrize(
    ("savers", "line", "steps"),
    [
        (one(save_last=False), "with ModelCheckpoint(save_last=False) a crash goes back to the best", [8]),
        (one(save_top_k=0), "ModelCheckpoint(save_top_k=0) saves nothing to resume from", []),
        (lambda root: [], "there is no ModelCheckpoint, so nothing is saved", []),
        (
            lambda root: [*one(save_last=False)(root), ModelCheckpoint(root / "b", save_top_k=0)],
            "with ModelCheckpoint(save_last=False) a crash goes back to the best",
            [8],
        ),
    ],
)
def test_a_run_without_automatic_saves_prints_one_line_at_the_start(
    savers: Any, line: str, steps: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    callbacks = savers(tmp_path)
    module, trainer = Scored(), quiet(max_epochs=8, callbacks=callbacks, enable_checkpointing=bool(callbacks))
    module.die = 14
    with pytest.raises(Crash):
        trainer.fit(module, loader(), loader(3), ckpt_path="auto")
    assert capsys.readouterr().out.count(line) == 1
    assert [step for step, _ in there(tmp_path).values()] == steps


def test_a_job_that_its_launcher_starts_again_keeps_its_newest_state_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("INSTEP_JOB_ID", "job")
    fit(tmp_path, one(), 14, None)
    assert sorted(there(tmp_path).values()) == [(8, "full"), (12, "full")]


def test_a_run_that_nobody_resumes_keeps_what_its_policy_keeps(tmp_path: Path):
    fit(tmp_path, one(), ckpt_path=None)
    assert [step for step, _ in there(tmp_path).values()] == [20]


@pytest.mark.parametrize(("die", "steps"), [(30, "10 steps are"), (22, "2 steps are"), (21, "1 step is")])
def test_a_resume_says_how_many_steps_are_trained_again(
    die: int, steps: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fit(tmp_path, one(save_last=False), die)
    capsys.readouterr()
    fit(tmp_path, one(save_last=False))
    assert f"The run had reached step {die} or later: at least {steps} trained again." in capsys.readouterr().out


def test_the_last_path_of_a_saver_is_there_after_a_resume(tmp_path: Path):
    fit(tmp_path, one(), 14)
    module = fit(tmp_path, one())
    saver = module.trainer.checkpoint_callback
    assert saver is not None
    assert Path(saver.last_model_path).is_dir()


def test_a_newest_state_that_cannot_be_saved_ends_the_run_or_warns_as_the_saver_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begin = LocalFiles.begin

    def full(files: LocalFiles, final: Path) -> Path:
        if final.name.startswith("step-00000012"):
            raise OSError(errno.ENOSPC, "No space left on device", str(final))
        return begin(files, final)

    monkeypatch.setattr(LocalFiles, "begin", full)
    with pytest.raises(CheckpointError, match="No space left"):
        fit(tmp_path / "raise", one())
    assert [step for step, _ in there(tmp_path / "raise").values()] == [8]
    with pytest.warns(UserWarning, match="was not saved, and training goes on"):
        fit(tmp_path / "warn", one(on_error="warn"), 14)
    monkeypatch.undo()
    assert fit(tmp_path / "warn", one(on_error="warn")).began == 8


@pytest.mark.parametrize("how", ["auto", "launcher"])
def test_a_position_that_is_read_before_the_checkpoint_is_found_is_refused(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    if how == "launcher":
        monkeypatch.setenv("INSTEP_JOB_ID", "job")

    class Reads(Scored):
        def configure_callbacks(self) -> list[Any]:
            return [Timer(timedelta(days=1 + self.trainer.current_epoch))]

    with pytest.raises(UsageError, match=r"configure_callbacks reads trainer\.epoch, and runs before"):
        quiet(max_epochs=1).fit(Reads(), loader(), loader(3), ckpt_path="auto" if how == "auto" else None)


def test_hooks_of_a_resumed_run_read_the_restored_position(tmp_path: Path):
    class Reads(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.read: dict[str, tuple[int, int]] = {}

        def note(self, name: str) -> None:
            self.read[name] = (self.trainer.current_epoch, self.trainer.global_step)

        def setup(self, stage: str) -> None:
            self.note("setup")

        def configure_model(self) -> None:
            self.note("configure_model")

        def train_dataloader(self) -> Any:
            self.note("train_dataloader")
            return loader()

        def val_dataloader(self) -> Any:
            self.note("val_dataloader")
            return loader(3)

        def configure_optimizers(self) -> Any:
            self.note("configure_optimizers")
            return super().configure_optimizers()

        def on_fit_start(self) -> None:
            self.note("on_fit_start")

    class Fails(Reads):
        def on_fit_start(self) -> None:
            raise Crash

    fit(tmp_path, one(), 14)
    module = Reads()
    trainer = Trainer(max_epochs=4, callbacks=one()(tmp_path), logger=False, default_root_dir=tmp_path)
    trainer.fit(module, ckpt_path="auto")
    loaders = {"train_dataloader": (0, 0), "val_dataloader": (0, 0)}  # asked for once, when the run began
    others = ("setup", "configure_model", "configure_optimizers", "on_fit_start")
    assert module.read == {**loaders, **dict.fromkeys(others, (3, 12))}
    assert trainer.global_step == 16
    refused = quiet(max_epochs=4, callbacks=one()(tmp_path), enable_checkpointing=True)
    with pytest.raises(Crash):
        refused.fit(Fails(), ckpt_path="auto")
    assert (refused.global_step, refused.current_epoch) == (0, 0), "a resume that failed leaves no position behind"


@pytest.mark.parametrize("every", [1, 2, 3])
def test_loaders_are_asked_for_as_of_the_last_reload(every: int, tmp_path: Path):
    class Curriculum(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[tuple[str, int, int]] = []
            self.stages: dict[int, int] = {}
            self.stage = -1

        def train_dataloader(self) -> Any:
            self.asked.append(("train", self.current_epoch, self.global_step))
            self.stage = self.current_epoch
            return loader()

        def val_dataloader(self) -> Any:
            self.asked.append(("val", self.current_epoch, self.global_step))
            return loader(3)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.stages[self.global_step] = self.stage

    settings: dict[str, Any] = {
        "max_epochs": 7,
        "reload_dataloaders_every_n_epochs": every,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
    }
    savers = [ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step:03d}", every_n_train_steps=1)]
    whole = Curriculum()
    quiet(**settings, callbacks=savers).fit(whole)
    for step in (3, 4, 12, 18, 21, 24):
        rest = Curriculum()
        saver = ModelCheckpoint(tmp_path / "rest", save_top_k=0, every_n_train_steps=1)
        quiet(**settings, callbacks=[saver]).fit(rest, ckpt_path=tmp_path / f"step={step:03d}")
        assert rest.stages == {at: stage for at, stage in whole.stages.items() if at >= step}
        assert set(rest.asked) <= set(whole.asked), "each at an epoch and step at which the whole run asked"

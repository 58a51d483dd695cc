"""When ModelCheckpoint saves, what it keeps, and what it calls it."""

from __future__ import annotations

import math
import shutil
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Callback, Trainer
from instep.callbacks import ModelCheckpoint, ModelSummary
from instep.callbacks.model_checkpoint import format_name
from instep.checkpoint import CheckpointStore, KeepBest, KeepEvery, KeepNewest
from instep.errors import SettingError, UnsavableStateError, UsageError
from instep.utils import plain_yaml
from tests.trainer.toys import FailingToy, KeepingToy, LoggingToy, ScoredToy, Toy, loader, quiet

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("template", "insert", "expected"),
    [
        ("{epoch}-{val_loss:.2f}", True, "epoch=3-val_loss=0.26"),
        ("{epoch:02d}-{step}", False, "03-120"),
        ("best", True, "best"),
        ("{val/acc:.1f}", True, "val_acc=1.0"),
        ("{missing:.1f}", True, "missing=0.0"),
        ("epoch{epoch}", False, "epoch3"),
    ],
)
def test_names_of_checkpoints_are_formatted_as_the_template_says(template: str, insert: bool, expected: str):
    values = {"epoch": 3, "step": 120, "val_loss": 0.2567, "val/acc": 1.0}
    assert format_name(template, values, insert) == expected


# ---- settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "auto"}, "mode"),
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"save_top_k": 3}, "monitor=None"),
        ({"every_n_train_steps": 1, "every_n_epochs": 1}, "exclude each other"),
        ({"every_n_train_steps": 1, "train_time_interval": timedelta(1)}, "exclude each other"),
        ({"every_n_epochs": -1}, "every_n_epochs=-1: expected an integer of at least 0"),
        ({"every_n_train_steps": 1.5}, "every_n_train_steps=1.5: expected an integer"),
        ({"save_last": "link"}, "there is no link"),
        ({"filename": "{epoch:foo}"}, "filename='{epoch:foo}': expected a template"),
        ({"filename": "{epoch"}, "filename='{epoch': expected a template"),
        ({"filename": ".."}, "filename='..': expected a template"),
        ({"filename": "{step:d}-{val_loss:d}"}, "Unknown format code 'd' for object of type 'float'"),
        ({"filename": 3}, "filename=3: expected a template"),
        ({"train_time_interval": 20}, "train_time_interval=20: expected a timedelta"),
        ({"background": "yes"}, "background='yes': expected True or False"),
        ({"monitor": ""}, "monitor='': expected the name of a logged metric"),
        ({"keep": 3}, r"keep=3: a policy such as KeepNewest"),
        ({"keep": KeepNewest(3), "save_top_k": 2, "monitor": "a"}, r"save_top_k=2 and keep=KeepNewest\(count=3\)"),
        ({"keep": KeepBest(3)}, "needs monitor"),
        ({"keep": KeepNewest(1) | KeepBest(3, "max"), "monitor": "a"}, "contradicts mode='min'"),
    ],
)
def test_contradictions_are_found_at_once(arguments: dict[str, Any], message: str):
    with pytest.raises(SettingError, match=message):
        ModelCheckpoint(**arguments)


# ---- in a real fit


@pytest.mark.parametrize("settings", [{"max_steps": 1}, {"max_steps": 7}, {"max_epochs": 2, "max_steps": 3}])
@pytest.mark.parametrize("monitor", [None, "train_loss"])
def test_save_top_k_of_0_saves_nothing_where_a_run_ends_within_an_epoch(
    settings: dict[str, Any], monitor: str | None, tmp_path: Path
):
    callback = ModelCheckpoint(tmp_path / "none", save_top_k=0, monitor=monitor)
    quiet(enable_checkpointing=True, default_root_dir=tmp_path, callbacks=callback, **settings).fit(
        LoggingToy(), loader(15, 3)
    )
    assert (callback.last_model_path, list((tmp_path / "none").glob("step-*"))) == ("", [])


def run(folder: Path, *callbacks: Any, module: Any = None, val: bool = True, **settings: Any) -> Trainer:
    trainer = quiet(
        **{"max_epochs": 1, **settings}, callbacks=list(callbacks), enable_checkpointing=True, default_root_dir=folder
    )
    trainer.fit(module or ScoredToy([1.0] * 10), loader(), loader(3) if val else None)
    return trainer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize(
    ("scores", "arguments", "expected", "best"),
    [
        ([0.0, -0.0, 1.0], {"monitor": "score"}, [0], 0),
        ([INF, -INF, 1.0], {"monitor": "score"}, [1], 1),
        ([1, INF], {"monitor": "score", "mode": "max"}, [1], 1),
        ([1, 2, 3, 4], {"every_n_epochs": 0}, [], None),
        ([3, 1, 2], {"keep": KeepNewest(2)}, [1, 2], 2),
        ([3, 1, 2, 4], {"keep": KeepNewest(1) | KeepEvery(8)}, [1, 3], 3),
        ([3, 1, 2, 4], {"keep": KeepBest(1), "monitor": "score"}, [1, 3], 1),
        ([3, 1, 2, 4], {"keep": KeepNewest(2), "monitor": "score"}, [2, 3], 2),
        ([3, NAN, NAN], {"keep": KeepBest(1), "monitor": "score"}, [0, 2], 0),
    ],
)
def test_what_is_kept_after_fit(
    scores: list[float], arguments: dict[str, Any], expected: list[int], best: int | None, tmp_path: Path
):
    saver = ModelCheckpoint(tmp_path / "kept", filename="{epoch}", auto_insert_metric_name=False, **arguments)
    run(tmp_path, saver, module=ScoredToy(scores), max_epochs=len(scores))
    found = names(tmp_path / "kept") if (tmp_path / "kept").is_dir() else []
    assert [int(name.split("-")[0]) for name in found] == expected
    if best is None:
        assert saver.best_model_score is None
    else:
        assert Path(saver.best_model_path).name.startswith(f"{best}-")
        if saver.monitor:
            assert saver.best_model_score == scores[best]
    assert all(not CheckpointStore(tmp_path / "kept").verify(tmp_path / "kept" / name) for name in found)


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ({"every_n_train_steps": 3}, "Steps 7 to 8 are in no checkpoint: it was not yet time for one"),
        ({"every_n_train_steps": 9}, "Steps 1 to 8 are in no checkpoint: it was not yet time for one"),
        ({"monitor": "score"}, ""),  # the end was worse than the first epoch, and is not kept
        ({"every_n_train_steps": 3, "save_last": True}, ""),
        ({"every_n_train_steps": 4}, ""),
        ({}, ""),
    ],
)
def test_steps_that_no_checkpoint_holds_are_told_at_the_end(
    arguments: dict[str, Any], missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    saver = ModelCheckpoint(**arguments)
    run(tmp_path, saver, module=ScoredToy([1.0, 2.0]), max_epochs=2)
    printed = capsys.readouterr().out
    assert missing in printed
    assert ("in no checkpoint" in printed) == bool(missing)
    assert ("step-00000004" in saver.last_model_path) == ("monitor" in arguments)


def test_a_fit_without_validation_saves_though_the_fit_before_had_one(tmp_path: Path):
    saver, module = ModelCheckpoint(tmp_path / "kept", save_top_k=-1), Toy()
    trainer = run(tmp_path, saver, module=module, val_check_interval=0.5)
    assert (names(tmp_path / "kept"), trainer.enable_validation) == (["step-00000002-1", "step-00000004-1"], True)
    trainer.max_epochs = 2
    trainer.fit(module, loader())
    assert (names(tmp_path / "kept")[2:], trainer.enable_validation) == (["step-00000008-1"], False)


def test_every_n_train_steps_counts_windows(tmp_path: Path):
    saver = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1)
    run(tmp_path, saver, accumulate_grad_batches=3)
    assert names(tmp_path / "kept") == ["step-00000001-1", "step-00000002-1"]


def test_checkpoints_by_time_are_saved_when_the_interval_is_over(tmp_path: Path):
    saver = ModelCheckpoint(tmp_path / "kept", train_time_interval=timedelta(microseconds=1))
    run(tmp_path, saver, max_epochs=2, trigger_every=1)
    assert len(names(tmp_path / "kept")) == 1
    later = ModelCheckpoint(tmp_path / "later", train_time_interval=timedelta(days=1))
    run(tmp_path, later)
    assert names(tmp_path / "later") == []


def test_by_time_each_saves_its_own(tmp_path: Path):
    day = timedelta(days=1)
    savers = [
        ModelCheckpoint(tmp_path / "plain"),
        ModelCheckpoint(tmp_path / "full", monitor="score", train_time_interval=day),
        ModelCheckpoint(tmp_path / "weights", train_time_interval=day, save_weights_only=True),
    ]

    class Waits(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                savers[1]._next_time = savers[2]._next_time = 0.0  # both are due at one step

    run(tmp_path, Waits(), *savers, module=ScoredToy([1.0, 2.0]), max_epochs=2, trigger_every=1)
    assert names(tmp_path / "plain") == ["step-00000008-1"]
    for name, kind in (("full", "full"), ("weights", "weights")):
        assert [info.kind for info in CheckpointStore(tmp_path / name).scan()] == [kind]


def test_after_every_validation_where_there_are_several_in_an_epoch(tmp_path: Path):
    saver = ModelCheckpoint(tmp_path / "kept", save_top_k=-1)
    run(tmp_path, saver, val_check_interval=0.5)
    assert names(tmp_path / "kept") == ["step-00000002-1", "step-00000004-1"]


def test_what_is_saved_at_the_step_of_a_validation_is_ranked_by_it(tmp_path: Path):
    class Counts(Toy):
        def on_validation_epoch_end(self) -> None:
            self.log("score", float(self.trainer.global_step))

    saver = ModelCheckpoint(tmp_path / "kept", monitor="score", save_top_k=-1, every_n_train_steps=1)
    run(tmp_path, saver, module=Counts(), val_check_interval=1)
    ranked = {Path(path).name: float(score) for path, score in saver.best_k_models.items()}
    assert ranked == {f"step-0000000{step}-1": step for step in (1, 2, 3, 4)}


@pytest.mark.parametrize("monitor", ["train_loss", "train_loss_epoch", "val_loss"])
def test_metrics_of_training_and_of_validation_can_be_watched(monitor: str, tmp_path: Path):
    saver = ModelCheckpoint(tmp_path / "kept", monitor=monitor, filename="{epoch}-{" + monitor + ":.3f}")
    trainer = run(tmp_path, saver, module=LoggingToy(), max_epochs=2)
    assert saver.best_model_score == min(saver.best_k_models.values())
    assert f"{monitor}={saver.best_model_score:.3f}" in saver.best_model_path
    assert trainer.checkpoint_callback is saver


@pytest.mark.parametrize("background", [False, True])
def test_a_metric_that_was_not_logged_is_an_error_that_lists_those_that_were(tmp_path: Path, background: bool):
    misspelt = ModelCheckpoint(tmp_path / "kept", monitor="val_los", save_weights_only=True, background=background)
    with pytest.raises(SettingError, match=r"monitor='val_los'.*score") as caught:
        run(tmp_path, misspelt)
    path = tmp_path / "kept" / "step-00000004-1"
    assert f"saved as {path}." in str(caught.value), "nothing that was trained is lost"
    again = quiet(
        max_epochs=2, callbacks=[ModelCheckpoint(tmp_path / "kept", monitor="score")], enable_checkpointing=True
    )
    with pytest.warns(UserWarning, match="the state of callbacks that this run does not have"):
        again.fit(ScoredToy([1.0] * 10), loader(), loader(3), ckpt_path=path)
    assert again.global_step == 8


def test_two_model_checkpoints_with_other_metrics_keep_their_own(tmp_path: Path):
    class Two(ScoredToy):
        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.log("a", [1.0, 2.0, 3.0][self.current_epoch])
                self.log("b", [1.0, 2.0, 3.0][self.current_epoch])

    lowest = ModelCheckpoint(tmp_path / "kept", monitor="a")
    highest = ModelCheckpoint(tmp_path / "kept", monitor="b", mode="max")
    trainer = run(tmp_path, lowest, highest, module=Two([]), max_epochs=3)
    assert names(tmp_path / "kept") == ["step-00000004-1", "step-00000012-1"]
    assert Path(lowest.best_model_path).name == "step-00000004-1"
    assert Path(highest.best_model_path).name == "step-00000012-1"
    assert trainer.checkpoint_callback is lowest
    with pytest.raises(SettingError, match="the same key"):
        run(tmp_path, ModelCheckpoint(monitor="a"), ModelCheckpoint(monitor="a"))


def test_save_weights_only_leaves_the_optimizer_out(tmp_path: Path):
    saver = ModelCheckpoint(tmp_path / "kept", save_weights_only=True)
    run(tmp_path, saver)
    (info,) = CheckpointStore(tmp_path / "kept").scan()
    assert info.kind == "weights"
    assert not list(info.path.glob("optimizer*"))


class Fails(FailingToy):
    fails_at = 2


def test_save_on_exception_keeps_the_step_before_the_exception(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saver = ModelCheckpoint(tmp_path / "kept", monitor="never", save_on_exception=True, verbose=True)
    with pytest.raises(ValueError, match="no more"):
        run(tmp_path, saver, module=Fails())
    (saved,) = CheckpointStore(tmp_path / "kept").scan()
    assert (saved.path.name, saved.kind) == ("step-00000002-1", "exception")
    assert f"saved {saved.path}" in capsys.readouterr().out
    module = Toy()
    with pytest.warns(UserWarning, match=r"left out: ModelCheckpoint\(monitor='never'"):
        quiet(max_epochs=1).fit(module, loader(), ckpt_path=tmp_path / "kept" / "step-00000002-1")
    assert len(module.seen) == 2
    with pytest.raises(ValueError, match="no more"):
        run(tmp_path, ModelCheckpoint(tmp_path / "none"), module=Fails())
    assert names(tmp_path / "none") == []


def test_nothing_is_deleted_before_the_newer_one_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CheckpointStore, "verify_together", lambda self, path: ["model.safetensors is too short"])
    saver = ModelCheckpoint(tmp_path / "kept", on_error="warn")
    with pytest.warns(UserWarning, match=r"does not verify \(model\.safetensors is too short\); nothing older"):
        run(tmp_path, saver, max_epochs=2)
    assert names(tmp_path / "kept") == ["step-00000004-1", "step-00000008-1"]
    assert [Path(it.key).name for it in saver.saved] == ["step-00000004-1"], "what does not verify is not counted"


def test_verbose_says_what_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(tmp_path, ModelCheckpoint(tmp_path / "kept", verbose=True), max_epochs=2)
    printed = capsys.readouterr().out
    assert printed.count("saved ") == 2
    assert printed.count("deleted ") == 1


class Tee:
    """Writer that some programs put in the place of stdout; it has no `isatty`."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


@pytest.mark.parametrize("stdout", [None, Tee()], ids=["no stdout", "a tee"])
def test_a_run_ends_well_whatever_stands_in_the_place_of_stdout(
    stdout: Tee | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdout", stdout)
    run(tmp_path, ModelCheckpoint(tmp_path / "kept", verbose=True), ModelSummary(), enable_model_summary=True)
    assert names(tmp_path / "kept") == ["step-00000004-1"]
    assert stdout is None or ("saved " in stdout.text and "layer" in stdout.text)


def test_the_default_saves_the_newest_in_the_run_folder(tmp_path: Path):
    trainer = run(tmp_path, max_epochs=2)
    assert trainer.log_dir is not None
    assert names(Path(trainer.log_dir) / "checkpoints") == ["step-00000008-1"]
    assert isinstance(trainer.callbacks[-1], ModelCheckpoint)


def test_a_state_that_cannot_be_saved_is_found_before_the_first_step(tmp_path: Path):
    class Stubborn(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"counts": {"file": object()}}

    module = Toy()
    with pytest.raises(UnsavableStateError, match=r"not started.*Stubborn.*counts.*file"):
        run(tmp_path, Stubborn(), module=module)
    assert module.seen == []


def test_hyperparameters_that_cannot_be_saved_come_with_advice(tmp_path: Path):
    with pytest.raises(UnsavableStateError, match=r"value.*save_hyperparameters\(ignore="):
        run(tmp_path, module=KeepingToy(object()))


@pytest.mark.filterwarnings("ignore:this run has other hyperparameters")
def test_the_state_survives_a_restart(tmp_path: Path):
    first = ModelCheckpoint(tmp_path / "kept", monitor="score", save_top_k=2)
    run(tmp_path, first, module=ScoredToy([3.0, 1.0, 9, 9]), max_epochs=2)
    second = ModelCheckpoint(tmp_path / "kept", monitor="score", save_top_k=2)
    trainer = quiet(max_epochs=4, callbacks=[second], enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(ScoredToy([0, 0, 2.0, 5.0]), loader(), loader(3), ckpt_path="last")
    assert names(tmp_path / "kept") == ["step-00000008-1", "step-00000012-1", "step-00000016-1"], "two and the newest"
    assert second.best_model_path == str(tmp_path / "kept" / "step-00000008-1")
    assert second.best_model_score == 1.0


@pytest.mark.filterwarnings("ignore:this run has other hyperparameters")
@pytest.mark.parametrize(("scores", "best"), [([1.0, 2.0, 3.0], 2.0), ([3.0, 2.0, 1.0], 1.0)])
def test_a_checkpoint_that_has_gone_is_forgotten(scores: list[float], best: float, tmp_path: Path):
    first = ModelCheckpoint(tmp_path / "kept", monitor="score", save_top_k=3)
    run(tmp_path, first, module=ScoredToy(scores), max_epochs=3)
    shutil.rmtree(tmp_path / "kept" / "step-00000004-1")  # the best, or the worst
    second = ModelCheckpoint(tmp_path / "kept", monitor="score", save_top_k=3)
    run_on = quiet(max_epochs=3, callbacks=[second], enable_checkpointing=True, default_root_dir=tmp_path)
    run_on.fit(ScoredToy([]), loader(), loader(3), ckpt_path="last")
    assert second.best_model_score == best
    assert sorted(Path(path).name for path in second.best_k_models) == ["step-00000008-1", "step-00000012-1"]
    assert Path(second.best_model_path).is_dir()


@pytest.mark.filterwarnings("ignore:this run has other hyperparameters")
def test_two_model_checkpoints_of_one_folder_both_take_in_the_checkpoint_that_they_resume_from(tmp_path: Path):
    def two() -> list[Any]:
        return [ModelCheckpoint(tmp_path / "kept"), ModelCheckpoint(tmp_path / "kept", every_n_epochs=2)]

    run(tmp_path, *two(), max_epochs=2)
    trainer = quiet(max_epochs=4, callbacks=two(), enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(ScoredToy([1.0] * 4), loader(), loader(3), ckpt_path="last")
    assert all(name.startswith("step-00000016") for name in names(tmp_path / "kept"))


def test_the_checkpoint_of_another_run_is_not_deleted(tmp_path: Path):
    run(tmp_path / "first", ModelCheckpoint(tmp_path / "first" / "kept"), max_epochs=2)
    (first,) = (tmp_path / "first" / "kept").glob("step-*")
    saver = ModelCheckpoint(tmp_path / "second" / "kept")
    second = quiet(max_epochs=4, callbacks=[saver], enable_checkpointing=True, default_root_dir=tmp_path / "second")
    second.fit(ScoredToy([1.0] * 10), loader(), loader(3), ckpt_path=first)
    assert names(tmp_path / "second" / "kept") == ["step-00000016-1"]
    assert first.is_dir()


@pytest.mark.filterwarnings("ignore:this run has other hyperparameters")
def test_nobody_deletes_what_another_one_keeps(tmp_path: Path):
    def two() -> list[Any]:
        best = ModelCheckpoint(tmp_path / "kept", monitor="score")
        return [ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1), best]

    run(tmp_path, *two(), module=ScoredToy([1.0, 2.0]), max_epochs=2)
    savers = two()
    trainer = quiet(max_epochs=4, callbacks=savers, enable_checkpointing=True, default_root_dir=tmp_path)
    best = tmp_path / "kept" / "step-00000004-2"
    trainer.fit(ScoredToy([1.0, 2.0, 3.0, 4.0]), loader(), loader(3), ckpt_path=best)
    assert savers[1].best_model_path == str(best)
    assert best.is_dir()


def test_torch_scores_are_plain_numbers(tmp_path: Path):
    saver = ModelCheckpoint(tmp_path / "kept", monitor="score")
    run(tmp_path, saver, module=ScoredToy([torch.tensor(0.5)]))  # pyright: ignore[reportArgumentType]
    assert type(saver.state_dict()["best_model_score"]) is float


def test_what_users_of_lightning_read(tmp_path: Path):
    saver = ModelCheckpoint(monitor="score", save_top_k=2, mode="max")
    assert (saver.dirpath, saver.kth_best_model_path, float(saver.kth_value)) == (None, "", -INF)
    trainer = run(tmp_path, saver, module=ScoredToy([3, 1, 2]), max_epochs=3)
    assert saver.dirpath == str(trainer.run_folder.checkpoints)
    scores = {Path(path).name: score.item() for path, score in saver.best_k_models.items()}
    assert scores == {"step-00000004-1": 3.0, "step-00000012-1": 2.0}
    assert Path(saver.kth_best_model_path).name == "step-00000012-1"
    assert saver.best_model_score is not None
    assert saver.current_score is not None
    assert (saver.kth_value.item(), saver.best_model_score.item(), saver.current_score.item()) == (2.0, 3.0, 2.0)
    saver.to_yaml()
    written = Path(saver.dirpath) / "best_k_models.yaml"
    assert plain_yaml.load(written.read_text(), written) == {k: v.item() for k, v in saver.best_k_models.items()}
    with pytest.raises(UsageError, match="to_yaml"):
        ModelCheckpoint().to_yaml()


@pytest.mark.parametrize("monitor", ["epoch", "step"])
def test_counters_can_be_watched_and_are_whole_in_names(monitor: str, tmp_path: Path):
    saver = ModelCheckpoint(tmp_path / "kept", monitor=monitor, mode="max", filename="{epoch:02d}-{step}")
    run(tmp_path, saver, module=ScoredToy([1, 2]), max_epochs=2)
    assert names(tmp_path / "kept") == ["epoch=01-step=8-1"]


class Ask(Callback):
    """Sets a trigger in the last batch of the second epoch, before its validation."""

    def __init__(self, trigger: str | None) -> None:
        self.trigger = trigger

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trigger and trainer.current_epoch == 1 and batch_idx == trainer.num_training_batches - 1:
            trainer.set_trigger(self.trigger)


@pytest.mark.parametrize("trigger", ["save", "preempted"])
def test_what_is_saved_before_the_validation_of_its_epoch_is_ranked_by_it(tmp_path: Path, trigger: str):
    def fit(asked: str | None) -> ModelCheckpoint:
        saver = ModelCheckpoint(monitor="val_loss", save_top_k=1)
        trainer = quiet(max_epochs=4, callbacks=[saver, Ask(asked)], enable_checkpointing=True, trigger_every=1,
                        default_root_dir=tmp_path)  # fmt: skip
        trainer.fit(ScoredToy([5.0, 1.0, 4.0, 4.0], "val_loss"), loader(), loader(), ckpt_path="auto")
        return saver

    if trigger == "preempted":
        with pytest.raises(SystemExit):
            fit(trigger)
    saver = fit("save" if trigger == "save" else None)
    assert saver.best_model_score == 1.0
    assert Path(saver.best_model_path).name.startswith("step-")
    assert Path(saver.best_model_path).is_dir()


@pytest.mark.parametrize(("before", "now", "gone"), [(3, 1, 2), (2, 1, 1), (-1, 2, 2), (2, 2, 0), (1, 3, 0)])
def test_a_resumed_run_that_keeps_fewer_says_which_go(before: int, now: int, gone: int, tmp_path: Path):
    kept = {"monitor": "score", "dirpath": tmp_path / "kept"}
    run(tmp_path, ModelCheckpoint(**kept, save_top_k=before), module=ScoredToy([4, 3, 2, 1, 0]), max_epochs=4)
    trainer = quiet(
        max_epochs=5,
        callbacks=ModelCheckpoint(**kept, save_top_k=now),
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(ScoredToy([4, 3, 2, 1, 0]), loader(), loader(3), ckpt_path="last")
    (text,) = [str(one.message) for one in caught if "its next save deletes" in str(one.message)] or [""]
    assert text.count("step-") == gone


def test_a_resumed_run_with_another_folder_says_that_it_ranks_anew(tmp_path: Path):
    run(tmp_path, saver := ModelCheckpoint(tmp_path / "one", monitor="score"), module=ScoredToy([2, 1]), max_epochs=1)
    trainer = quiet(
        max_epochs=2,
        callbacks=ModelCheckpoint(tmp_path / "two", monitor="score"),
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    with pytest.warns(UserWarning, match="ranks anew: what it kept so far lies in another folder.*one/step-"):
        trainer.fit(ScoredToy([2, 1]), loader(), loader(3), ckpt_path=saver.best_model_path)

"""Parts of a checkpoint, beside what is alike with an Accelerator (tests/checkpoint/test_run_state.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from instep import Callback, Resume, Trainer
from instep.callbacks import ModelCheckpoint
from instep.checkpoint import KeepNewest, write_tensors
from instep.checkpoint.run_state import SavedRun
from instep.errors import CheckpointError, DataError, Preempted, SettingError
from tests.trainer.toys import LoggingToy, assert_same, loader, quiet, weights


class Counter(Callback):
    """Counts the steps of all its lives."""

    def __init__(self, preempt_at: int = -1) -> None:
        self.steps = 0
        self.preempt_at = preempt_at
        self.rates: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if trainer.global_step == self.preempt_at:
            trainer.set_trigger("preempted", "the test")


class Net(LoggingToy):
    """Momentum and a schedule per step; `width` changes a shape, `extra` adds a layer, `groups` splits the groups."""

    def __init__(self, width: int = 1, extra: bool = False, groups: bool = False, rate: float = 0.1) -> None:
        super().__init__()
        self.hparams.clear()
        self.layer = nn.Linear(4, width)
        self.body = nn.Linear(4, 4)
        if extra:
            self.extra = nn.Linear(4, 4)
        self.groups, self.rate = groups, rate
        self.start: dict[str, Tensor] = {}

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.body(x) + (self.extra(x) if hasattr(self, "extra") else 0)
        return nn.functional.mse_loss(self.layer(x).mean(-1), y)

    def on_train_start(self) -> None:
        self.start = weights(self)

    def configure_optimizers(self) -> Any:
        parameters = [{"params": self.layer.parameters()}, {"params": self.body.parameters()}]
        optimizer = torch.optim.SGD(parameters if self.groups else self.parameters(), lr=self.rate, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(root: Path, module: Net, *callbacks: Callback, epochs: int = 2, **arguments: Any) -> Trainer:
    trainer = quiet(
        max_epochs=epochs,
        callbacks=list(callbacks) or [Counter()],
        enable_checkpointing=True,
        default_root_dir=root,
        trigger_every=1,
    )
    trainer.fit(module, loader(shuffle=True), **arguments)
    return trainer


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Net]:
    """A run of two epochs of four steps: its checkpoint, and the module as it was then."""
    module = Net()
    trainer = fit(tmp_path / "first", module)
    assert trainer.checkpoint_callback is not None
    return Path(trainer.checkpoint_callback.last_model_path), module


def buffers(trainer: Trainer) -> list[Any]:
    return [state.get("momentum_buffer") for state in trainer.optimizers[0].state.values()]


class Look(Callback):
    """What there is when training starts."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.momentum, self.lr = bool(trainer.optimizers[0].state), trainer.optimizers[0].param_groups[0]["lr"]
        self.schedule = trainer.lr_scheduler_configs[0].scheduler.last_epoch
        self.resumed_from = trainer.resumed_from


def test_a_new_run_has_another_folder_and_leaves_the_old_one(saved: Any, tmp_path: Path):
    path, _ = saved
    anew, goes_on = Look(), Look()
    trainer = fit(tmp_path / "first", Net(), anew, Counter(), ckpt_path="last", resume=Resume.weights())
    assert (anew.resumed_from, trainer.global_step) == (None, 8)
    assert trainer.log_dir == str(tmp_path / "first" / "instep_runs" / "version_1")
    assert path.is_dir()
    again = fit(tmp_path / "first", Net(), goes_on, Counter(), epochs=3, ckpt_path="auto")
    assert goes_on.resumed_from is not None
    assert again.global_step == 12
    assert again.log_dir == trainer.log_dir
    assert again.resume_report is not None
    assert Path(again.resume_report.path).parent == Path(trainer.log_dir) / "checkpoints"


def test_what_is_taken_up_is_printed(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fit(tmp_path / "first", Net(), epochs=3, ckpt_path="auto", resume=Resume(lr=0.4))
    printed = capsys.readouterr().out
    assert f"Resuming from {saved[0]}: epoch 2 done, step 8.\n" in printed
    assert f"  learning rate: Resume(lr=0.4); after the schedules it is {0.4 / 256:g}\n" in printed


def test_from_a_file_of_weights(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, first = saved
    torch.save({"state_dict": first.state_dict()}, tmp_path / "other.ckpt")
    for file in (path / "model.safetensors", tmp_path / "other.ckpt"):
        module = Net()
        trainer = fit(tmp_path / file.stem, module, epochs=1, ckpt_path=file, resume=Resume.weights())
        assert_same(module.start, weights(first))
        assert trainer.global_step == 4
        assert f"Took up weights of {file}\n  weights: 4 of 4 entries\n" in capsys.readouterr().out
        for resume in (None, Resume(optimizer=False)):
            with pytest.raises(
                CheckpointError, match=r"is a file, of which the weights alone.*resume=Resume\.weights\(\)"
            ):
                fit(tmp_path / "none", Net(), ckpt_path=file, resume=resume)


def test_from_a_checkpoint_of_weights(tmp_path: Path):
    trainer = fit(tmp_path, Net(), ModelCheckpoint(tmp_path / "kept", save_weights_only=True))
    assert trainer.checkpoint_callback is not None
    path = trainer.checkpoint_callback.last_model_path
    with pytest.raises(CheckpointError, match=r"holds weights only.*Resume\.weights\(\)"):
        fit(tmp_path / "second", Net(), ckpt_path=path)
    module = Net()
    fit(tmp_path / "second", module, ckpt_path=path, resume=Resume.weights())
    assert_same(module.start, weights(trainer.model))  # pyright: ignore[reportArgumentType]


# ---- what does not fit


def test_what_was_left_out_is_printed(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fit(tmp_path / "second", Net(width=2, extra=True), epochs=3, ckpt_path=saved[0], resume=Resume(strict=False))
    printed = capsys.readouterr().out
    assert "weights: 2 of 6 entries" in printed
    assert "not in the checkpoint (2): extra.weight, extra.bias" in printed
    assert "of another shape, left as initialized (2): layer.weight [1, 4] there, [2, 4] here" in printed
    assert "goes on at epoch 2 done, step 8" in printed


def test_resuming_with_other_parameter_groups_is_an_error_with_advice(saved: Any, tmp_path: Path):
    path, _ = saved
    with pytest.raises(CheckpointError, match="1 parameter groups saved, 2 now"):
        fit(tmp_path / "second", Net(groups=True), ckpt_path=path)
    with pytest.raises(CheckpointError, match=r"1 parameter groups under ExponentialLR saved, 2 now.*schedulers=False"):
        fit(tmp_path / "second", Net(groups=True), ckpt_path=path, resume=Resume(optimizer=False))
    look = Look()
    resume = Resume(strict=False)
    trainer = fit(tmp_path / "second", Net(groups=True), look, Counter(), epochs=3, ckpt_path=path, resume=resume)
    report = trainer.resume_report
    assert report is not None
    assert report.left_out == ["all of schedulers: 1 parameter groups under ExponentialLR saved, 2 now"]
    assert look.momentum
    assert (look.lr, look.schedule) == (0.1, 0)  # the schedule starts as configured, and so do the rates
    assert all(buffer is not None for buffer in buffers(trainer))


class Other(Net):
    """Without a schedule, or with another kind, or with two optimizers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.kind == "bare":
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("bare", r"the schedulers ExponentialLR saved, \(none\) now"),
        ("step", "the schedulers ExponentialLR saved, StepLR now"),
    ],
)
def test_another_schedule_does_not_get_the_state_of_the_old_one(kind: str, said: str, saved: Any, tmp_path: Path):
    with pytest.raises(CheckpointError, match=rf"{said}.*Resume\(schedulers=False\)"):
        fit(tmp_path / "second", Other(kind), ckpt_path=saved[0])
    fit(tmp_path / "second", Other(kind), epochs=3, ckpt_path=saved[0], resume=Resume(schedulers=False))


# ---- settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": 1}, r"Resume\(optimizer=1\)"),
        ({"strict": "yes"}, r"Resume\(strict='yes'\)"),
        ({"position": False, "loggers": True}, "log the first steps a second time"),
        ({"lr": -1.0}, r"lr=-1\.0"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"lr": []}, r"lr=\[\]"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": True}, "lr=True"),
    ],
)
def test_wrong_arguments_of_resume_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(SettingError, match=message):
        Resume(**arguments)


@pytest.mark.parametrize("lr", [np.float32(0.5), torch.tensor(0.5), np.array([0.5]), [np.float32(0.5)]], ids=repr)
def test_a_rate_may_be_of_numpy_or_torch(lr: Any):
    kept = Resume(lr=lr).lr
    assert kept == (0.5 if np.ndim(lr) == 0 else (0.5,))
    assert type(kept[0] if isinstance(kept, tuple) else kept) is float


def test_resume_needs_something_to_take_up(tmp_path: Path):
    with pytest.raises(SettingError, match="there is no ckpt_path"):
        fit(tmp_path, Net(), resume=Resume())
    with pytest.raises(SettingError, match=r"an instep\.Resume, such as"):
        fit(tmp_path, Net(), ckpt_path="last", resume="weights")
    trainer = fit(tmp_path, Net(), ckpt_path="auto", resume=Resume.weights())
    assert trainer.resume_report is None


def test_rates_for_each_group_must_be_as_many(saved: Any, tmp_path: Path):
    with pytest.raises(SettingError, match="lr has 2 learning rates, and the optimizers have 1"):
        fit(tmp_path / "second", Net(), ckpt_path=saved[0], resume=Resume(lr=[1, 2]))


# ---- the same command again


@pytest.mark.parametrize(
    "resume", [Resume(lr=0.3), Resume(optimizer=False, schedulers=False), Resume.weights()], ids=str
)
def test_resume_parts_apply_to_the_first_start_of_a_run_only(
    resume: Resume, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A run that began with parts of another and was killed goes on with all of its own."""
    results = []
    for stops in ([-1], [1, -1]):
        root = tmp_path / str(len(stops))
        torch.manual_seed(1)
        fit(root, Net())
        for at in stops:
            module, counter = Net(), Counter(at if resume.weights_only else 8 + at if at > 0 else -1)
            trainer = quiet(
                max_epochs=3, callbacks=[counter], enable_checkpointing=True, default_root_dir=root, trigger_every=1
            )
            try:
                trainer.fit(module, loader(), ckpt_path="auto", resume=resume)
            except Preempted:
                assert at > 0
        assert trainer.global_step == 12
        results.append((weights(module), counter.rates[-1], [b.tolist() for b in buffers(trainer)]))
    assert_same(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert "Resuming from" in capsys.readouterr().out


def test_a_run_that_counts_anew_leaves_the_checkpoints_of_the_first_one(tmp_path: Path):
    kept = tmp_path / "kept"
    fit(tmp_path, Net(), ModelCheckpoint(kept, keep=KeepNewest(2)))
    again = ModelCheckpoint(kept, keep=KeepNewest(2))
    fit(tmp_path, Net(), again, ckpt_path=kept / "step-00000008-1", resume=Resume(position=False))
    names = [f"step-0000000{step}-{attempt}" for step in (4, 8) for attempt in (1, 2)]
    assert sorted(path.name for path in kept.glob("step-*")) == names


def test_auto_cannot_count_anew_in_the_same_folder(tmp_path: Path):
    fit(tmp_path, Net(), ModelCheckpoint(tmp_path / "kept"))
    with pytest.raises(SettingError, match="would find step-00000008-1 at the next start too"):
        fit(tmp_path, Net(), ModelCheckpoint(tmp_path / "kept"), ckpt_path="auto", resume=Resume.weights())


def test_evaluation_says_what_it_left_out(saved: Any, tmp_path: Path):
    module = Net(width=2)
    module.strict_loading = False
    with pytest.warns(UserWarning, match=r"of another shape, left as initialized \(2\): layer\.weight"):
        quiet(default_root_dir=tmp_path).validate(module, loader(3), ckpt_path=saved[0], verbose=False)
    with pytest.warns(UserWarning, match=r"of another shape"):
        Net.load_from_checkpoint(saved[0], strict=False, width=2)
    with pytest.raises(CheckpointError, match=r"layer\.weight"):
        Net.load_from_checkpoint(saved[0], width=2)


def test_lazy_parameters_have_no_shape_yet(tmp_path: Path):
    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.LazyLinear(4)

    module = Net()
    write_tensors(tmp_path / "w.safetensors", dict(module.state_dict()))
    assert_same(weights(Lazy.load_from_checkpoint(tmp_path / "w.safetensors", strict=False)), weights(module))


def test_a_resume_that_is_refused_leaves_the_trainer_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(Preempted) as stopped:
        fit(tmp_path / "first", Net(), Counter(preempt_at=2))
    trainer = quiet(
        max_epochs=1, callbacks=[Counter()], enable_checkpointing=True, default_root_dir=tmp_path / "second"
    )
    with pytest.raises(DataError):  # the checkpoint stands within an epoch of other data
        trainer.fit(Net(), loader(length=30, shuffle=True), ckpt_path=stopped.value.checkpoint)
    assert trainer.global_step == 0
    trainer.fit(Net(), loader(shuffle=True))
    assert trainer.global_step == 4


def test_a_resumed_run_that_fails_leaves_the_trainer_at_its_step(tmp_path: Path) -> None:
    with pytest.raises(Preempted) as stopped:
        fit(tmp_path / "first", Net(), Counter(preempt_at=2))

    class Failing(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            raise ValueError("no more")

    trainer = quiet(callbacks=[Counter()], enable_checkpointing=True, default_root_dir=tmp_path / "second")
    with pytest.raises(ValueError, match="no more"):
        trainer.fit(Failing(), loader(shuffle=True), ckpt_path=stopped.value.checkpoint)
    assert trainer.global_step == 4


@pytest.mark.parametrize("other", [True, False])
def test_ranks_take_up_their_own_random_state_where_all_of_them_can(
    other: bool, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gathered(mine: tuple[bool, bool]) -> list[tuple[bool, bool]]:
        return [mine, (other, False)]  # the other rank has read another part of the data, or the same

    taken: list[bool] = []
    random_state = SavedRun.random_state
    monkeypatch.setattr("instep.trainer.run_state.gather_object", gathered)
    monkeypatch.setattr(
        SavedRun, "random_state", lambda self, own, rank: taken.append(own is not None) or random_state(self, own, rank)
    )
    fit(tmp_path / "second", Net(), epochs=3, ckpt_path=saved[0])
    assert taken == [other]

"""The bars that have Lightning's names, with what its users override."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Trainer
from instep.callbacks import (
    Callback,
    LiveProgressBar,
    ProgressBar,
    RichProgressBar,
    RichProgressBarTheme,
    TQDMProgressBar,
)
from instep.callbacks.guests.tqdm_progress import Tqdm
from instep.errors import SettingError, UsageError
from instep.loggers import CSVLogger
from tests.callbacks.fakes import FakeTrainer
from tests.trainer.resuming import Net, Plain


class Logging(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("on_host", float(batch_idx), prog_bar=True)
        self.print("a line of the step", end=" and its end\n")
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", 0.5, prog_bar=True, add_dataloader_idx=False)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch[0]


def data(samples: int) -> Any:
    return torch.utils.data.DataLoader(Plain(samples), batch_size=2)


def trainer_with(bar: Callback, folder: Path, **options: Any) -> Trainer:
    return Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=bar,
        logger=CSVLogger(save_dir=folder, version="of_the_run"),
        enable_checkpointing=False,
        enable_model_summary=False,
        **options,
    )


def run_all(trainer: Trainer) -> None:
    model = Logging()
    trainer.fit(model, data(10), [data(4), data(6)])
    trainer.validate(model, [data(4), data(6)], verbose=False)
    trainer.test(model, data(4), verbose=False)
    trainer.predict(model, [data(4), data(6)])


class Recording(Tqdm):
    """A bar that notes its counters and descriptions."""

    def __init__(self, **options: Any) -> None:
        self.seen: list[Any] = []
        super().__init__(**options)

    def refresh(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append((self.desc, self.n, self.total))
        super().refresh(*args, **kwargs)


class Bar(TQDMProgressBar):
    """What Lightning's users write."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[int] = []
        self.bars: list[Any] = []

    def init_train_tqdm(self) -> Tqdm:
        super().init_train_tqdm().close()
        self.bars.append(Recording(desc=self.train_description, mininterval=0.0, file=sys.stdout))
        return self.bars[-1]

    def init_validation_tqdm(self) -> Tqdm:
        bar = super().init_validation_tqdm()
        self.bars.append(bar)
        return bar

    @property
    def validation_description(self) -> str:
        return "VAL"

    def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
        self.asked.append(trainer.global_step)
        items = super().get_metrics(trainer, module)
        assert items.pop("v_num") == "_run"
        return items

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        self.train_progress_bar.set_postfix_str(f"{self.train_progress_bar.postfix}, mine")


def test_the_tqdm_bar_counts_by_its_refresh_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bar = Bar(refresh_rate=2)
    with pytest.raises(TypeError, match="has not been set yet"):
        _ = bar.train_progress_bar
    trainer = trainer_with(bar, tmp_path)
    run_all(trainer)
    # Of five batches the second, the fourth and the last; at the end of an epoch and of a validation.
    assert bar.asked == [0, 2, 4, 5, 5, 5, 7, 9, 10, 10, 10]
    train, val = bar.bars[0], bar.bars[1]
    counts = [n for desc, n, total in train.seen if (desc, total) == ("Epoch 1: ", 5)]
    assert sorted(set(counts)) == [0, 2, 4, 5]
    assert str(train.postfix) == "on_host=4.000, val=0.500"
    assert (val.n, val.total, val.desc) == (3, 3, "VAL DataLoader 1: ")
    assert (bar.test_progress_bar.n, bar.test_progress_bar.desc) == (2, "Testing DataLoader 0: ")
    assert (bar.predict_progress_bar.n, bar.predict_progress_bar.desc) == (3, "Predicting DataLoader 1: ")
    out = capsys.readouterr().out
    assert out.count("a line of the step and its end\n") == 10, "above the bar"
    assert "on_host=4.000, val=0.500, mine]" in out
    assert (bar.total_train_batches, bar.total_val_batches, bar.refresh_rate) == (5, 5, 2)
    bar.bars.clear()
    assert pickle.loads(pickle.dumps(bar)).refresh_rate == 2


def test_a_failed_run_closes_tqdms_bars(tmp_path: Path):
    class Broken(Logging):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ValueError("broken")

    bar = TQDMProgressBar()
    with pytest.raises(ValueError, match="broken"):
        trainer_with(bar, tmp_path).fit(Broken(), data(4))
    assert bar.train_progress_bar.disable


@pytest.mark.parametrize("make", [TQDMProgressBar, RichProgressBar])
def test_bars_that_show_nothing(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bar = make(refresh_rate=0)
    assert bar.is_disabled
    run_all(trainer_with(bar, tmp_path))
    assert "Epoch" not in "".join(capsys.readouterr())
    other = make()
    other.setup(FakeTrainer(global_rank=1), None, "fit")
    assert other.is_disabled, "of another rank than the first"
    with pytest.raises(SettingError, match="refresh_rate"):
        make(refresh_rate=-1)


def test_the_rich_bar_shows_tasks_columns_and_the_users_texts(tmp_path: Path):
    """Tasks by stage, columns and styles of the theme, and the user's texts; drawn by the thread, on a terminal."""
    from rich.progress import TextColumn

    shown = io.StringIO()

    class Mine(RichProgressBar):
        def configure_columns(self, trainer: Any) -> Any:
            return [*super().configure_columns(trainer), TextColumn("my column")]

        def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
            items = super().get_metrics(trainer, module)
            assert items.pop("v_num") == "_run"
            return {**items, "mine": 123.0}

    theme = RichProgressBarTheme(description="bold", metrics_format=".2e", metrics_text_delimiter=" | ")
    console = {"file": shown, "force_terminal": True, "width": 160}
    bar = Mine(refresh_rate=10, theme=theme, console_kwargs=console)
    trainer = trainer_with(bar, tmp_path)
    model = Logging()
    trainer.fit(model, data(10), [data(4), data(6)])
    assert bar.error is None
    assert [(task.completed, task.total) for task in bar.progress.tasks] == [(2, 2), (5, 5), (3, 3)]
    assert (bar.train_progress_bar.description, bar.val_progress_bar.visible) == ("[bold]Epoch 1/1 ", False)
    text = shown.getvalue()
    assert "on_host: 4.00e+00 | val: 5.00e-01 | mine: 1.23e+02" in text
    assert "my column" in text
    assert "5/5" in text
    trainer.validate(model, [data(4), data(6)], verbose=False)
    assert [(task.completed, task.total) for task in bar.progress.tasks] == [(3, 3)]
    assert pickle.loads(pickle.dumps(RichProgressBar(theme=theme))).theme == theme
    with pytest.raises(SettingError, match="theme"):
        RichProgressBar(theme="dark")  # type: ignore[arg-type]


def test_max_steps_limits_the_number_of_batches_which_stays_the_same_within_an_epoch(tmp_path: Path):
    seen: list[Any] = []

    class Counting(ProgressBar):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((batch_idx + 1, self.total_train_batches))

    trainer = Trainer(
        max_steps=5,
        accumulate_grad_batches=2,
        accelerator="cpu",
        callbacks=Counting(),
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(Plain(8), batch_size=1))
    assert seen == [*((number, 8) for number in range(1, 9)), (1, 2), (2, 2)]


def test_a_bar_of_ones_own(tmp_path: Path):
    seen: list[Any] = []

    class Percent(ProgressBar):
        def disable(self) -> None:
            self.enable = False

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
            seen.append(100 * (batch_idx + 1) / self.total_train_batches)

        def print(self, *args: Any, **kwargs: Any) -> None:
            seen.append(args[0])

    bar = Percent()
    with pytest.raises(UsageError, match="known once a run"):
        _ = bar.trainer
    trainer = trainer_with(bar, tmp_path, max_steps=2)
    assert trainer.progress_bar_callback is bar
    assert not any(isinstance(callback, LiveProgressBar) for callback in trainer.callbacks)
    trainer.fit(Logging(), data(4))
    assert seen[:4] == ["a line of the step", 50.0, "a line of the step", 100.0]
    clash = FakeTrainer(progress_bar_metrics={"v_num": 3}, loggers=[CSVLogger(version=7)])
    with pytest.warns(UserWarning, match="already tracks a metric with the name.s. 'v_num'"):
        assert bar.get_metrics(clash, None) == {"v_num": 3}

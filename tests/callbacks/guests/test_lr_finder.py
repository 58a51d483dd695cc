from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Tuner, seed_everything
from instep.callbacks import LearningRateFinder, LRFinder, ModelCheckpoint
from instep.errors import HookError, SettingError, UsageError
from instep.utils.seed import rng_state
from tests.trainer.toys import Toy, loader, quiet
from tests.trainer.trials.toys import Data, Model, different, everything, trained

STEPS = 40


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def run(find: str, lr: float = 0.1, **settings: Any) -> tuple[dict[str, Any], float, Any]:
    seed_everything(3)
    module, data = Model(lr), Data()
    finder = LearningRateFinder(num_training_steps=STEPS)
    trainer = quiet(max_epochs=2, callbacks=[finder] if find == "callback" else [], **settings)
    if find == "tuner":
        before = rng_state()
        found = Tuner(trainer).lr_find(module, datamodule=data, num_training=STEPS)
        assert found is not None
        assert str(rng_state()) == str(before)
        assert trainer.global_step == trainer.current_epoch == 0
        assert module.seen == []
    result = trained(trainer, module, data)
    return result, module.hparams.lr, finder


def test_the_search_stops_early_though_the_first_step_had_no_loss():
    def smoothed(*losses: float) -> list[float]:
        left = iter(losses)
        found = LearningRateFinder()._try(lambda: next(left), [{"lr": 0.1}])
        assert found is not None
        return found.results["loss"]

    assert smoothed(*[math.nan] * 3, 1.0, 1.0, 1e6)[3:] == smoothed(1.0, 1.0, 1e6)


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}], ids=["", "bf16"])
def test_training_after_it_is_as_without_it(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    after, lr, _ = run("tuner", **settings)
    assert lr != 0.1
    plain, _, _ = run("", lr, **settings)
    assert different(after, plain) == []
    by_callback, same, finder = run("callback", **settings)
    assert same == lr == finder.optimal_lr.suggestion()
    assert different(by_callback, plain) == []
    assert files(tmp_path) == []


class Later(LearningRateFinder):
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, module)
            module.found = [*getattr(module, "found", []), self.optimal_lr]


def test_in_a_later_epoch_and_not_again_when_resumed(tmp_path: Path) -> None:
    class Stops(Model):
        stop_at = -1

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == self.stop_at:
                self.trainer.set_trigger("save")
                self.trainer.should_stop = True

    def fit(folder: str, stop_at: int, resume: bool = False) -> tuple[Any, Any]:
        seed_everything(1)
        module, data = Stops(), Data()
        module.stop_at = stop_at
        saver = ModelCheckpoint(dirpath=tmp_path / folder, save_top_k=0, save_last=True)
        trainer = quiet(
            max_epochs=3, callbacks=[Later(num_training_steps=STEPS), saver], enable_checkpointing=True, trigger_every=1
        )
        trainer.fit(module, datamodule=data, ckpt_path="auto" if resume else None)
        return trainer, module

    whole = fit("whole", -1)
    assert len(whole[1].found) == 1
    assert whole[1].found[0].suggestion() == whole[1].hparams.lr != 0.1
    fit("cut", 40)  # in the middle of the second epoch
    trainer, module = fit("cut", -1, resume=True)
    finder = trainer.callbacks[0]
    assert finder.optimal_lr.results == whole[1].found[0].results
    assert module.found[0] is finder.optimal_lr  # loaded: the steps were not taken again
    module.seen, module.counts, module.running = whole[1].seen, whole[1].counts, whole[1].running  # not in checkpoints
    assert different(dict(everything(*whole)), dict(everything(trainer, module))) == []


def test_an_error_leaves_everything_as_it_was() -> None:
    class Breaks(Model):
        broken = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.broken and self.counts["steps"] == 15:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    seed_everything(0)
    module, data, trainer = Breaks(), Data(), quiet(max_epochs=1)
    weights, random = str(module.state_dict()), str(rng_state())
    settings, callbacks = trainer.settings, trainer.callbacks
    with pytest.raises(KeyboardInterrupt):
        Tuner(trainer).lr_find(module, datamodule=data, num_training=STEPS)
    assert str(module.state_dict()) == weights
    assert str(rng_state()) == random
    assert (module.seen, module.counts, float(module.running)) == ([], {"steps": 0}, 0.0)
    assert module.hparams.lr == 0.1
    assert (trainer.settings, trainer.callbacks, trainer.global_step) == (settings, callbacks, 0)
    module.broken = False
    after = trained(trainer, module, data)
    seed_everything(0)
    module = Breaks()
    module.broken = False
    assert different(after, trained(quiet(max_epochs=1), module, Data())) == []


def test_the_learning_rate_finder_records_rates_and_losses() -> None:
    class Known(Toy):
        """Each step's loss is what `losses` says of it."""

        losses = [4.0, 3.0, 2.0, 1.0, 0.5, 0.4, 0.3, 50.0, 1.0]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.rates = [*getattr(self, "rates", []), self.optimizers().param_groups[0]["lr"]]
            loss = self.losses[self.global_step]
            return None if loss is None else self.layer.weight.sum() * 0 + loss

    def find(**settings: Any) -> LRFinder:
        module = Known()
        settings = {"num_training": 9, "min_lr": 1e-3, "max_lr": 1.0, "update_attr": False, **settings}
        found = Tuner(quiet(limit_train_batches=3)).lr_find(module, loader(16), **settings)
        assert found is not None
        return found

    found = find()
    assert found.results["lr"][0] == 1e-3
    assert found.results["lr"][1:] == pytest.approx([1e-3 * 1000 ** (i / 9) for i in range(2, 9)])
    means, mean = [], 0.0
    for i, loss in enumerate(Known.losses[:8]):
        mean = 0.98 * mean + 0.02 * loss
        means.append(mean / (1 - 0.98 ** (i + 2)))
    assert found.results["loss"] == pytest.approx(means, rel=1e-6)  # the jump at the eighth ended it
    everything_tried = find(early_stop_threshold=None, mode="linear")
    assert everything_tried.results["lr"] == pytest.approx([1e-3] + [1e-3 + i / 9 * 0.999 for i in range(2, 10)])
    Known.losses = [4.0, None, math.nan, 1.0]
    with pytest.warns(UserWarning, match="returned None"):
        skipping = find(num_training=4)
    assert math.isnan(skipping.results["loss"][1])
    assert len(skipping.results["loss"]) == 3  # nothing comes after a loss that is nan
    assert math.isinf(skipping.results["loss"][2])


def test_suggestion_says_why_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    found = LRFinder("exponential", 1e-4, 1.0, 6)
    found.results = {"lr": [1e-4, 1e-3, 1e-2, 1e-1, 1.0], "loss": [5.0, 4.9, 3.0, math.nan, 1.0]}
    assert found.suggestion(skip_begin=0) == 1e-2
    assert found.suggestion() is None
    assert "of 5 losses 0 are left without the first 10, the last 1" in caplog.text


def test_wrong_arguments_of_the_learning_rate_finder_are_refused() -> None:
    module, data = Model(), Data()
    for wrong in ({"mode": "cubic"}, {"num_training_steps": 0}, {"min_lr": 0.0}, {"min_lr": 1}):
        with pytest.raises(SettingError, match=r"cubic|at least 1|above 0|other than min_lr=1"):
            LearningRateFinder(**wrong)
    with pytest.warns(UserWarning, match="12 steps are too few for a suggestion"):
        LearningRateFinder(num_training_steps=12)
    with pytest.warns(UserWarning, match="the rates fall from step to step"):
        LearningRateFinder(min_lr=1, max_lr=1e-8)
    with pytest.raises(SettingError, match="two LearningRateFinder"):
        quiet(callbacks=[LearningRateFinder(), LearningRateFinder()]).fit(module, datamodule=data)
    with pytest.raises(SettingError, match="Tuner takes a Trainer, and got a Model"):
        Tuner(module)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="already configured with a `LearningRateFinder`"):
        Tuner(quiet(callbacks=[LearningRateFinder()])).lr_find(module, datamodule=data)
    with pytest.raises(SettingError, match="only valid configuration"):
        Tuner(quiet()).lr_find(module, datamodule=data, method="test")
    with pytest.raises(AttributeError, match=r"set to lrs, but could not find.* There is lr"):
        Tuner(quiet()).lr_find(module, datamodule=data, attr_name="lrs")
    with pytest.warns(UserWarning, match="Skipping learning rate finder"):
        assert Tuner(quiet(fast_dev_run=True)).lr_find(module, datamodule=data) is None

    class Two(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    class Never(Two):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(UsageError, match=r"15 calls of Never\.training_step stepped no optimizer"):
        Tuner(quiet()).lr_find(Never(), datamodule=data, num_training=15)
    with pytest.raises(HookError, match="2 optimizers, but the learning rate finder only works with single optimizer"):
        Tuner(quiet()).lr_find(Two(), datamodule=data)


@pytest.mark.plots
def test_the_learning_rate_plot_marks_the_suggestion() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    found = LRFinder("exponential", 1e-4, 1.0, 14)
    found.results = {"lr": [10.0 ** (i / 4 - 4) for i in range(15)], "loss": [5.0 - 0.1 * i * i for i in range(15)]}
    figure = found.plot(suggest=True)
    [axes] = figure.axes
    assert axes.get_xscale() == "log"
    assert [len(line.get_xdata()) for line in axes.lines] == [15, 1]
    assert axes.lines[1].get_xdata()[0] == found.suggestion()
    mpl.pyplot.close(figure)

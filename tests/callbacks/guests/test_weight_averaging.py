"""Averaged weights: against torch's own AveragedModel, over strategies, checkpoints and resumes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

from instep import Callback, Trainer, TrainModule
from instep.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from instep.checkpoint import Resume, load_weights, merge
from instep.cli.main import main
from instep.errors import CheckpointError, SettingError
from tests.helpers.spawn import run_ranks


class Net(TrainModule):
    """A small network with BatchNorm, and a buffer that is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class Crash(Exception):
    pass


class Watch(Callback):
    """Notes metrics, keeps what torch's AveragedModel makes of the same weights, and ends the run."""

    runs_last = True

    def __init__(self, crash_at: int | None = None, reference: AveragedModel | None = None) -> None:
        self.crash_at, self.reference = crash_at, reference
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.reference is not None:
            self.reference.update_parameters(module.net)
        if trainer.global_step == self.crash_at:
            raise Crash

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.losses[trainer.global_step] = float(trainer.callback_metrics["val_loss"])


def data(shuffle: bool = True) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(40, 8, generator=generator), torch.randn(40, 2, generator=generator))
    return DataLoader(samples, batch_size=8, shuffle=shuffle)


def make_trainer(folder: Any, *callbacks: Callback, **settings: Any) -> Trainer:
    settings = {"max_epochs": 3, "num_sanity_val_steps": 0, "accelerator": "cpu", "devices": 1, **settings}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(callbacks=list(callbacks), default_root_dir=folder, **quiet, **settings)


def made() -> Net:
    torch.manual_seed(1)
    return Net()


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_average_is_torchs_and_both_sets_are_in_the_checkpoint(tmp_path, capsys):
    module = made()
    reference = AveragedModel(module.net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    averaging = EMAWeightAveraging(decay=0.9)
    watch = Watch(reference=reference)
    live: dict[str, Any] = {}

    class KeepLive(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            live.update({name: value.clone() for name, value in module.state_dict().items()})

    trainer = make_trainer(tmp_path, watch, averaging, KeepLive(), ModelCheckpoint(monitor="val_loss"), max_epochs=1)
    trainer.fit(module, data(), data(shuffle=False))
    expected = {f"net.{name}": value for name, value in reference.module.state_dict().items()}
    counted = {name for name in expected if "num_batches" in name}  # not averaged
    for name in expected.keys() - counted:
        assert torch.equal(module.state_dict()[name], expected[name]), name
    assert averaging.n_averaged == 5
    best = trainer.checkpoint_callback.best_model_path
    assert equal(load_weights(best), module.state_dict())
    assert equal(load_weights(best, "averaged"), module.state_dict())
    assert equal(load_weights(best, "live"), live)
    assert not torch.equal(live["net.0.weight"], module.state_dict()["net.0.weight"])
    assert equal(Net.load_from_checkpoint(best, which_weights="live").state_dict(), live)
    assert equal(load_weights(merge(best, tmp_path / "live.safetensors", "live")), live)
    assert main(["checkpoint", "convert", best, str(tmp_path / "cli.safetensors"), "--weights", "live"]) == 0
    assert "averaged weights" in capsys.readouterr().out
    assert equal(load_weights(tmp_path / "cli.safetensors"), live)
    with pytest.raises(CheckpointError, match="one set of weights"):
        load_weights(tmp_path / "cli.safetensors", "live")
    # What was validated is what a checkpoint tells and holds: exactly, since nothing is left to chance.
    (tested,) = trainer.validate(Net(), data(shuffle=False), ckpt_path="best", verbose=False)
    assert tested["val_loss"] == watch.losses[5] == float(trainer.checkpoint_callback.best_model_score)


def test_resumes_without_the_callback_and_with_a_new_one(tmp_path):
    first = make_trainer(tmp_path, WeightAveraging(), Watch(crash_at=7), ModelCheckpoint(every_n_train_steps=1))
    with pytest.raises(Crash):
        first.fit(made(), data(), data(shuffle=False))
    path = first.checkpoint_callback.last_model_path
    plain = make_trainer(tmp_path / "plain")
    plain.fit(made(), data(), data(shuffle=False))
    without = make_trainer(tmp_path / "without")
    module = made()
    with pytest.warns(UserWarning, match="left out: .*WeightAveraging"):
        without.fit(module, data(), data(shuffle=False), ckpt_path=path)
    assert equal(module.state_dict(), plain.model.state_dict())  # as if nothing had been averaged
    averaging = EMAWeightAveraging()
    saver = ModelCheckpoint(every_n_train_steps=1)
    with pytest.warns(UserWarning, match="begins with the weights after step 6|left out: WeightAveraging") as caught:
        make_trainer(tmp_path / "later", averaging, saver).fit(made(), data(), data(shuffle=False), ckpt_path=path)
    assert len(caught) == 2
    assert averaging.n_averaged == 9
    start = made()
    make_trainer(tmp_path / "new", max_steps=0).fit(start, data(), ckpt_path=path, resume=Resume.weights())
    assert equal(start.state_dict(), load_weights(path, "averaged"))


def test_stochastic_weight_averaging_updates_batchnorm_as_torch_does(tmp_path):
    kept: list[dict[str, Any]] = []

    class KeepEpochs(Callback):
        runs_last = True

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            kept.append(copy.deepcopy(module.net.state_dict()))

    class NoDropout(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net[3] = nn.Identity()

    torch.manual_seed(1)
    module = NoDropout()
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=2)
    trainer = make_trainer(tmp_path, averaging, KeepEpochs(), ModelCheckpoint(save_last=True))
    trainer.fit(module, data(), data(shuffle=False))
    reference = AveragedModel(module.net)
    for number in (1, 2):
        source = copy.deepcopy(module.net)
        source.load_state_dict(kept[number])
        reference.update_parameters(source)
    update_bn(data(shuffle=False), reference.module)  # the mean over batches; which samples are in one changes it a bit
    for name, value in reference.module.named_parameters():
        torch.testing.assert_close(module.net.get_parameter(name), value)
    for name, value in reference.module.named_buffers():
        torch.testing.assert_close(module.net.get_buffer(name), value, rtol=0.2, atol=0.05)
    assert module.net[1].num_batches_tracked == 5
    assert averaging.n_averaged == 2
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [pytest.approx(0.05)]
    last = load_weights(trainer.checkpoint_callback.last_model_path, "live")
    assert equal({name[4:]: value for name, value in last.items() if name != "mask"}, kept[2])
    plain = make_trainer(tmp_path / "plain", KeepEpochs())
    torch.manual_seed(1)
    plain.fit(NoDropout(), data(), data(shuffle=False))
    assert equal(kept[0], kept[3])  # before it began, nothing was other
    torch.manual_seed(1)
    make_trainer(tmp_path / "again", averaging, KeepEpochs()).fit(NoDropout(), data(), data(shuffle=False))
    assert equal(kept[2], kept[8])  # the callback of an earlier run begins anew


_KINDS: dict[str, Any] = {
    "ema": lambda: EMAWeightAveraging(decay=0.8, use_for=("val", "save", "end")),
    "swa": lambda: StochasticWeightAveraging(0.05, 2, use_for=("val", "end")),
}


def fit_and_resume(folder: str, strategy: str, kinds: tuple[str, ...]) -> list[str]:
    """Train each kind of average whole, and crashed and resumed; return what differs in the end."""
    differ = []
    for kind in kinds:
        ends = []
        for part, crash_at in (("whole", None), ("resumed", 5), ("resumed", None)):
            watch, averaging = Watch(crash_at), _KINDS[kind]()
            saver = ModelCheckpoint(every_n_train_steps=2, save_last=True)
            where = f"{folder}/{strategy}/{kind}/{part}"
            trainer = make_trainer(where, watch, averaging, saver, strategy=strategy, devices=1 + (strategy != "auto"))
            try:
                trainer.fit(made(), data(), data(shuffle=False), ckpt_path="auto" if part == "resumed" else None)
            except Crash:
                continue
            held = {name: value.detach().clone() for name, value in trainer.strategy.local_weights().items()}
            ends.append((held, averaging, watch, load_weights(saver.last_model_path, "live"), trainer))
        whole, resumed = ends
        same = equal(whole[0], resumed[0]) and equal(whole[3], resumed[3])
        same = same and whole[1].state_dict() == resumed[1].state_dict()
        same = same and {s: v for s, v in whole[2].losses.items() if s in resumed[2].losses} == resumed[2].losses
        rates = [[group["lr"] for group in each[4].optimizers[0].param_groups] for each in ends]
        if not same or rates[0] != rates[1]:
            differ.append(f"{strategy} {kind}")
    return differ


def move_to_one_process(folder: str) -> dict[str, Any]:
    """Crash on two sharded ranks, with both sets of weights in parts."""
    saver = ModelCheckpoint(every_n_train_steps=1)
    trainer = make_trainer(folder, Watch(5), EMAWeightAveraging(decay=0.8), saver, strategy="fsdp", devices=2)
    with pytest.raises(Crash):
        trainer.fit(made(), data(), data(shuffle=False))
    path = Path(saver.last_model_path)
    return {"path": str(path), "files": sorted(file.name for file in path.glob("*.safetensors"))}


def on_two_ranks(folder: str) -> list[Any]:
    differ = fit_and_resume(folder, "ddp", ("ema",)) + fit_and_resume(folder, "fsdp", ("swa",))
    return [differ, move_to_one_process(f"{folder}/moved")]


@pytest.mark.dist
def test_two_ranks_resume_bit_for_bit_sharded_and_not(tmp_path):
    (differ, moved), of_second = run_ranks(on_two_ranks, 2, str(tmp_path))
    assert [differ, of_second[0]] == [[], []]
    assert {"live-00000-of-00002.safetensors", "live-00001-of-00002.safetensors"} <= set(moved["files"])
    averaging = EMAWeightAveraging(decay=0.8)
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            average = averaging._averages["net.0.weight"]
            seen.update(average=average.clone(), live=module.state_dict()["net.0.weight"].clone())

    saver = ModelCheckpoint(every_n_train_steps=1)
    make_trainer(tmp_path / "one", averaging, Look(), saver).fit(
        made(), data(), data(shuffle=False), ckpt_path=moved["path"]
    )
    assert torch.equal(seen["live"], load_weights(moved["path"], "live")["net.0.weight"])
    assert torch.equal(seen["average"], load_weights(moved["path"], "averaged")["net.0.weight"])
    assert averaging.n_averaged > 4


def test_one_process_resumes_bit_for_bit(tmp_path):
    assert fit_and_resume(str(tmp_path), "auto", ("swa",)) == []


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: EMAWeightAveraging(decay=1.5), "decay=1.5"),
        (lambda: EMAWeightAveraging(0.9), r"device=0.9: .*decay=0.999"),
        (lambda: EMAWeightAveraging("cuba"), "device='cuba'"),
        (lambda: EMAWeightAveraging(update_every_n_steps=0), "nothing is ever averaged"),
        (lambda: EMAWeightAveraging(avg_fn=max), "decay gives the function"),
        (lambda: WeightAveraging(avg_fn=max, multi_avg_fn=max), "give one of them"),
        (lambda: WeightAveraging(use_for="eval"), "use_for"),
        (lambda: WeightAveraging(momentum=1), "momentum"),
        (lambda: StochasticWeightAveraging(swa_epoch_start=0, swa_lrs=0.1), ">0 integer or a float between 0 and 1"),
        (lambda: StochasticWeightAveraging(swa_lrs=[0.2, 1]), "positive float, or a list of positive floats"),
    ],
)
def test_wrong_arguments_of_weight_averaging_are_refused(make, match):
    with pytest.raises(SettingError, match=match):
        make()


def test_what_weight_averaging_cannot_serve_is_refused_before_training(tmp_path):
    for callbacks, match in (
        ((WeightAveraging(), EMAWeightAveraging()), "two callbacks average"),
        ((StochasticWeightAveraging([0.1, 0.2]),), "2 learning rates"),
        ((EMAWeightAveraging(), ModelPruning("l1_unstructured")), "ModelPruning exchanges them"),
    ):
        with pytest.raises(SettingError, match=match):
            make_trainer(tmp_path, *callbacks).fit(made(), data(), data(shuffle=False))
    with pytest.warns(UserWarning, match="swa_epoch_start=100 comes after the last of max_epochs=1"):
        make_trainer(tmp_path, StochasticWeightAveraging(0.1, 100), max_epochs=1).fit(made(), data())
    with pytest.raises(SettingError, match="max_epochs=-1"):
        make_trainer(tmp_path, StochasticWeightAveraging(0.1), max_epochs=-1).fit(made(), data())

"""validate, test and predict: results, weights they use, and saving and loading by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from instep import Trainer, TrainModule
from instep.callbacks import ModelCheckpoint
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, SettingError
from instep.state import GradientState
from instep.trainer.metrics import print_results
from tests.trainer.toys import LoggingToy, Toy, assert_same, loader, quiet, samples, weights


class Sized(LoggingToy):
    """Has hyperparameters; `last_` arguments are not saved."""

    def __init__(self, width: int, lr: float = 0.1, last_name: str = "") -> None:
        super().__init__(lr)
        self.save_hyperparameters(ignore="last_name")
        self.layer = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))  # pyright: ignore[reportAttributeAccessIssue]


def fitted(folder: Path, module: Any = None, **settings: Any) -> Trainer:
    saver = ModelCheckpoint(monitor="val_loss", save_last=True, save_top_k=1)
    trainer = quiet(
        **{"max_epochs": 3, **settings}, callbacks=[saver], enable_checkpointing=True, default_root_dir=folder
    )
    trainer.fit(module or LoggingToy(lr=0.5), loader(), loader(6))
    return trainer


# ---- results


@pytest.mark.parametrize("fn", ["validate", "test"])
def test_the_result_is_the_mean_over_all_samples(
    fn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    module = LoggingToy()
    (result,) = getattr(quiet(), fn)(module, loader(11, 4))
    name = "val_loss" if fn == "validate" else "test_loss"
    with torch.no_grad():
        expected = float(module.loss(samples(11).tensors))
    assert list(result) == [name]
    assert type(result[name]) is float
    assert result[name] == pytest.approx(expected, rel=1e-6)
    assert f'{fn} (loader 0): {{"{name}": ' in capsys.readouterr().out
    getattr(quiet(), fn)(module, loader(), verbose=False)
    assert capsys.readouterr().out == ""
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # as in a notebook
    getattr(quiet(), fn)(module, loader(11, 4))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if name in line)
    assert f"{result[name]:.6g}" in line
    assert "{" not in line


def test_the_name_of_a_result_controls_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # as in a notebook
    print_results([{"loss\n\x1b[31m": 1.5}], "test")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "loss" in line)
    assert r"loss\n\x1b[31m" in line
    assert line[:-1].endswith("   1.5 "), "numbers of a column end at the same place"


@pytest.mark.parametrize("fn", ["validate", "test"])
def test_what_one_loader_alone_logs_under_a_plain_name_is_in_its_result_alone(fn: str):
    class Logs(Toy):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log(f"of {dataloader_idx}", float(len(batch[0])), add_dataloader_idx=False)
            self.log("size", float(len(batch[0])))

        test_step = validation_step

    results = getattr(quiet(), fn)(Logs(), [loader(4, 4), loader(6, 3)], verbose=False)
    assert results == [
        {"of 0": 4.0, "size/dataloader_idx_0": 4.0},
        {"of 1": 3.0, "size/dataloader_idx_1": 3.0},
    ]


def test_predictions_come_batch_by_batch():
    module = Toy()
    predictions = quiet().predict(module, loader(11, 4))
    assert predictions is not None
    assert [len(batch) for batch in predictions] == [4, 4, 3]
    with torch.no_grad():
        assert torch.equal(torch.cat(predictions), module.layer(samples(11).tensors[0]).squeeze(-1))
    assert not predictions[0].requires_grad
    assert predictions[0].is_inference()
    plain = quiet(inference_mode=False).predict(module, loader(11, 4))
    assert plain is not None
    (plain[0] * nn.Parameter(torch.ones(()))).sum().backward()  # they take part in autograd
    several = quiet().predict(module, [loader(3), loader(6)])
    assert several is not None
    assert [len(batches) for batches in several] == [1, 2]
    assert quiet().predict(module, loader(), return_predictions=False) is None
    assert len(quiet().predict(module, loader(), return_predictions=None) or ()) == len(loader())


def test_predict_uses_forward_where_there_is_no_predict_step():
    class Forward(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            return {"y": self.layer(x)}

    predictions = quiet().predict(Forward(), [torch.randn(2, 4), torch.randn(3, 4)])
    assert predictions is not None
    assert [batch["y"].shape[0] for batch in predictions] == [2, 3]


@pytest.mark.parametrize(("inference", "expected"), [(True, True), (False, False)])
def test_inference_mode_holds_outside_of_fit(inference: bool, expected: bool):
    seen: list[Any] = []
    module = Toy()

    def look(batch: Any, batch_idx: int) -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), module.training))

    module.validation_step = module.test_step = module.predict_step = look
    trainer = quiet(inference_mode=inference, max_epochs=1, num_sanity_val_steps=0)
    for fn in ("validate", "test", "predict"):
        getattr(trainer, fn)(module, loader(3))
    assert seen == [(expected, False, False)] * 3
    trainer.fit(module, loader(), loader(3))
    assert seen[3] == (False, False, False)
    assert module.training


# ---- which weights


def test_best_last_and_the_weights_at_hand(tmp_path: Path):
    trainer = fitted(tmp_path)
    module, saver = trainer.model, trainer.checkpoint_callback
    assert module is not None
    assert saver is not None
    at_the_end = weights(module)
    last = trainer.validate(module, loader(6), verbose=False)[0]["val_loss"]
    assert_same(weights(module), at_the_end)  # a model that is passed is used as it is
    assert saver.best_model_score is not None
    with pytest.warns(UserWarning, match=r"without a model\. The best model of the previous `fit` call"):
        best = trainer.validate(dataloaders=loader(6), verbose=False)[0]["val_loss"]
    assert best == pytest.approx(float(saver.best_model_score), rel=1e-6)
    assert trainer.validate(module, loader(6), ckpt_path="last", verbose=False)[0]["val_loss"] == last
    assert trainer.validate(module, loader(6), ckpt_path="best", verbose=False)[0]["val_loss"] == best
    path = saver.best_model_path
    assert trainer.validate(module, loader(6), ckpt_path=path, verbose=False)[0]["val_loss"] == best


def test_best_without_a_metric_is_the_newest_also_of_weights_alone(tmp_path: Path):
    trainer = quiet(
        max_epochs=2,
        callbacks=ModelCheckpoint(save_weights_only=True),
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    trainer.fit(module := Toy(), loader())
    for path in ("best", "last"):
        other = Toy()
        trainer.test(other, loader(3), ckpt_path=path, verbose=False)
        assert_same(weights(other), weights(module))


def test_another_trainer_finds_checkpoints_in_the_root_folder(tmp_path: Path):
    first = fitted(tmp_path)
    assert first.checkpoint_callback is not None
    module = LoggingToy()
    other = quiet(default_root_dir=tmp_path)
    other.validate(module, loader(6), ckpt_path="best", verbose=False)
    best = first.checkpoint_callback.best_model_score
    assert best is not None
    assert other.callback_metrics["val_loss"] == pytest.approx(float(best), rel=1e-6)
    other.predict(module, loader(6), ckpt_path="last")
    assert first.model is not None
    assert_same(weights(module), weights(first.model))


def test_testing_from_a_checkpoint_that_is_not_there_is_an_error(tmp_path: Path):
    for path in ("best", "last", tmp_path / "nowhere"):
        with pytest.raises(CheckpointNotFoundError):
            quiet(default_root_dir=tmp_path).test(Toy(), loader(), ckpt_path=path)
    trainer = quiet(default_root_dir=tmp_path, max_epochs=1)
    trainer.fit(Toy(), loader(), ckpt_path="auto")  # starts fresh
    assert trainer.global_step == 4


def test_the_error_has_the_keyword_that_was_given(tmp_path: Path):
    trainer = quiet(default_root_dir=tmp_path, enable_checkpointing=True)
    with pytest.raises(CheckpointNotFoundError, match="ckpt_path='best': there is no checkpoint"):
        trainer.test(Toy(), loader(), ckpt_path="best")


@pytest.mark.parametrize(("fn", "what"), [("fit", "validation"), ("test", "test"), ("predict", "predict")])
@pytest.mark.skipif(sys.version_info < (3, 11), reason="an error takes notes from Python 3.11 on")
def test_an_error_in_evaluation_data_says_whose_it_is(fn: str, what: str):
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return samples(6)[index // (index != 4)]

    data = (loader(), DataLoader(Broken(), 2)) if fn == "fit" else ([loader(2), DataLoader(Broken(), 2)],)
    with pytest.raises(ZeroDivisionError) as caught:
        getattr(quiet(max_epochs=1, num_sanity_val_steps=0), fn)(Toy(), *data)
    which = "" if fn == "fit" else " loader 1"
    assert caught.value.__notes__[-1] == f"This came from reading batch_idx 2 of the {what} data{which}."


# ---- saving by hand


def test_save_checkpoint_and_go_on(tmp_path: Path):
    torch.manual_seed(1)
    whole = Toy()
    part = Toy()
    part.load_state_dict(whole.state_dict())
    quiet(max_epochs=2).fit(whole, loader())
    first = quiet(max_epochs=1)
    first.fit(part, loader())
    path = first.save_checkpoint(tmp_path / "mine")
    assert path.parent == tmp_path
    resumed = Toy()
    second = quiet(max_epochs=2)
    second.fit(resumed, loader(), ckpt_path=tmp_path / "mine")
    assert (second.global_step, second.current_epoch) == (8, 2)
    assert len(resumed.seen) == 4
    assert_same(weights(resumed), weights(whole))


def test_an_evaluation_in_between_does_not_change_what_is_saved(tmp_path: Path):
    trainer = quiet(max_epochs=1)
    trainer.fit(Toy(), loader())
    trainer.validate(dataloaders=loader(3), verbose=False)
    path = trainer.save_checkpoint(tmp_path / "mine")
    resumed = quiet(max_epochs=2)
    resumed.fit(Toy(), loader(), ckpt_path=path)
    assert resumed.global_step == 8


def test_saving_inside_a_run_by_a_hook(tmp_path: Path):
    paths: list[Path] = []
    module = Toy()
    module.on_train_epoch_end = lambda: paths.append(module.trainer.save_checkpoint(tmp_path / "epoch"))
    quiet(max_epochs=2).fit(module, loader())
    assert len(set(paths)) == 2
    assert all(path.is_dir() for path in paths)


# ---- loading


def test_load_from_checkpoint_restores_weights_and_hyperparameters(tmp_path: Path):
    module = Sized(6, lr=0.25, last_name="x")
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())
    path = trainer.save_checkpoint(tmp_path / "sized")
    loaded = Sized.load_from_checkpoint(path)
    assert_same(weights(loaded), weights(module))
    assert dict(loaded.hparams) == {"width": 6, "lr": 0.25}
    assert loaded.training
    assert Sized.load_from_checkpoint(path, lr=1.0, last_name="y").hparams.lr == 1.0
    with pytest.raises(CheckpointError, match="do not fit Sized"):
        Sized.load_from_checkpoint(path, width=7)
    quiet().test(loaded, loader(), verbose=False)


def test_a_plain_file_of_weights_is_loaded_too(tmp_path: Path):
    module = Sized(6)
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())
    file = trainer.save_checkpoint(tmp_path / "sized", weights_only=True) / "model.safetensors"
    assert_same(weights(Sized.load_from_checkpoint(file, width=6)), weights(module))
    other = Sized(6)
    quiet().test(other, loader(), ckpt_path=file, verbose=False)
    assert_same(weights(other), weights(module))
    with pytest.raises(CheckpointError, match="missing"):
        Sized.load_from_checkpoint(file)


def test_strict_loading_may_be_turned_off(tmp_path: Path):
    class Extended(Toy):
        strict_loading = False

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

    trainer = quiet(max_epochs=1)
    trainer.fit(module := Toy(), loader())
    path = trainer.save_checkpoint(tmp_path / "toy")
    extended = Extended.load_from_checkpoint(path)
    assert torch.equal(extended.layer.weight, module.layer.weight)
    assert Extended.load_from_checkpoint(path, map_location={"cpu": "meta"}, strict=False).device.type == "meta"
    assert Extended.load_from_checkpoint(path, map_location=lambda storage, place: storage).device.type == "cpu"
    with pytest.raises(SettingError, match=r"in conflict with Extended\.strict_loading = False"):
        Extended.load_from_checkpoint(path, strict=True)
    Extended.strict_loading = True
    with pytest.raises(CheckpointError, match="strict"):
        Extended.load_from_checkpoint(path)


def test_another_architecture_is_a_clear_error(tmp_path: Path):
    trainer = quiet(max_epochs=1)
    trainer.fit(Sized(6), loader())
    path = trainer.save_checkpoint(tmp_path / "sized")
    with (
        pytest.warns(UserWarning, match=r"width=7 \(there 6\)"),
        pytest.raises(CheckpointError, match=r"(?s)do not fit Sized.*size mismatch.*strict_loading"),
    ):
        quiet(max_epochs=2).fit(Sized(7), loader(), ckpt_path=path)
    with pytest.raises(CheckpointError, match=r"(?s)do not fit Toy: .*[^. ]\. Set"):
        quiet().test(Toy(), loader(), ckpt_path=path)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path):
    trainer = quiet(max_epochs=1)
    trainer.fit(Toy(), loader())
    path = trainer.save_checkpoint(tmp_path / "toy")
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for use in (
        lambda: quiet().test(Toy(), loader(), ckpt_path=path),
        lambda: quiet(max_epochs=2).fit(Toy(), loader(), ckpt_path=path),
        lambda: Toy.load_from_checkpoint(path),
    ):
        with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
            use()


def test_what_hooks_put_into_a_checkpoint_comes_back(tmp_path: Path):
    class Keeps(Toy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["vocabulary"] = {"a": 1, "b": torch.arange(3)}
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if "bias" not in k}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.vocabulary = checkpoint["vocabulary"]
            checkpoint["state_dict"]["layer.bias"] = torch.full((1,), 7.0)

    trainer = quiet(max_epochs=1)
    trainer.fit(Keeps(), loader())
    path = trainer.save_checkpoint(tmp_path / "keeps")
    loaded = Keeps.load_from_checkpoint(path)
    assert loaded.vocabulary["a"] == 1
    assert torch.equal(loaded.vocabulary["b"], torch.arange(3))
    assert loaded.layer.bias.item() == 7.0
    other = Keeps()
    quiet().test(other, loader(), ckpt_path=path, verbose=False)
    assert other.vocabulary["a"] == 1


class Watching(Toy):
    """Sees what the state of gradients says before and after a validation, and how often there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Any] = []

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.note()

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self.note()

    def note(self) -> None:
        state = GradientState()
        self.states.append((state.end_of_dataloader, state.active_dataloader, [*state.dataloader_references]))


def test_the_state_of_gradients_is_the_trainings_again_after_a_validation():
    model = Watching()
    quiet(max_epochs=1, val_check_interval=2, num_sanity_val_steps=0).fit(model, loader(16, 4), loader(8, 4))
    assert len(model.states) == 4
    assert model.states[0] == model.states[1]
    assert model.states[2] == model.states[3]
    assert model.states[0][0] is False
    assert model.states[0][1] is not None


@pytest.mark.parametrize("interval", [1.0, 4])
def test_a_validation_at_an_epochs_end_is_not_repeated_by_a_resume_from_it(tmp_path: Path, interval: float):
    def fit(**options: Any) -> int:
        saving = ModelCheckpoint(tmp_path, save_top_k=-1, save_on_train_epoch_end=False)
        trainer = quiet(
            max_epochs=2,
            val_check_interval=interval,
            num_sanity_val_steps=0,
            enable_checkpointing=True,
            callbacks=[saving],
        )
        model = Watching()
        trainer.fit(model, loader(16, 4), loader(8, 4), **options)
        return len(model.states) // 2

    assert fit() == 2
    [first] = [path for path in tmp_path.iterdir() if "step-00000004" in path.name or "step=4" in path.name]
    assert fit(ckpt_path=first) == 1


def test_a_stop_within_an_epoch_validates_what_it_ends_with():
    class Stops(Watching):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = batch_idx == 1

    model = Stops()
    trainer = quiet(max_epochs=3, num_sanity_val_steps=0, trigger_every=1)
    trainer.fit(model, loader(40, 4), loader(8, 4))
    assert trainer.global_step < 10
    assert len(model.states) // 2 == 1


class WritesAlone:
    """A stdout of somebody's own."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def test_results_are_printed_where_stdout_is_missing_or_can_only_write(monkeypatch):
    stdout = WritesAlone()
    for each in (None, stdout):
        monkeypatch.setattr("sys.stdout", each)
        quiet().validate(Toy(), loader())
    assert stdout.text.startswith("validate (loader 0): {")

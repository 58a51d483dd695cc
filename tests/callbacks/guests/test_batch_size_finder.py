from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Tuner, seed_everything
from instep.callbacks import BatchSizeFinder
from instep.errors import SettingError, UsageError
from tests.trainer.toys import loader, quiet
from tests.trainer.trials.toys import SAMPLES, Data, Model, different, trained


def run(find: str, size: int = 4, where: str = "backward", **settings: Any) -> tuple[dict[str, Any], int]:
    seed_everything(3)
    module, data = Model(limit=30, where=where), Data(size)
    callbacks = [BatchSizeFinder("binsearch")] if find == "callback" else []
    trainer = quiet(max_epochs=2, callbacks=callbacks, **settings)
    if find == "tuner":
        assert Tuner(trainer).scale_batch_size(module, datamodule=data, mode="binsearch") == data.hparams.batch_size
        assert trainer.train_dataloader.batch_size == data.hparams.batch_size
        assert module.seen == []
    return trained(trainer, module, data), data.hparams.batch_size


@pytest.mark.parametrize("where", ["backward", "validation"])
def test_training_after_it_is_as_without_it(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    after, size = run("tuner", where=where)
    assert size == 28  # 30, less 5 %
    plain, _ = run("", size, where=where)
    assert different(after, plain) == []
    by_callback, same = run("callback", where=where)
    assert same == size
    assert different(by_callback, plain) == []
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_the_batch_size_finder_serves_evaluation_and_prediction(method: str) -> None:
    module, data = Model(limit=30, where="validation"), Data()
    trainer = quiet(callbacks=[BatchSizeFinder()])
    result = getattr(trainer, method)(module, datamodule=data)
    found = data.hparams.batch_size
    assert found == (128 if method == "predict" else 16)  # 128 is more than there are samples
    assert trainer.callbacks[0].optimal_batch_size == found
    if method == "predict":
        assert [len(batch) for batch in result[0]] == [SAMPLES]
    for place in ("datamodule", "dataloaders"):
        data = Data()
        assert Tuner(quiet()).scale_batch_size(Model(limit=30), method=method, **{place: data}) == 128
        assert data.hparams.batch_size == 128


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        ({"init_val": 100}, 25),  # halved until it fits
        ({"mode": "binsearch", "init_val": 100, "margin": 0.0}, 30),
        ({"max_val": 8}, 8),
        ({"max_trials": 2, "init_val": 3}, 6),
        ({"max_trials": 0, "init_val": 7}, 7),
    ],
)
def test_the_batch_size_search_finds_the_expected_size(search: dict[str, Any], expected: int) -> None:
    tried: list[int] = []

    class Noting(Model):
        def loss(self, batch: Any) -> Any:
            tried.append(len(batch[0]))
            return super().loss(batch)

    module, data = Noting(limit=30, where="forward"), Data(loaders=1)
    assert Tuner(quiet()).scale_batch_size(module, datamodule=data, steps_per_trial=1, **search) == expected
    assert max(tried, default=0) <= SAMPLES


def test_the_search_for_a_batch_size_stops_at_its_bounds() -> None:
    wide = Model()
    assert Tuner(quiet()).scale_batch_size(wide, datamodule=Data(), steps_per_trial=1) == 128
    trainer = quiet(global_batch_size=24)
    assert Tuner(trainer).scale_batch_size(wide, datamodule=Data(), steps_per_trial=1) == 32  # one step takes no more
    with pytest.raises(UsageError, match="does not suffice for a batch size of 1, and there is no smaller"):
        Tuner(quiet()).scale_batch_size(Model(limit=0, where="forward"), datamodule=Data())
    limited = Model(limit=30, where="forward")
    with pytest.raises(UsageError, match="250 was the last of max_trials=2 that did not"):
        Tuner(quiet()).scale_batch_size(limited, datamodule=Data(), init_val=500, max_trials=2)


def test_an_error_leaves_everything_as_it_was() -> None:
    class Breaks(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) == 8:
                raise RuntimeError("another error")
            return super().training_step(batch, batch_idx)

    module, data, trainer = Breaks(), Data(), quiet(max_epochs=1)
    weights = str(module.state_dict())
    with pytest.raises(RuntimeError, match="another error"):
        Tuner(trainer).scale_batch_size(module, datamodule=data)
    assert data.hparams.batch_size == 4
    assert str(module.state_dict()) == weights
    assert (module.seen, trainer.global_step) == ([], 0)


def test_wrong_arguments_of_the_batch_size_finder_are_refused() -> None:
    module, data = Model(), Data()
    for wrong in ({"mode": "cubic"}, {"margin": 1.0}, {"steps_per_trial": 0}, {"init_val": 0}):
        with pytest.raises(SettingError, match=r"cubic|below 1|at least 1"):
            BatchSizeFinder(**wrong)
    tuner = Tuner(quiet())
    with pytest.raises(UsageError, match="Field size not found"):
        tuner.scale_batch_size(module, datamodule=data, batch_arg_name="size")
    with pytest.raises(SettingError, match="two BatchSizeFinder"):
        quiet(callbacks=[BatchSizeFinder(), BatchSizeFinder()]).fit(module, datamodule=data)
    with pytest.raises(SettingError, match="method 'tune' is invalid"):
        tuner.scale_batch_size(module, datamodule=data, method="tune")
    with pytest.raises(SettingError, match="please consider setting `dataloaders` instead"):
        tuner.scale_batch_size(module, train_dataloaders=loader(8), method="test")
    module.batch_size = 4
    with pytest.raises(UsageError, match="cannot be used with dataloaders passed directly"):
        tuner.scale_batch_size(module, train_dataloaders=loader(8))
    with pytest.warns(UserWarning, match="Skipping batch size scaler"):
        assert Tuner(quiet(fast_dev_run=True)).scale_batch_size(module) is None
    module = Model()
    module.save_hyperparameters({"batch_size": 2})
    module.batch_size = torch.tensor(2)
    with pytest.warns(UserWarning, match="mutually exclusive"):
        BatchSizeFinder().setup(quiet(), module, "fit")

"""`tune_loader` and `instep tune-loader`: what they choose, write and refuse."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, Dataset

from instep.cli.main import main
from instep.data import tune, tune_loader
from instep.data.tune import LoaderTrial
from instep.errors import SettingError


class Slow(Dataset[Any]):
    """Waits 2 ms for each sample, as for a disk."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return torch.tensor(index)


def test_a_loader_is_measured_and_left_as_it_was() -> None:
    loader = DataLoader(Slow(), batch_size=8, shuffle=True)
    heard: list[LoaderTrial] = []
    best, found = tune_loader(loader, workers=[0, 2], prefetch=[2], seconds=0.2, tell=heard.append)
    assert found == heard
    assert [each.num_workers for each in found] == [0, 2]
    assert found[0].batches_per_s < 1 / 0.016
    assert best in found
    enough, _ = tune_loader(loader, workers=[0], seconds=0.05, step_s=0.1)
    assert enough.num_workers == 0
    assert loader.num_workers == 0


def test_the_fewest_workers_that_are_fast_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = {0: 50.0, 1: 80.0, 2: 100.0, 4: 103.0}
    trial = lambda _, workers, ahead, pin, s: LoaderTrial(workers, ahead, pin, 0.0, speed[workers])  # noqa: E731
    monkeypatch.setattr(tune, "_measure", trial)
    loader = DataLoader(Slow(), batch_size=8)
    best, _ = tune_loader(loader, workers=[0, 1, 2, 4], prefetch=[2], pin_memory=[False])
    assert best.setting == {"num_workers": 2, "prefetch_factor": 2, "pin_memory": False, "persistent_workers": True}
    assert tune_loader(loader, workers=[0, 1, 2, 4], prefetch=[2], step_s=1 / 70)[0].num_workers == 1


def test_pinning_is_left_out_only_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_measure", lambda _, workers, ahead, pin, s: LoaderTrial(workers, ahead, pin, 0.0, 1.0))
    loader = DataLoader(Slow(), batch_size=8)
    for here in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        best, found = tune_loader(loader, workers=[0])
        assert [each.pin_memory for each in found] == [best.pin_memory] == [here]
    assert [each.pin_memory for each in tune_loader(loader, [0], pin_memory=[False, True])[1]] == [False, True]


def test_tune_loader_refuses_what_it_cannot_measure() -> None:
    with pytest.raises(SettingError, match="no batches to measure"):
        tune_loader(DataLoader([], batch_size=2), workers=[0])  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"a torch\.utils\.data\.DataLoader"):
        tune_loader([1, 2])  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"step_s=-1: expected a number of seconds"):
        tune_loader(DataLoader(Slow()), step_s=-1)


PROGRAM = """
from torch.utils.data import DataLoader
from instep import DataModule

def loader():
    return DataLoader(range(64), batch_size=8)

class Data(DataModule):
    def __init__(self, num_workers=0):
        super().__init__()
    def train_dataloader(self):
        return loader()

class Fixed(Data):
    def __init__(self):
        super().__init__()
"""


def test_tune_loader_measures_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loaders_to_tune.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    quick = ["--workers", "0", "--seconds", "0.02"]
    assert main(["tune-loader", "loaders_to_tune.py:Data", *quick, "--write", "loader.yaml"]) == 0
    said = capsys.readouterr().out
    assert "batches/s" in said
    assert "num_workers=0" in said
    assert yaml.safe_load(Path("loader.yaml").read_text()) == {"data": {"init_args": {"num_workers": 0}}}
    assert main(["tune-loader", "loaders_to_tune.py:Data", *quick, "--write", "loader.yaml"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["tune-loader", "loaders_to_tune.py:Fixed", *quick, "--write", "other.yaml"]) == 2
    assert "Fixed takes none of num_workers" in capsys.readouterr().err
    monkeypatch.setattr(tune, "_measure", None)  # nothing is measured that could not be written
    assert main(["tune-loader", "loaders_to_tune.py:Data", *quick, "--write", "loader.yaml"]) == 2
    assert main(["tune-loader", "loaders_to_tune.py:Data", *quick, "--args", "[1]"]) == 2
    assert "must be a JSON object" in capsys.readouterr().err
    assert main(["tune-loader", "loaders_to_tune.py:loader", *quick, "--args", '{"no": 1}']) == 1
    assert "making loaders_to_tune.py:loader failed: TypeError" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["tune-loader", "loaders_to_tune.py:loader", *quick, "--json", "--write", "args.yaml"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["best"]["num_workers"] == 0
    assert len(answer["trials"]) == 1

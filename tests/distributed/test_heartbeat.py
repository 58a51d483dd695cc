from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import instep
from instep.distributed import heartbeat as flight
from instep.distributed import stragglers
from instep.distributed.heartbeat import BATCH, STEP, Heartbeat, heartbeat
from instep.distributed.stragglers import Pace, PaceWatch, activity, find_stragglers
from instep.errors import SettingError
from instep.health.heartbeat_file import COMPILES, LIMIT_MS, PHASE, PHASES
from instep.runs.ranks import read_paces
from instep.state import PartialState
from tests.helpers.spawn import RanksFailed, run_ranks
from tests.trainer.toys import BareToy, quiet


class Model(BareToy):
    def __init__(self, in_step: Callable[[Model], None] = lambda model: None) -> None:
        super().__init__()
        self.in_step = in_step

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.in_step(self)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0])


def _loader(batches: int = 6) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4 * batches, 4)), 2)


def _trainer(folder: Path, **settings: Any) -> instep.Trainer:
    return quiet(**{"default_root_dir": folder, "enable_checkpointing": True, "max_steps": 12, **settings})


def test_phases_and_steps_of_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str] = []
    enter = Heartbeat.enter

    def noted(self: Heartbeat, phase: str) -> None:
        phases.append(phase)
        enter(self, phase)

    monkeypatch.setattr(Heartbeat, "enter", noted)
    seen: list[tuple[int, int, int]] = []

    def look(model: Model) -> None:
        numbers = heartbeat().numbers
        seen.append((numbers[STEP], numbers[BATCH], numbers[LIMIT_MS]))

    trainer = _trainer(tmp_path, hang_timeout_s=60.0, num_sanity_val_steps=0, max_epochs=2, max_steps=4)
    trainer.fit(Model(look), _loader(1), _loader(1))
    assert seen == [(0, -1, 60000), (1, 0, 60000), (2, -1, 60000), (3, 0, 60000)]
    # The hooks after a validation's batches, then its end, then the next epoch.
    epoch = ["epoch", "train", "epoch", "validate", "epoch", "epoch", "epoch", "epoch", "train"]
    start = phases.index("epoch")
    assert phases[:start] == ["start", "start"]
    assert [phase for phase in phases[start:] if phase != "save"][:9] == epoch
    assert "save" in phases
    assert phases[-1] == "outside"
    numbers = heartbeat().numbers
    assert (numbers[STEP], numbers[LIMIT_MS], PHASES[numbers[PHASE]]) == (4, 0, "outside")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("instep-watch")]
    trainer.predict(trainer.model, _loader(1))
    assert phases[-4:-2] == ["predict", "predict"]
    phases.clear()
    _trainer(tmp_path, max_epochs=3, max_steps=5).fit(Model(), _loader(1), ckpt_path="auto")
    assert phases[: phases.index("epoch")] == ["load"]


class FirstSaveFails(instep.Callback):
    def before_save(self, trainer: instep.Trainer) -> None:
        if trainer.global_step == 1:
            raise OSError("the disk is full")


def test_after_a_failed_save_a_run_that_goes_on_is_in_its_phase_again(tmp_path: Path) -> None:
    phases: list[str] = []
    saver = instep.callbacks.ModelCheckpoint(every_n_train_steps=1, on_error="warn")
    trainer = _trainer(tmp_path, max_steps=3, callbacks=[FirstSaveFails(), saver])
    with pytest.warns(UserWarning, match="the disk is full"):
        trainer.fit(Model(lambda model: phases.append(heartbeat().place()["phase"])), _loader())
    assert phases == ["train"] * 3


def test_nobody_watches_by_default(tmp_path: Path) -> None:
    limits = []
    names: set[str] = set()

    def look(model: Model) -> None:
        limits.append(heartbeat().numbers[LIMIT_MS])
        names.update(thread.name for thread in threading.enumerate())

    _trainer(tmp_path, max_steps=2).fit(Model(look), _loader())
    _trainer(tmp_path, max_steps=2, hang_timeout_s=float("inf")).fit(Model(look), _loader())
    assert limits == [0] * 4
    assert "instep-watchdog" not in names


def test_the_variable_asks_where_the_program_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INSTEP_HANG_TIMEOUT_S", "12.5")
    assert _trainer(tmp_path).hang_timeout_s == 12.5
    assert _trainer(tmp_path, hang_timeout_s=3).hang_timeout_s == 3.0
    with pytest.raises(SettingError, match="hang_timeout_s=0"):
        _trainer(tmp_path, hang_timeout_s=0)


def _alone(folder: Path, how: str) -> list[int]:
    compiling: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiling.append(heartbeat().numbers[COMPILES])
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)

    def in_step(model: Model) -> None:
        double(torch.ones(2))
        if how == "hangs" and model.trainer.global_step == 3:
            threading.Event().wait()

    _trainer(folder, hang_timeout_s=3.0, max_steps=5).fit(Model(in_step), _loader())
    return [*compiling, heartbeat().numbers[COMPILES]]


@pytest.mark.dist
def test_a_process_alone_ends_itself(tmp_path: Path) -> None:
    with pytest.raises(
        RanksFailed,
        match=r"(?s)ended with exit code 76.*rank 0 .* hangs at step 3, phase train, in .*in in_step.*in wait",
    ):
        run_ranks(_alone, 1, tmp_path, "hangs")


class CleansUpSlowly(instep.Callback):
    def on_exception(self, *_: Any) -> None:
        threading.Event().wait(4.0)  # longer than the limit


def _fails(folder: Path) -> None:
    def in_step(model: Model) -> None:
        if PartialState().process_index == 1 and model.trainer.global_step == 3:
            raise ValueError("the cause")

    callbacks = [CleansUpSlowly()] if PartialState(cpu=True).process_index == 1 else []
    settings: dict[str, Any] = {"devices": 2, "max_steps": 5, "callbacks": callbacks}
    try:
        _trainer(folder, hang_timeout_s=3.0, **settings).fit(Model(in_step), _loader())
    finally:
        threading.Event().wait(4.0 if callbacks else 0.0)  # a program has things to end, too


@pytest.mark.dist
def test_a_rank_that_cleans_up_after_an_error_does_not_hang(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="ValueError: the cause") as failed:
        run_ranks(_fails, 2, tmp_path)
    assert "code 76" not in str(failed.value)


def _two(folder: Path) -> dict[str, Any]:
    rank = PartialState(cpu=True).process_index
    found: dict[str, Any] = {}
    try:
        _trainer(folder, devices=2, hang_timeout_s=300.0 + rank).fit(Model(), _loader())
    except SettingError as error:
        found["differs"] = str(error)
    found["compiling"] = _alone_in_two(folder)
    said: list[int] = []
    stragglers.PERIOD_S, stragglers.SAMPLES = 0.01, 25
    PaceWatch._say = lambda self, rank, paces: said.append(rank)  # type: ignore[method-assign]
    (folder / "run").mkdir(exist_ok=True)

    def in_step(model: Model) -> None:
        heartbeat().set_folder(folder / "run")  # as a run with a folder does
        if rank == 1:
            time.sleep(0.1)  # what is measured: a rank that takes its time
        elif said:
            model.trainer.should_stop = True

    trainer = _trainer(folder, devices=2, hang_timeout_s=300.0, max_steps=1000, max_epochs=-1)
    trainer.fit(Model(in_step), _loader(1000))
    heart = heartbeat()
    assert heart._beats is not None
    PartialState().wait_for_everyone()
    found |= {
        "said": said,
        "node": [(beat.rank, beat.step, beat.pid) for beat in heart._beats.read()],
        "pid": os.getpid(),
        "left": [path.name for path in Path(tempfile.gettempdir()).glob("instep-heartbeat-*")],
        "last": flight.described(flight.recorded()[-1]) if torch.__version__ >= "2.11" else "gloo:",
        "threads": [thread.name for thread in threading.enumerate() if "instep-pace" in thread.name],
    }
    return found


def _alone_in_two(folder: Path) -> list[int]:
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(heartbeat().numbers[COMPILES])
        return graph.forward

    triple = torch.compile(lambda x: x * 3, backend=backend)
    _trainer(folder, devices=2, hang_timeout_s=300.0, max_steps=2).fit(
        Model(lambda model: triple(torch.ones(2))), _loader()
    )
    return [*seen, heartbeat().numbers[COMPILES]]


@pytest.mark.dist
def test_ranks_of_a_node_share_a_file_and_name_a_straggler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    first, second = run_ranks(_two, 2, tmp_path, env={"TMPDIR": str(tmp_path)})
    for found in (first, second):
        assert "hang_timeout_s differs between ranks: rank 0: 300.0, rank 1: 301.0" in found["differs"]
        assert found["compiling"] == [1, 0]
        assert [(rank, pid) for rank, _, pid in found["node"]] == [(0, first["pid"]), (1, second["pid"])]
        assert found["left"] == []
        assert found["last"].startswith("gloo:")
        assert found["threads"] == []
    assert first["node"] == second["node"]
    assert first["said"] == [1]
    paces = read_paces(tmp_path / "run")
    assert paces.slow == [1]
    assert [rank for rank, *_ in paces.ranks] == [1, 0]
    assert read_paces(tmp_path).ranks == []


def test_stragglers_are_ranks_far_above_the_median() -> None:
    def pace(work_s: float, data_s: float = 0.0) -> Pace:
        return Pace(0.4, work_s, data_s, "a")

    assert find_stragglers({0: pace(0.1), 1: pace(0.12), 2: pace(0.15), 3: pace(0.1)}) == []
    assert find_stragglers({0: pace(0.1), 1: pace(0.05, 0.3), 2: pace(0.1)}) == [1]
    assert find_stragglers({0: pace(0.3), 1: pace(0.1)}) == [0]
    assert find_stragglers({0: pace(0.3)}) == []


def test_what_a_thread_does_is_read_from_its_frames() -> None:
    here = sys._getframe()
    assert activity(here) == "work"
    frames: list[str] = []

    class Data(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            frames.append(activity(sys._getframe()))
            return super().__getitem__(index)

    next(iter(DataLoader(Data(torch.ones(1)))))
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: frames.append(activity(sys._getframe())))
    x.sum().backward()
    assert frames == ["data", "wait"]

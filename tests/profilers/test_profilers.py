from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Callback
from instep.errors import SettingError
from instep.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from instep.trainer.hooks import HookTable
from tests.trainer.toys import Toy, loader, quiet


class Marked(Toy):
    """Profiles a part of its step; its backward may fail."""

    fails_at = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.profiler.profile("mine"):
            loss = self.loss(batch)
        if batch_idx == self.fails_at:
            raise RuntimeError("boom")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Is called."""


class Ends(Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Is called."""


def in_a_run_folder(profiler: Any, root: Path, **settings: Any) -> Any:
    given = {"max_steps": 3, "num_sanity_val_steps": 0, "enable_checkpointing": True, **settings}
    return quiet(profiler=profiler, default_root_dir=root, callbacks=[Ends()], **given)


def test_simple_measures_every_action_and_reports_by_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = in_a_run_folder("simple", tmp_path, val_check_interval=2)
    trainer.fit(Marked(), loader(12), loader(4))
    profiler = trainer.profiler
    assert isinstance(profiler, SimpleProfiler)
    calls = {name: len(seconds) for name, seconds in profiler.recorded_durations.items()}
    expected = {
        "mine": 3, "run_training_batch": 3, "[Strategy]Strategy.training_step": 3, "[Strategy]Strategy.backward": 3,
        "[Strategy]Strategy.optimizer_step": 3, "[Callback]Ends.on_train_end": 1,
        "[TrainModule]Marked.on_train_batch_end": 3, "[TrainingLoop].train_dataloader_next": 3,
    }  # fmt: skip
    assert {"[Strategy]Strategy.validation_step", "save_checkpoint"} <= calls.keys()
    assert expected.items() <= calls.items()
    inner, outer = profiler.recorded_durations["mine"], profiler.recorded_durations["run_training_batch"]
    assert all(a < b for a, b in zip(inner, outer, strict=True))
    [report] = Path(trainer.log_dir).glob("profiler/*")
    assert report.name == "fit-simple.txt"
    assert report.read_text().strip() in capsys.readouterr().out
    trainer.validate(Marked(), loader(4), verbose=False)
    assert "run_training_batch" not in profiler.recorded_durations, "a run has a report of its own"


def test_without_a_profiler_nothing_is_wrapped() -> None:
    hook: Any
    trainer, module = quiet(max_steps=1), Marked()
    assert isinstance(trainer.profiler, PassThroughProfiler)
    assert trainer.profiler.profile("a") is trainer.profiler.profile("b")
    [hook] = HookTable(trainer, module, []).of_module("on_train_batch_end")
    assert hook.__wrapped__ == module.on_train_batch_end
    trainer.profiler = SimpleProfiler()
    [hook] = HookTable(trainer, module, []).of_module("on_train_batch_end")
    assert hook.__wrapped__.__wrapped__ == module.on_train_batch_end


def test_an_error_is_reported_too_and_files_have_the_name_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Marked()
    module.fails_at = 1
    trainer = in_a_run_folder(SimpleProfiler(filename="mine", extended=False), tmp_path)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(module, loader(12))
    text = (Path(trainer.log_dir) / "fit-mine.txt").read_text()
    assert "run_training_batch" in text
    assert "Num calls" not in text
    assert "Profiler Report" not in capsys.readouterr().out
    assert copy.deepcopy(trainer).profiler.filename == "mine"


def test_actions_are_started_before_they_stop() -> None:
    simple, advanced = SimpleProfiler(), AdvancedProfiler()
    simple.start("a")
    with pytest.raises(SettingError, match="already started"):
        simple.start("a")
    for profiler in (simple, advanced):
        with pytest.raises(SettingError, match="never started"):
            profiler.stop("b")


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler])
def test_an_action_around_a_run_goes_on_after_the_run(kind: Any) -> None:
    profiler = kind()
    with profiler.profile("around"):
        profiler.setup("fit")
        profiler.start("left open")
        profiler.teardown("fit")
        with profiler.profile("left open"):
            pass
        profiler.teardown("fit")  # as after an error before `setup`
    assert "around" in profiler.summary()
    profiler.teardown(None)


def test_advanced_counts_functions_in_the_innermost_action(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(dirpath=tmp_path, filename="advanced", line_count_restriction=5, dump_stats=True)
    with profiler.profile("outer"):
        with profiler.profile("in/ner"):
            sorted([1])
        len([1])
    profiler.describe()
    _, outer, inner = (tmp_path / "advanced.txt").read_text().split("Profile stats for: ")
    assert ("method sorted" in outer, "method len" not in inner) == (False, True)
    assert "built-in method builtins.sorted" in inner
    assert {path.name for path in tmp_path.glob("*.prof")} == {"advanced-outer.prof", "advanced-in_ner.prof"}
    copy.deepcopy(profiler)
    profiler.teardown(None)


def test_pytorch_records_some_steps_of_each_kind(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(activities=["cpu"], row_limit=5)
    trainer = in_a_run_folder(profiler, tmp_path, max_steps=8, val_check_interval=7)
    trainer.fit(Marked(), loader(40), loader(8))
    folder = Path(trainer.log_dir) / "profiler"
    tables = (folder / "fit-pytorch.txt").read_text()
    assert tables.count("Profiler Report") == 2
    assert "Self CPU time total" in tables
    steps = {}
    for path in folder.glob("*.pt.trace.json"):
        names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
        steps[path.name.split("-")[1].partition(".")[0]] = names
    assert sorted(steps) == ["training_step", "validation_step"]
    assert steps["training_step"].count("[Strategy]Strategy.training_step") == 3, "after waiting and warming up"
    assert {"mine", "Linear: layer", "aten::linear"} <= set(steps["training_step"])
    assert "[Strategy]Strategy.validation_step" in steps["validation_step"], "two batches are recorded from the first"
    assert not trainer.model.layer._forward_hooks, "the labels are gone"


def test_pytorch_writes_stacks_for_a_flame_graph(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, activities=["cpu"], export_to_flame_graph=True, export_to_chrome=False)
    quiet(profiler=profiler, max_steps=1).fit(Toy(), loader(4))
    assert {path.name for path in tmp_path.iterdir()} == {"fit-pytorch.txt", "fit-training_step.stacks"}
    stacks = (tmp_path / "fit-training_step.stacks").read_text()
    assert "toys.py" in stacks, "one line for each stack: calls from the outermost on, and microseconds"


def test_pytorch_takes_a_schedule_and_says_that_it_came_to_nothing(tmp_path: Path) -> None:
    ready: list[Any] = []
    profiler = PyTorchProfiler(schedule={"wait": 0, "warmup": 1, "active": 1}, on_trace_ready=ready.append)
    in_a_run_folder(profiler, tmp_path, max_steps=4).fit(Toy(), loader(16))
    assert len(ready) == 2
    profiler = PyTorchProfiler(schedule=torch.profiler.schedule(wait=8, warmup=1, active=1))
    with pytest.warns(UserWarning, match="recorded nothing of training_step"):
        in_a_run_folder(profiler, tmp_path).fit(Toy(), loader(12))

    def fails(recorded: Any) -> None:
        raise OSError("disk full")

    with pytest.warns(UserWarning, match="the profiler's files could not be written to its end: OSError: disk full"):
        in_a_run_folder(PyTorchProfiler(on_trace_ready=fails), tmp_path).fit(Toy(), loader(12))


def test_pytorch_records_everything_without_a_trainer(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, "alone", activities=["cpu"])
    with profiler.profile("mine"):
        torch.ones(2).exp()
    profiler.describe()
    profiler.teardown(None)
    assert {"mine", "aten::exp"} <= {event.name for event in profiler.function_events or ()}
    assert "aten::exp" in (tmp_path / "alone.txt").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_memory_snapshot_needs_cuda() -> None:
    profiler = PyTorchProfiler(export_memory_snapshot=True)
    with pytest.warns(UserWarning, match="no CUDA device"):
        profiler.setup("fit")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: quiet(profiler="simpel"), "profiler='simpel'.*Did you mean 'simple'"),
        (lambda: quiet(profiler=SimpleProfiler), r"an object, not the class: write SimpleProfiler\("),
        (lambda: quiet(profiler="simple", barebones=True), "barebones=True turns these off.*profiler='simple'"),
        (lambda: PyTorchProfiler(sort_by_key="speed"), "sort_by_key='speed'"),
        (lambda: PyTorchProfiler(schedule=3), "schedule=3: a function"),
        (lambda: PyTorchProfiler(schedule=lambda _: "now"), "must give a torch.profiler.ProfilerAction"),
        (lambda: PyTorchProfiler(shapes=True), r"PyTorchProfiler\(shapes=...\): torch.profiler.profile has no shapes"),
        (lambda: PyTorchProfiler(table_kwargs={"row_limit": 3}), "table_kwargs has 'row_limit'"),
    ],
)
def test_wrong_arguments_of_profilers_are_named(make: Any, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        make()


def test_a_profiler_of_ones_own() -> None:
    class Names(Profiler):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def start(self, action_name: str) -> None:
            self.names.append(action_name)

        def stop(self, action_name: str) -> None:
            self.names.append(f"/{action_name}")

    profiler = Names()
    quiet(profiler=profiler, max_steps=1).fit(Marked(), loader(4))
    begin = profiler.names.index("run_training_batch")
    assert profiler.names[begin : begin + 4] == [
        "run_training_batch",
        "[Strategy]Strategy.training_step",
        "mine",
        "/mine",
    ]


def test_simple_counts_all_calls_and_keeps_the_last_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.profilers.simple._KEPT", 4)
    profiler = SimpleProfiler()
    for _ in range(21):
        with profiler.profile("reading"):
            pass
    assert len(profiler.recorded_durations["reading"]) == 5
    total, reading = (line.split() for line in profiler.summary().splitlines() if line.startswith(("Total", "reading")))
    assert total[2] == reading[2] == "21"

"""Which checkpoint is the newest and whose it is: gone back to, crashed there, run twice in one folder, copied in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Accelerator
from instep.accelerator import ProjectConfiguration
from instep.callbacks import ModelCheckpoint
from instep.checkpoint import CheckpointStore, find_checkpoint
from instep.checkpoint.described import checkpoints
from instep.checkpoint.hashing import digest
from instep.checkpoint.lineage import Line
from instep.checkpoint.manifest import Manifest, read_manifest
from instep.errors import CheckpointError, CheckpointNotFoundError
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Toy, loader, quiet

SEVERAL = "holds the checkpoints of 2 runs"


def manifest(run: str, step: int, serial: int = 1, *resumed_from: tuple[str, int], **info: Any) -> Manifest:
    return Manifest(step, 1, run, 1, "", {}, {}, {"kind": "full", **info}, serial, resumed_from)


@pytest.mark.parametrize(
    ("resumed", "beside", "same_run", "resumed_from"),
    [
        (manifest("a", 8, 2), [manifest("a", 4, 1)], True, (("a", 8),)),
        (manifest("a", 8, 3), [manifest("a", 8, 2)], True, (("a", 8),)),
        (manifest("a", 8, 2), [manifest("b", 12, 3)], True, (("a", 8),)),
        (manifest("a", 4, 1), [manifest("a", 8, 2)], False, (("a", 4),)),
        (manifest("a", 4, 1), [manifest("a", 8, 2, kind="exception")], True, (("a", 4),)),
        (manifest("a", 4, 1), [manifest("a", 8, 2, kind="weights")], True, (("a", 4),)),
        (manifest("b", 8, 5, ("a", 4)), [], True, (("b", 8), ("a", 4))),
        (manifest("b", 8, 5, ("b", 6), ("a", 4)), [manifest("b", 12, 6)], False, (("b", 8), ("a", 4))),
        (manifest("a", 4, 0), [manifest("a", 8, 0)], False, (("a", 4),)),  # of an instep that did not count
    ],
)
def test_a_run_goes_on_or_a_new_one_begins_where_it_was_gone_back_to(
    resumed: Manifest, beside: list[Manifest], same_run: bool, resumed_from: tuple[tuple[str, int], ...]
):
    line = Line.resumed(resumed, beside)
    assert (line.run_id == resumed.run_id, line.resumed_from) == (same_run, resumed_from)
    assert line.serial == max(one.serial for one in (resumed, *beside))
    assert line.has(resumed.run_id, resumed.step)
    if not same_run:
        assert not line.has(resumed.run_id, resumed.step + 1)


# ---- Trainer


class Crash(Exception):
    """What ends a run."""


class Marked(Toy):
    """Its weights say which branch trained them last."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.die = 0, -1
        self.scores = [3.0, 1.0, 2.0, 2.5, 2.6, 2.7]
        self.register_buffer("by", torch.tensor(0.0))
        self.found = (0, 0)

    def on_train_start(self) -> None:
        self.found = (self.global_step, int(self.by))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.die:
            raise Crash
        self.by.fill_(self.branch)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("score", self.scores[self.current_epoch])

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("tested", self.by)


def fit(folder: Path, branch: int, ckpt_path: Any = None, die: int = -1, **what: Any) -> tuple[Any, Marked, Any]:
    module = Marked()
    module.branch, module.die = branch, die
    saver = ModelCheckpoint(folder, **{"save_top_k": -1, **what})
    settings: dict[str, Any] = {"max_epochs": what.pop("max_epochs", 6), "num_sanity_val_steps": 0}
    trainer = quiet(**settings, callbacks=[saver], enable_checkpointing=True, default_root_dir=folder.parent)
    try:
        trainer.fit(module, loader(), loader(3), ckpt_path=ckpt_path)
    except Crash:
        pass
    return trainer, module, saver


def roles(folder: Path) -> dict[str, str | None]:
    return {entry["name"]: entry["role"] for entry in checkpoints(folder)}


@pytest.mark.parametrize("keyword", ["auto", "last"])
def test_the_newest_is_what_was_saved_last_also_where_the_run_went_back(keyword: str, tmp_path: Path):
    folder = tmp_path / "saved"
    fit(folder, 1, die=18)  # saves steps 4, 8, 12, 16
    fit(folder, 2, folder / "step-00000004-1", die=14)  # saves 8 and 12 of its own
    assert fit(folder, 2, keyword, die=14)[1].found == (12, 2)
    assert roles(folder) == {
        **dict.fromkeys(("step-00000008-1", "step-00000012-1", "step-00000016-1"), "given up"),
        **dict.fromkeys(("step-00000004-1", "step-00000008-2")),
        "step-00000012-2": "newest",
    }
    # Gone back once more, to a step of the first branch: a third one.
    fit(folder, 3, folder / "step-00000008-1", die=13)
    assert read_manifest(folder / "step-00000012-3").resumed_from[0][1] == 8
    with pytest.warns(UserWarning, match=SEVERAL):  # the second branch is no part of the third
        assert fit(folder, 3, keyword)[1].found == (12, 3)


@pytest.mark.parametrize("first", ["a folder of its own", "the run folder"])
def test_a_longer_run_in_one_of_two_folders_is_not_taken_for_the_newest(first: str, tmp_path: Path):
    def fit(branch: int, die: int, ckpt_path: str | None) -> Marked:
        module = Marked()
        module.branch, module.die = branch, die
        folder = tmp_path / f"first-{branch}" if first == "a folder of its own" else None
        often, seldom = ModelCheckpoint(folder), ModelCheckpoint(tmp_path / "b", every_n_epochs=2, save_top_k=-1)
        trainer = quiet(
            max_epochs=6, callbacks=[often, seldom], enable_checkpointing=True, default_root_dir=tmp_path / "root"
        )
        try:
            trainer.fit(module, loader(), ckpt_path=ckpt_path)
        except Crash:
            pass
        return module

    fit(1, -1, None)
    fit(2, 6, None)  # has saved step 4 in its first folder
    assert fit(2, -1, "auto").found == (4, 2)


def test_what_was_left_behind_is_neither_counted_nor_deleted(tmp_path: Path):
    folder = tmp_path / "saved"
    kept = {"monitor": "score", "save_top_k": 2}
    fit(folder, 1, die=18, **kept)  # keeps steps 8 and 12
    shutil.copytree(folder / "step-00000008-1", tmp_path / "copy" / "step-00000008-1")
    _, _, saver = fit(folder, 2, tmp_path / "copy" / "step-00000008-1", **kept)
    assert roles(folder)["step-00000012-1"] == "given up"
    assert [Path(one).name for one in saver.best_k_models] == ["step-00000008-1", "step-00000012-2"]


@pytest.mark.parametrize(
    "what", [{}, {"save_top_k": 2}, {"save_last": True}, {"save_weights_only": True}, {"filename": "best"}]
)
def test_best_of_a_second_run_in_one_folder_is_its_own(what: dict[str, Any], tmp_path: Path):
    folder = tmp_path / "saved"
    what = {"monitor": "score", "save_top_k": 1, **what}
    fit(folder, 1, **what)
    module = Marked()
    module.branch, module.scores = 2, [4.0, 2.5, 3.5]
    saver = ModelCheckpoint(folder, **what)
    trainer = quiet(max_epochs=3, num_sanity_val_steps=0, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(module, loader(), loader(3))
    assert trainer.test(module, loader(), ckpt_path="best", verbose=False) == [{"tested": 2.0}]
    assert trainer.test(module, loader(), ckpt_path="last", verbose=False) == [{"tested": 2.0}]
    assert saver.best_model_score == 2.5
    fresh = quiet(callbacks=[ModelCheckpoint(folder, monitor="score")], enable_checkpointing=True)
    with pytest.warns(UserWarning, match=SEVERAL):
        assert fresh.test(Marked(), loader(), ckpt_path="best", verbose=False) == [{"tested": 2.0}]
    if "filename" in what:
        assert int(Marked.load_from_checkpoint(folder / "best.ckpt").by) == 2


def test_a_trainer_that_has_saved_nothing_does_not_test_another_runs_weights(tmp_path: Path):
    folder = tmp_path / "saved"
    fit(folder, 1)
    trainer, module, _ = fit(folder, 2, save_top_k=0)
    for keyword in ("best", "last"):
        with pytest.raises(CheckpointNotFoundError, match="of this run"):
            trainer.test(module, loader(), ckpt_path=keyword)


def test_a_checkpoint_that_was_copied_in_disturbs_nobody(tmp_path: Path):
    foreign, folder = tmp_path / "foreign" / "saved", tmp_path / "saved"
    fit(foreign, 7)
    fit(folder, 1, die=10)
    copied = folder / "foreign-9"
    shutil.copytree(foreign / "step-00000024-1", copied)  # it has a higher serial number than anything here
    with pytest.warns(UserWarning, match=SEVERAL):
        trainer, module, _ = fit(folder, 1, "auto", save_top_k=1)
    assert module.found == (8, 1), "the run that held the folder last goes on"
    assert copied.is_dir()
    assert roles(folder)["foreign-9"] == "another run"
    assert trainer.test(module, loader(), ckpt_path="last", verbose=False) == [{"tested": 1.0}]


def test_the_state_after_an_error_is_of_the_line_it_was_saved_on(tmp_path: Path):
    folder = tmp_path / "saved"
    fit(folder, 1)
    fit(folder, 2, folder / "step-00000004-1", die=5, save_on_exception=True)
    newest = CheckpointStore(folder).scan()[0]
    assert (newest.kind, newest.step) == ("exception", 5)
    assert newest.manifest.resumed_from == ((read_manifest(folder / "step-00000004-1").run_id, 4),)


@pytest.mark.dist
def test_another_number_of_processes_goes_back_and_on_alike(tmp_path: Path):
    folder = tmp_path / "saved"
    fit(folder, 1, die=18)
    fit(folder, 2, folder / "step-00000008-1", die=14)
    found = run_ranks(_goes_on, 2, folder)
    assert found == [(12, 2)] * 2


def _goes_on(folder: Path) -> tuple[int, int]:
    return fit(folder, 2, "auto")[1].found


def test_checkpoints_of_an_instep_that_did_not_count_come_first_and_load(tmp_path: Path):
    folder = tmp_path / "saved"
    fit(folder, 1, die=14)
    for path in folder.glob("step-*/manifest.json"):
        content = json.loads(path.read_bytes())
        for key in ("serial", "resumed_from", "xxh3"):
            del content[key]
        text = json.dumps(content, indent=1).removesuffix("\n}")
        path.write_text(f'{text},\n "xxh3": "{digest(text.encode())}"\n}}\n')
    assert [info.step for info in CheckpointStore(folder).scan()] == [12, 8, 4]
    assert fit(folder, 2, "auto", die=14)[1].found == (12, 1)
    fit(folder, 3, folder / "step-00000004-1", die=9)
    assert fit(folder, 3, "auto")[1].found == (8, 3)


# ---- names


def test_a_fixed_name_is_the_best_of_what_it_names(tmp_path: Path):
    folder = tmp_path / "saved"
    _, _, saver = fit(folder, 1, filename="mine", monitor="score", save_top_k=3, save_last=True)
    assert find_checkpoint(folder / "mine.ckpt") == find_checkpoint(folder / "mine") == Path(saver.best_model_path)
    _, _, saver = fit(tmp_path / "last", 1, filename="last", monitor="score", save_top_k=2, save_last=True)
    assert str(find_checkpoint(tmp_path / "last" / "last.ckpt")) == saver.last_model_path
    both = [ModelCheckpoint(tmp_path / "both", "mine", "score", mode=mode, save_top_k=2) for mode in ("min", "max")]
    trainer = quiet(max_epochs=3, num_sanity_val_steps=0, callbacks=both, enable_checkpointing=True)
    trainer.fit(Marked(), loader(), loader(3))
    with pytest.raises(CheckpointError, match="scored by different rules"):
        find_checkpoint(tmp_path / "both" / "mine")


@pytest.mark.parametrize(("modes", "best"), [(("min", "max"), 8), (("max", "min"), 4)])
def test_best_of_two_savers_of_one_metric_is_the_first_ones(modes: tuple[str, str], best: int, tmp_path: Path):
    def trainer() -> Any:
        both = [ModelCheckpoint(tmp_path / "saved", None, "score", mode=mode) for mode in modes]
        return quiet(max_epochs=3, num_sanity_val_steps=0, callbacks=both, enable_checkpointing=True)

    fitted = trainer()
    fitted.fit(Marked(), loader(), loader(3))
    for each in (fitted, trainer()):  # in the process that saved them, and in a later one
        each.test(Marked(), loader(3), ckpt_path="best", verbose=False)
        assert each.ckpt_path == str(tmp_path / "saved" / f"step-{best:08d}-1")
    with pytest.raises(CheckpointError, match="scored by different rules"):
        CheckpointStore(tmp_path / "saved").resolve("best", monitor="score")


# ---- Accelerator


@pytest.mark.parametrize(
    ("limit", "from_copy"), [(None, True), (1, True), (2, True), (3, True), (None, False), (2, False), (3, False)]
)
def test_an_accelerator_that_goes_back_keeps_what_it_saves_from_there(
    limit: int | None, from_copy: bool, tmp_path: Path
):
    project = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(project_config=project, cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def save(value: float) -> Path:
        with torch.no_grad():
            model.weight.fill_(value)
        accelerator.backward(model(torch.ones(1, 1)).sum() * 0)
        optimizer.step()
        return Path(accelerator.save_state())

    first = [save(float(value)) for value in range(1, 6)]
    early = first[-2 if limit == 2 else -1 if limit == 1 else -3]
    if from_copy:
        early = Path(shutil.copytree(early, tmp_path / "good" / early.name))
    accelerator.load_state(early)
    lease = max((tmp_path / "checkpoints").glob(".lease-*"))
    assert json.loads(lease.read_text())["run_id"] == accelerator.run_id, "a kill may come before the next beat"
    saved = [save(10.0 * value) for value in range(1, 5)]
    kept = [path for path in saved if path.is_dir()]
    assert kept == (saved if limit is None else saved[-limit:])
    assert first[-1].is_dir() or limit == 1, "what was left behind stays"
    accelerator.load_state()
    assert model.weight.item() == 40.0
    accelerator.end_training()
    another = Accelerator(project_config=project, cpu=True)
    model = torch.nn.Linear(1, 1)
    model, _ = another.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    another.load_state()
    assert model.weight.item() == 40.0, "of what was left behind"
    another.end_training()

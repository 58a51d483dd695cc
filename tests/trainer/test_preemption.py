"""Signals at every place of a run, to any rank: it stops once, at one step, and goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from instep import Callback
from instep.checkpoint import LocalFiles
from instep.errors import Preempted
from instep.trainer import lifecycle
from tests.helpers.spawn import run_ranks
from tests.trainer.resuming import Case, Net, Plain, Result, assert_same, make_trainer, seed, train_loader
from tests.trainer.toys import Toy, loader, quiet

VALIDATION = 9
PLACES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "set-up": ("setup", lambda trainer: True),
    "sanity check": ("on_validation_batch_start", lambda trainer: trainer.sanity_checking),
    "step": ("on_train_batch_end", lambda trainer: trainer.global_step == 4),
    "validation": ("on_validation_batch_start", lambda trainer: trainer.validating and trainer.current_epoch == 1),
    "end of validation": ("on_validation_end", lambda trainer: trainer.validating and trainer.current_epoch == 1),
    "epoch end": ("on_train_epoch_end", lambda trainer: True),
    "epoch start": ("on_train_epoch_start", lambda trainer: trainer.current_epoch == 1),
    "save": ("publish", lambda trainer: True),
}


class Sends(Callback):
    """Sends a signal to this process, once: in a hook, or in the middle of a save."""

    def __init__(self, place: str, number: int, rank: int | None) -> None:
        self.hook, self.when = PLACES[place]
        self.number = number
        self.mine = rank in (None, int(os.environ.get("RANK", "0")))
        self.batches = 0
        self.commits = 0
        if self.hook != "publish":
            own = getattr(self, self.hook)
            setattr(self, self.hook, lambda trainer, *args, **kwargs: (self.send(trainer), own(trainer, *args)))

    def send(self, trainer: Any) -> None:
        if self.mine and self.when(trainer):
            self.mine = False
            os.kill(os.getpid(), self.number)

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        self.batches += trainer.validating

    def publish(self, files: Any, *args: Any) -> None:
        self.commits += 1
        if self.hook == "publish":
            self.send(None)
        PUBLISH(files, *args)


PUBLISH = LocalFiles.publish


def run(case: Case, root: Path, number: int, rows: list[Any], *callbacks: Any, background: bool = False) -> Result:
    seed(100 + number)
    module, stopped = Net(case.schedule), False
    trainer = make_trainer(case, root, rows, *callbacks)
    trainer.checkpoint_callback.background = background
    try:
        trainer.fit(module, train_loader(case), DataLoader(Plain(VALIDATION), batch_size=1), ckpt_path="auto")
    except Preempted:
        stopped = True
    return Result(module, trainer, stopped, rows, module.seen)


def said(trainer: Any) -> dict[str, Any]:
    return json.loads((Path(trainer.log_dir) / "status.json").read_text())


def stop_and_go_on(root: Path, cases: list[tuple[Any, ...]], case: Case = Case()) -> list[tuple[int, int]]:  # noqa: B008
    """Stop a run by each of the signals and take it up again; how many validation batches and commits the stop had."""
    reference = run(case, root / "reference", 0, [])
    assert not reference.stopped
    results = []
    for index, (place, name, rank, *background) in enumerate(cases):
        what, folder, rows = f"{name} to rank {rank} in {place}", root / str(index), []
        sends = Sends(place, getattr(signal, name), rank)
        LocalFiles.publish = lambda files, *args, sends=sends: sends.publish(files, *args)  # type: ignore[method-assign]
        stopped = run(case, folder, 0, rows, sends, background=bool(background))
        LocalFiles.publish = PUBLISH  # type: ignore[method-assign]
        assert stopped.stopped, what
        saves = place not in ("set-up", "sanity check")
        if stopped.trainer.is_global_zero:  # which wrote it
            told = said(stopped.trainer)
            at = (told["status"], told["exit_code"], told["signal"], told["global_step"])
            assert at == ("preempted", 75, name, stopped.trainer.global_step), what
            assert Path(told["checkpoint"]).is_dir() if saves else told["checkpoint"] is None, what
        last = run(case, folder, int(saves), rows)  # with nothing saved the program starts again, with its own seed
        assert not last.stopped, what
        last.seen = stopped.seen + last.seen
        assert_same(last, reference, what)
        assert not last.trainer.is_global_zero or said(last.trainer)["status"] == "done"
        results.append((sends.batches, sends.commits))
    return results


ALONE = [
    ("set-up", "SIGTERM", 0),
    ("sanity check", "SIGINT", 0),
    ("step", "SIGUSR1", 0),
    ("validation", "SIGUSR2", 0),
    ("end of validation", "SIGTERM", 0),
    ("epoch end", "SIGUSR1", 0),
    ("epoch start", "SIGTERM", 0),
    ("save", "SIGINT", 0),
    ("save", "SIGTERM", 0, "background"),
]


@pytest.mark.parametrize("index", range(len(ALONE)), ids=[" ".join(map(str, case)) for case in ALONE])
def test_a_signal_to_a_process_alone_saves_and_the_run_goes_on(index: int, tmp_path: Path) -> None:
    batches, commits = stop_and_go_on(tmp_path, [ALONE[index]])[0]
    assert batches == {"validation": VALIDATION + 2, "step": 0, "set-up": 0, "sanity check": 0}.get(
        ALONE[index][0], batches
    )
    expected = {"save": len(ALONE[index]) - 2, "set-up": 0, "sanity check": 0}  # the one under way, and a later step's
    assert commits == expected.get(ALONE[index][0], commits), "not nested, and not a second time"


def test_a_validation_within_an_epoch_is_left_and_done_again(tmp_path: Path) -> None:
    cases = [("validation", "SIGTERM", 0)]
    assert stop_and_go_on(tmp_path, cases, Case(validate=2, monitor=True, workers=1))[0][0] % VALIDATION == 2


def stopping(name: str) -> Toy:
    class Stops(Toy):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:  # agreed on at the step after
                self.trainer.set_trigger("preempted", name)

    return Stops()


@pytest.mark.parametrize(("name", "error", "code"), [("SIGINT", KeyboardInterrupt, None), ("SIGTERM", SystemExit, 143)])
def test_a_run_that_saves_nothing_ends_as_the_signal_would_have_ended_it(
    name: str, error: type[BaseException], code: int | None
) -> None:
    with pytest.raises(error) as ended:
        quiet(max_epochs=1, trigger_every=1).fit(stopping(name), loader())
    assert not isinstance(ended.value, Preempted)
    assert getattr(ended.value, "code", None) == code


def test_a_run_that_was_stopped_prints_where_it_stands_and_how_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = quiet(max_epochs=1, trigger_every=1, default_root_dir=tmp_path, enable_checkpointing=True)
    with pytest.raises(Preempted) as ended:
        trainer.fit(stopping("SIGTERM"), loader())
    text = str(ended.value)
    assert text.startswith("Stopped by SIGTERM (rank 0) at step 2: epoch 1/1, batch 2 of 4. Saved "), text
    assert text.endswith('step-00000002-1. To go on, run it again with ckpt_path="auto".'), text
    assert text in capsys.readouterr().out


@pytest.mark.dist
@pytest.mark.slow
def test_a_signal_to_any_rank_or_all_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    cases = [
        ("step", "SIGTERM", 1),
        ("step", "SIGUSR1", 0),
        ("step", "SIGINT", None),
        ("validation", "SIGTERM", 1),
        ("validation", "SIGUSR2", None),
        ("sanity check", "SIGUSR1", 1),
        ("epoch end", "SIGTERM", 1),
        ("save", "SIGTERM", 0),
    ]
    first, second = run_ranks(stop_and_go_on, 2, tmp_path, cases)
    assert [batches for batches, _ in first] == [batches for batches, _ in second], "left at the same batch"
    assert first[3][0] % 5 == 2


def test_without_a_limit_to_the_grace_period_ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(lifecycle.dist, "monitored_barrier", lambda group, timeout: waited.append(timeout))
    ctx = SimpleNamespace(world_size=2, settings=SimpleNamespace(grace_period_s=float("inf")))
    lifecycle._wait_for_all(ctx, Preempted("stopped"))  # type: ignore[arg-type]
    assert len(waited) == 1

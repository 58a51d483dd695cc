"""Resume: where a run that was broken off goes on. The parts put together are the whole."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.model.checkpoints import Disk, Line, Newest, Saved, Saver, best_first
from tests.model.data import limit_in_batches
from tests.model.logs import EPOCHS, rows_on
from tests.model.stopping import Stopper
from tests.model.trace import Event, Refused

if TYPE_CHECKING:
    from tests.model.run import Run

BEFORE = "on_train_start"


@dataclass
class Start:
    """What a process starts with, and where it is broken off.

    Attributes:
        disk: the checkpoints that it finds.
        ckpt_path: what it goes on from: None, "auto", "last", "best", or a checkpoint.
        breaks_at: the number of the event that breaks it off.
        kills: SIGKILL does, else an exception.
        asks: with which `ckpt_path` it calls `validate` after the fit.
        trigger: what a hook asks for; None: nothing.
        sets_at: the number of the event at which this rank asks for it; None: another rank does.
        sets_before: how often the ranks had agreed by then; it is found out on the rank that asks.
    """

    disk: Disk = field(default_factory=Disk)
    ckpt_path: str | Saved | None = None
    breaks_at: int | None = None
    kills: bool = False
    asks: tuple[str, ...] = ()
    trigger: str | None = None
    sets_at: int | None = None
    sets_before: int | None = None


def find(
    disk: Disk, meant: str | Saved | None, savers: Sequence[Saver], to_train: bool, line: Line | None = None
) -> Saved | None:
    """Return the checkpoint that is meant; None to begin afresh.

    "last" is what was saved last, in the folders of all ModelCheckpoints; a fit takes a whole one. "auto" is the same,
    or nothing. "best" is the best by the first ModelCheckpoint's metric, in its folder, whose mode counts where there
    are both; without a metric it is the newest.

    Args:
        disk: the checkpoints that are there.
        meant: as `Start.ckpt_path`.
        savers: the ModelCheckpoints.
        to_train: whether a fit goes on from it, which needs the whole state.
        line: the run that the Trainer has trained, whose checkpoints are meant. Without one it is the run that held the
            folder last.
    """
    if meant is None or isinstance(meant, Saved):
        if meant is not None and to_train and meant.state is None:
            raise Refused("CheckpointError", "weights alone cannot be gone on from", early=True)
        return meant
    folders = [saver.given.folder for saver in savers]
    ranks = meant == "best" and savers and savers[0].given.monitor is not None
    if meant == "best":
        folders = folders[:1]
    there = [one for one in disk.saved if one.folder in folders and (one.state is not None or not to_train)]
    if line is None and there:
        held = [one for one in there if one.line.run == disk.held.get(folders[0])]
        line = (held or there)[-1].line
    own = [one for one in there if line is not None and line.has(one)]
    if ranks:
        monitor, mode = savers[0].given.monitor, savers[0].given.mode
        modes = {one.metric[1] for one in own if one.metric[0] == monitor and one.score is not None}
        mode = mode if len(modes) > 1 else next(iter(modes), mode)
        own = best_first([one for one in own if one.metric == (monitor, mode)], mode)[:1]
    if not own and meant != "auto":
        raise Refused("CheckpointNotFoundError", f"{meant}: there is none", early=True)
    return own[-1] if own else None


def find_checkpoint(run: Run) -> Saved | None:
    """Begin a run, or go on with the one that `ckpt_path` means; nothing is left to be done twice."""
    case, start = run.case, run.start
    run.stopper = None if case.stopping is None else Stopper(case.stopping)
    run.savers = [Saver(given) for given in (case.checkpoints, case.second) if given is not None]
    if any(saver.given.save_last == "link" for saver in run.savers):
        raise Refused("SettingError", "'last' is found by a look at the disk, so there is no link", early=True)
    if len({saver.given.key for saver in run.savers}) < len(run.savers):
        raise Refused("SettingError", "two ModelCheckpoints with one key", early=True)
    if start.ckpt_path in ("auto", "last") and any(saver.keeps_newest for saver in run.savers):
        run.newest = Newest(run.savers[0].given.folder)
    folders = [saver.given.folder for saver in run.savers]
    found = find(start.disk, start.ckpt_path, run.savers, to_train=True)
    if found is None:
        run.line, run.table = start.disk.begin(folders), len(start.disk.tables)
        return None
    run.line = start.disk.go_on(found, folders)
    assert found.state is not None
    vars(run).update(deepcopy(found.state))
    if start.ckpt_path == "auto":
        run.rows, run.again = rows_on(start.disk.tables[run.table], len(run.rows), run.step)
    else:
        run.rows, run.table = [], len(start.disk.tables)  # another run folder, without the rows of the first one
    run.epochs_seen = run.epoch
    if run.ranks != case.ranks:
        run.move()
    return found


ASKED = 12
"""Batches of the data that `validate` is asked over."""


def ask(run: Run) -> None:
    """Say whose weights `validate` takes after the fit: in this process, and in one that has not trained."""
    line = run.line if run.step else None
    for name, of in (("validate", line), ("validate again", None)):
        for meant in run.start.asks:
            try:
                found = find(run.start.disk, meant, run.savers, to_train=False, line=of)
                limit = limit_in_batches(run.loaders.val_limit, ASKED, "limit_val_batches")
                for call in run.case.logs:
                    if call.hook == "on_validation_end":
                        raise Refused("LogError", "nothing can be logged there")
                    in_batch = call.every <= (ASKED if limit is None else min(limit, ASKED))
                    if "validation" in call.hook and (call.hook in EPOCHS or in_batch):
                        call.levels()
            except Refused as refused:
                run.events.append(Event("-", name, (meant, refused.kind), 0, 0))
            else:
                run.events.append(Event("-", name, (meant, found and found.name), 0, 0))


def updates(events: Sequence[Event]) -> list[tuple[Any, ...]]:
    """Return what a run trains: each optimizer step with its weights, its rate, and its place."""
    return [(event.args, event.step, event.epoch) for event in events if event.owner == "O"]


def is_kept(event: Event) -> bool:
    """Return whether an event is the same in a run that is broken off or asked to save: looks and saves are not."""
    return event.owner not in "DS" and not event.name.endswith("_dataloader")


def saved_last(first: Sequence[Event]) -> int | None:
    """Return the number of the event that saved the state which a run goes on from; None where it begins again."""
    return next((number for number in reversed(range(len(first))) if first[number].owner == "S"), None)


def resumed(whole: Sequence[Event], first: Sequence[Event]) -> list[Event]:
    """Return what is seen of a run that is started again with `ckpt_path="auto"`, after it was broken off or has ended.

    It goes on behind its newest checkpoint, as if it had not been broken off. Without one it begins again.

    Args:
        whole: the events of the run that is not broken off.
        first: the events until then.
    """
    number = saved_last(first)
    whole = [event for event in whole if is_kept(event)]
    if number is None:
        return whole
    saved, done = first[number], list(first[:number])
    names = [event.name for event in done]
    begun = max((n for n, name in enumerate(names) if name == "on_validation_model_zero_grad"), default=None)
    if begun is not None and "on_validation_end" not in names[begun:]:  # it was left, and runs again
        done = done[:begun]
    rest = whole[sum(map(is_kept, done)) :]
    if rest[0].name == "on_validation_model_train":  # the validation was over, but for this
        rest = rest[1:]
    # The set-up is as before, but nothing is checked again: there is no sanity check.
    epoch, ended = saved.args[2], saved.args[1]
    begin = [
        event._replace(step=saved.step, epoch=epoch, metrics=saved.metrics)
        for event in whole[: 1 + max(n for n, event in enumerate(whole) if event.name == BEFORE)]
        if event.owner in "CM"
    ]
    start = next((n for n, event in enumerate(begin) if event.name == "on_sanity_check_start"), None)
    if start is not None:
        begin = begin[:start] + [event for event in begin[start:] if event.name == BEFORE]
    if not ended and rest[0].name != "on_train_end":  # the epoch goes on: its first hook is called again
        begin += [Event(owner, "on_train_epoch_start", (), saved.step, epoch, saved.metrics) for owner in ("C", "M")]
    return begin + rest

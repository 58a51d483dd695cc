"""Runs a script of the Accelerator as the model has it, and records what is seen of it."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from instep import Accelerator
from instep.accelerator import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from instep.errors import InstepError
from instep.utils import atomic
from tests.model.accelerator import Loop, Seen, Start
from tests.model.data import Data
from tests.model.optimization import RATE
from tests.model_runs.loaders import SEED, loader


class Killed(Exception):
    """What ends a start."""


class Weights(torch.nn.Module):
    """A weight for each sample; it returns those of a batch."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(max(1, samples)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.weights[batch]


class Recorder(list[Seen]):
    """What was seen. Warnings of a wrong skip are seen too."""

    def note(self, name: str, *args: Any) -> None:
        self.append(Seen(name, args))

    def warn(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if "after load_state" in str(message):
            self.note("warned")


class Counters:
    """The script's own counters, which its states hold."""

    def __init__(self) -> None:
        self.number, self.epoch, self.done, self.at_end, self.total = -1, 0, 0, False, 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


def record(case: Loop, folder: str, rank: int = 0, only: int | None = None) -> list[Seen]:
    """Start the script as often as the case says.

    Args:
        case: the script.
        folder: where its files go.
        rank: of this process.
        only: the number of one start; None: all of them.
    """
    seen = Recorder()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(patch.object(atomic, "fsync", lambda fd: None))
        stack.enter_context(patch("instep.accelerator.accelerator.clear_device_cache", lambda **_: None))
        warnings.simplefilter("always")
        warnings.showwarning = seen.warn
        for number, start in enumerate(case.starts):
            if only in (None, number):
                run_once(case, number, start, folder, seen, rank)
    return seen


def run_once(case: Loop, number: int, start: Start, folder: str, seen: Recorder, rank: int) -> None:
    """Start the script once."""
    saves = Path(folder, "saves").read_text().split() if Path(folder, "saves").exists() else []
    torch.manual_seed(SEED + number if saves else SEED)  # a state holds the seed of the data's order
    script = Script(case, start, folder, seen, [Path(path) for path in saves], rank)
    try:
        script.go()
    except Killed:
        pass
    except InstepError as error:
        seen.note("error", type(error).__name__, str(error))
    finally:
        script.accelerator.free_memory()


class Script:
    """One start of the script."""

    def __init__(self, case: Loop, start: Start, folder: str, seen: Recorder, saves: list[Path], rank: int) -> None:
        self.case, self.start, self.folder, self.seen, self.saves, self.rank = case, start, folder, seen, saves, rank
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=case.accumulate,
                adjust_scheduler=case.adjust_scheduler,
                sync_with_dataloader=case.sync_with_dataloader,
                sync_each_batch=case.sync_each_batch,
            ),
            step_scheduler_with_optimizer=case.step_scheduler_with_optimizer,
            dataloader_config=DataLoaderConfiguration(
                split_batches=case.split_batches,
                dispatch_batches=case.dispatch_batches,
                even_batches=case.even_batches,
                **({} if case.restore_position == "auto" else {"restore_position": case.restore_position}),  # type: ignore
            ),
            project_config=ProjectConfiguration(
                folder, automatic_checkpoint_naming=not case.explicit, total_limit=case.total_limit
            ),
        )
        model = Weights(case.train.samples)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.optimizer, self.model = self.accelerator.prepare(optimizer, model=model)
        self.second: Any = None
        if case.second is not None:
            second = Weights(case.train.samples)
            step = torch.optim.SGD(second.parameters(), lr=RATE)
            self.second_optimizer, self.second = self.accelerator.prepare(step, second=second)
        self.scheduler = None
        if case.scheduler is not None:
            self.scheduler = self.accelerator.prepare(scheduler(case, optimizer))
        self.train = self.accelerator.prepare_data_loader(self.loader(case.train), name="train")
        self.val: Any = None
        if case.val is not None:
            self.val = self.accelerator.prepare_data_loader(self.loader(case.val), name="val")
        self.counters = Counters()
        self.accelerator.register_for_checkpointing(self.counters)
        self.trained = 0

    def loader(self, data: Data) -> Any:
        return loader(data, self.rank, self.start.ranks if self.case.dispatch_batches is False else 1)

    @property
    def next_epoch(self) -> int:
        return getattr(self.train, "next_epoch", self.train.epoch + 1)  # earlier versions have none

    @property
    def rate(self) -> float:
        return round(float(self.optimizer.param_groups[0]["lr"]), 6)

    def go(self) -> None:
        case, start, counters = self.case, self.start, self.counters
        self.seen.note("start")
        loaded = self.load()
        first, done, to_pass = counters.epoch, counters.done, counters.total
        if counters.at_end and not start.unaware:
            first, done = first + 1, 0
        for act in start.before if loaded else ():
            self.look(act)
        begin = {"nothing": self.next_epoch, "count": 0}.get(start.way, first) if loaded else 0
        for epoch in range(begin, case.epochs):
            if case.sets_epoch:
                self.train.set_epoch(epoch)
            counters.epoch, counters.done, counters.at_end = epoch, 0, False
            batches: Any = self.train
            resumes = loaded and epoch == first and start.way != "count"
            if resumes:
                counters.done = done
            if resumes and start.way == "skip_first_batches":
                batches = self.accelerator.skip_first_batches(batches, done)
            if resumes and start.way == "islice":
                batches = itertools.islice(batches, done, None)
            before, window = (self.trained, self.accelerator.step), 0
            for index, batch in enumerate(self.given(batches)):
                if loaded and start.way == "count" and to_pass > 0:
                    to_pass -= 1
                    counters.done += 1
                    continue
                if resumes and start.way == "continue" and index < done:
                    continue
                window += 1
                is_last = self.is_last if case.ahead else self.accelerator.gradient_state.end_of_dataloader
                synced = self.train_batch(batch, window == case.accumulate or is_last)
                if synced:
                    window = 0
                counters.done, counters.at_end = counters.done + 1, is_last
                counters.total, self.trained = counters.total + 1, self.trained + 1
                self.after_batch(synced)
            if (self.trained, self.accelerator.step) == before:  # a rank without a batch takes over others' steps
                continue
            counters.at_end = True
            if case.steps_by_epoch:
                self.step_scheduler()
            if case.val_every is None:
                self.evaluate(breaks=False)
            if case.save_epochs:
                self.save()
        self.seen.note("end", self.accelerator.step, self.rate)

    def given(self, batches: Any) -> Iterator[Any]:
        """Yield the batches, under the contexts that the script has around them."""
        self.is_last = False
        with nullcontext() if self.case.even_batches else self.accelerator.join_uneven_inputs([self.model]):
            if not self.case.ahead:
                yield from batches
                return
            following = iter(batches)
            batch = next(following, None)
            while batch is not None:
                after = next(following, None)
                self.is_last = after is None
                yield batch
                batch = after

    def train_batch(self, batch: torch.Tensor, by_hand: bool) -> bool:
        """Train on a batch; return whether it ended its window."""
        case, accelerator, optimizer = self.case, self.accelerator, self.optimizer
        models = [self.model, self.second] if case.second == "same" else [self.model]
        with nullcontext() if case.by_hand else accelerator.accumulate(*models):
            if case.zero_first:
                optimizer.zero_grad()
            loss = self.model(batch).mean()
            self.seen.note("batch", self.train.epoch, tuple(batch.tolist()), accelerator.sync_gradients)
            accelerator.backward(loss, len(batch) if case.num_items else None)
            norm = None
            if by_hand or not case.by_hand:
                norm = accelerator.clip_grad_norm_(self.model.parameters(), 100.0)
                if accelerator.sync_gradients:
                    self.seen.note("update", weights_of(self.model), self.rate)
                optimizer.step()
                if case.second == "same":
                    self.train_second(batch)
                if not case.steps_by_epoch:
                    self.step_scheduler()
                if not case.zero_first:
                    optimizer.zero_grad()
        if case.second == "own":
            with accelerator.accumulate(self.second):
                self.train_second(batch)
        assert not accelerator.optimizer_step_was_skipped
        self.seen.note("done", accelerator.step, None if norm is None else round(float(norm), 3))
        return norm is not None

    def train_second(self, batch: torch.Tensor) -> None:
        if self.case.zero_first:
            self.second_optimizer.zero_grad()
        self.accelerator.backward(self.second(batch).mean(), len(batch) if self.case.num_items else None)
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.second.parameters(), 100.0)
            self.seen.note("second", weights_of(self.second))
        self.second_optimizer.step()
        if not self.case.zero_first:
            self.second_optimizer.zero_grad()

    def step_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step(*((1.0,) if self.case.scheduler == "plateau" else ()))

    def after_batch(self, synced: bool) -> None:
        case, done = self.case, self.counters.done
        if case.val_every is not None and done % case.val_every == 0:
            self.evaluate(case.val_breaks)
        if case.save_every is not None and done % case.save_every == 0 and (synced or not case.save_at_steps):
            self.save()
        if self.trained == self.start.batches:
            raise Killed

    def evaluate(self, breaks: bool) -> None:
        if self.val is None:
            return
        values: list[int] = []
        total = 0
        for batch in self.val:
            nested = self.accelerator.gather_for_metrics({"a": batch, "b": (batch, [batch + 1])})
            objects = self.accelerator.gather_for_metrics([str(one) for one in batch.tolist()], use_gather_object=True)
            gathered = nested["a"].tolist()
            assert gathered == nested["b"][0].tolist() == (nested["b"][1][0] - 1).tolist() == list(map(int, objects))
            values += gathered
            total += int(self.accelerator.gather_for_metrics(batch.sum()[None], per_sample=False).sum())
            if breaks:
                break
        self.seen.note("gathered", tuple(values), total)

    def look(self, act: str) -> None:
        if act == "peek":
            batch = next(iter(self.train), None)
            self.seen.note("peeked", None if batch is None else tuple(batch.tolist()))
        elif act == "save":
            self.save()
        else:
            batches: Any = self.train
            if act == "evaluate_rest":
                batches = self.accelerator.skip_first_batches(batches, self.counters.done)
            with torch.no_grad():
                seen: list[tuple[int, ...]] = []
                for batch in batches:
                    self.model(batch)
                    seen.append(tuple(batch.tolist()))
            self.seen.note("evaluated", tuple(seen))

    def save(self) -> None:
        self.counters.number = len(self.saves)
        self.saves.append(self.accelerator.save_state(self.named))
        if self.rank:
            return
        with Path(self.folder, "saves").open("a") as file:
            file.write(f"{self.saves[-1]}\n")
        self.seen.note("saved", tuple(number for number, path in enumerate(self.saves) if path.exists()))

    @property
    def named(self) -> Path | None:
        return Path(self.folder, "mine") if self.case.explicit else None

    def load(self) -> bool:
        there = [number for number, path in enumerate(self.saves) if path.exists()]
        if not there:
            return False
        path = self.saves[self.start.load] if self.start.load in there else self.named
        self.accelerator.load_state(path)
        self.seen.note("loaded", self.counters.number, self.accelerator.step, self.next_epoch)
        return True


def weights_of(model: Any) -> tuple[tuple[int, float], ...]:
    """Return what each sample counts in the gradient of a model's weights."""
    (weights,) = model.parameters()
    return tuple((i, round(value, 5)) for i, value in enumerate(weights.grad.tolist()) if value)


def scheduler(case: Loop, optimizer: Any) -> Any:
    """Make the scheduler of a case."""
    if case.scheduler == "halves":
        return LambdaLR(optimizer, lambda count: 0.5**count)
    if case.scheduler == "steps":
        return StepLR(optimizer, 2, 0.5)
    if case.scheduler == "plateau":
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    options = {"pct_start": 0.5, "anneal_strategy": "linear", "cycle_momentum": False}
    return OneCycleLR(optimizer, RATE, case.cycle_steps, div_factor=10, final_div_factor=10, **options)  # type: ignore

"""The legs of `longhaul.py`, each in a process of its own: it trains, and measures at twelve points what has grown.

    python benchmarks/studies/longhaul_legs.py LEG LENGTH FOLDER CPUS      # longhaul.py calls it so

A leg is a function of its length (epochs, steps, saves, ...) and a folder. Whatever the run writes goes into `run` in
that folder, and the points into `points/<process>.jsonl`. At its end a leg checks that the run did what was asked for.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from instep import Accelerator, Callback, Trainer, TrainModule, debug_launcher
from instep.accelerator import ProjectConfiguration
from instep.callbacks import LearningRateMonitor, ModelCheckpoint
from instep.checkpoint import KeepNewest
from instep.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger

POINTS = 12
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
LOGS = ("metrics.csv", "metrics.jsonl", "events.out.tfevents")
BATCHES = 4  # of an epoch in the leg of epochs
RANKS = 2
STEPS_OF_A_LIFE = 200  # from one kill to the next one
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


# ---- what is measured


class Meter:
    """Writes a point whenever another twelfth of the leg is done.

    Args:
        folder: of the leg.
        length: of the leg, in its own unit.
        name: of the process, where a leg has several.
        before: called before each point: loggers write what waits.
    """

    def __init__(
        self, folder: Path, length: int, name: str = "main", before: Callable[[], object] = lambda: None
    ) -> None:
        self._run, self._file = folder / "run", folder / "points" / f"{name}.jsonl"
        self._file.parent.mkdir(exist_ok=True)
        self._marks = [length * (number + 1) / POINTS for number in range(POINTS)]
        self._taken = 0
        self.before = before
        self._since, self._done = time.process_time(), 0.0

    def tick(self, done: float) -> None:
        """Measure if the next mark is reached.

        Args:
            done: how much of the leg.
        """
        if self.is_due(done):
            self.before()
            cpu_s = time.process_time() - self._since
            self.write(done, cpu_s, figures(self._run))
            self._since = time.process_time()

    def is_due(self, done: float) -> bool:
        """Return True if the next mark is reached."""
        return self._taken < POINTS and done >= self._marks[self._taken]

    def write(self, done: float, cpu_s: float, measured: dict[str, float]) -> None:
        """Write a point.

        Args:
            done: how much of the leg.
            cpu_s: processor seconds since the point before.
            measured: the other figures.
        """
        point = {"done": done, "cpu_ms": cpu_s * 1e3 / (done - self._done), **measured}
        with self._file.open("a") as file:
            file.write(json.dumps(point) + "\n")
        self._taken, self._done = self._taken + 1, done


def figures(run: Path) -> dict[str, float]:
    """What this process and the run's folder hold now."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "by_hand_ms": by_hand_ms(),
        "resident_mb": resident / 1e6,
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # the last one is the listing's own
        "threads": len(os.listdir("/proc/self/task")),
        **on_disk(run),
    }


def by_hand_ms(steps: int = 300) -> float:
    """Processor milliseconds of some handwritten steps: how fast the machine is at this time."""
    layer, batch = nn.Linear(4, 1), torch.ones(2, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    start = time.process_time()
    for _ in range(steps):
        optimizer.zero_grad()
        layer(batch).mean().backward()
        optimizer.step()
    return (time.process_time() - start) * 1e3


def on_disk(run: Path) -> dict[str, float]:
    """Bytes below a folder: all, logs, the newest checkpoint and status.json; and what is there but logs."""
    sizes = dict(sizes_below(run))
    logs = sum(size for path, (size, _) in sizes.items() if path.name.startswith(LOGS))
    every = sum(size for size, _ in sizes.values())
    others = sum(not path.name.startswith(LOGS) for path in sizes)
    found: dict[str, float] = {
        "disk_bytes": every,
        "log_bytes": logs,
        "other_bytes": every - logs,
        "other_files": others,
    }
    newest: dict[Path, int] = {}
    for path, (_, changed_ns) in sizes.items():
        if path.parent.parent.name in ("checkpoints", "newest") and not path.parent.name.startswith("."):
            newest[path.parent] = max(newest.get(path.parent, 0), changed_ns)
    if newest:
        # The one before the last: the last one may still be on its way.
        last = sorted(newest, key=lambda folder: newest[folder])[-2:][0]
        found["checkpoint_bytes"] = sum(size for path, (size, _) in sizes.items() if path.parent == last)
    statuses = [(changed_ns, size) for path, (size, changed_ns) in sizes.items() if path.name == "status.json"]
    if statuses:
        found["status_bytes"] = max(statuses)[1]
    return found


def sizes_below(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Files with their bytes and times of change; one that is deleted meanwhile is left out."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            yield path, (found.st_size, found.st_mtime_ns)


# ---- what is trained


class Samples(Dataset[Tensor]):
    """As many samples as asked for, out of the same few: long data that takes no memory."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index % 64]


class Regression(TrainModule):
    """A linear regression that logs step values, epoch values and a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def loss(self, batch: Tensor) -> Tensor:
        return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1000)]


class Measure(Callback):
    """Lets a meter look after each step.

    Args:
        meter: the meter.
        steps: optimizer steps in the unit of the leg.
    """

    def __init__(self, meter: Meter, steps: int = 1) -> None:
        self._meter, self._steps = meter, steps

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._meter.before = lambda: [logger.save() for logger in trainer.loggers]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._meter.tick(trainer.global_step / self._steps)


def loaders(batches: int, validation: int = 2) -> list[Any]:
    """Training and validation data."""
    return [
        DataLoader(Samples(2 * number), batch_size=2, shuffle=number == batches) for number in (batches, validation)
    ]


def rows_of(run: Path, name: str) -> int:
    """Rows of the run's only table that have a value of this name."""
    (path,) = run.rglob("metrics.csv")
    header, *rows = path.read_text().splitlines()
    column = header.split(",").index(name)
    return sum(row.split(",")[column] != "" for row in rows)


def are(found: Any, expected: Any, what: str) -> None:
    """Raise unless the two are equal."""
    if found != expected:
        raise AssertionError(f"{what}: {found}, where {expected} were asked for")


# ---- legs


def epochs(length: int, folder: Path) -> None:
    """One run of many epochs of 4 batches, each with a validation, a save, and rows of two loggers."""
    run, meter = folder / "run", Meter(folder, length)
    saves = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    trainer = Trainer(
        **QUIET,
        max_epochs=length,
        default_root_dir=run,
        log_every_n_steps=2,
        logger=[CSVLogger(run), TensorBoardLogger(run)],
        callbacks=[Measure(meter, BATCHES), saves, LearningRateMonitor()],
    )
    trainer.fit(Regression(), *loaders(BATCHES))
    are((trainer.current_epoch, trainer.global_step), (length, length * BATCHES), "epochs and steps")
    are(rows_of(run, "val_loss"), length, "rows of val_loss")
    are(rows_of(run, "train_loss_step"), length * BATCHES // 2, "rows of train_loss_step")


def steps(length: int, folder: Path) -> None:
    """One epoch of many steps, with a row every 50 steps, a validation and a save 100 times."""
    run, meter = folder / "run", Meter(folder, length)
    every = length // 100
    trainer = Trainer(
        **QUIET,
        max_epochs=1,
        default_root_dir=run,
        val_check_interval=every,
        logger=[CSVLogger(run), TensorBoardLogger(run)],
        callbacks=[Measure(meter), ModelCheckpoint(every_n_train_steps=every, keep=KeepNewest(2))],
    )
    trainer.fit(Regression(), *loaders(length))
    are(trainer.global_step, length, "steps")
    are((rows_of(run, "train_loss_step"), rows_of(run, "val_loss")), (length // 50, 100), "rows")


def saves(length: int, folder: Path) -> None:
    """One run that saves after each step, in turns to keep the newest, and in the background to keep the best."""
    run, meter = folder / "run", Meter(folder, length)
    newest = ModelCheckpoint(run / "newest", every_n_train_steps=2, keep=KeepNewest(2))
    best = ModelCheckpoint(
        run / "best" / "checkpoints",
        monitor="train_loss_step",
        save_top_k=3,
        save_last=True,
        every_n_train_steps=2,
        background=True,
    )
    trainer = Trainer(
        **QUIET,
        max_epochs=1,
        default_root_dir=run,
        log_every_n_steps=1,
        logger=CSVLogger(run),
        callbacks=[Measure(meter), newest, best],
    )
    trainer.fit(Regression(), loaders(length)[0])
    are(trainer.global_step, length, "steps")
    kept = [
        len([path for path in one.iterdir() if path.is_dir()]) for one in (run / "newest", run / "best" / "checkpoints")
    ]
    if kept[0] != 2 or kept[1] not in (3, 4):  # the last may be one of the three best
        raise AssertionError(f"{kept} checkpoints are kept, where 2, and 3 or 4 were asked for")


def kills(length: int, folder: Path) -> None:
    """One run that is killed again and again, and started again with `ckpt_path="auto"`."""
    run, meter, draw = folder / "run", Meter(folder, length), random.Random(1)
    cpu_s = 0.0
    load_all()
    for life in range(1, length + 1):
        kill_at = life * STEPS_OF_A_LIFE + draw.randrange(STEPS_OF_A_LIFE // 2)
        status, spent_s = in_a_fork(lambda at=kill_at: killed_life(run, folder, at, length))
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            raise AssertionError(f"life {life} ended with status {os.waitstatus_to_exitcode(status)} before its kill")
        cpu_s += spent_s
        if meter.is_due(life):
            meter.write(kill_at / STEPS_OF_A_LIFE, cpu_s, json.loads((folder / "figures.json").read_text()))
            cpu_s = 0.0
    status, _ = in_a_fork(lambda: killed_life(run, folder, 10**9, length))
    are(status, 0, "status of the last life")
    are(rows_of(run, "train_loss_step"), (length + 1) * STEPS_OF_A_LIFE, "rows after the kills")


class Killer(Callback):
    """Kills its process after a step, and measures before."""

    def __init__(self, at: int, folder: Path) -> None:
        self._at, self._folder = at, folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._at:
            (self._folder / "figures.json").write_text(json.dumps(figures(self._folder / "run")))
            os.kill(os.getpid(), signal.SIGKILL)


def killed_life(run: Path, folder: Path, kill_at: int, length: int) -> None:
    """One start of the run of `kills`."""
    trainer = Trainer(
        **QUIET,
        max_epochs=length + 1,
        default_root_dir=run,
        log_every_n_steps=1,
        logger=[CSVLogger(run, "logs", "one"), TensorBoardLogger(run, "logs", "one")],
        callbacks=[
            Killer(kill_at, folder),
            ModelCheckpoint(every_n_train_steps=20, monitor="train_loss_step", save_top_k=2),
        ],
    )
    trainer.fit(Regression(), *loaders(STEPS_OF_A_LIFE), ckpt_path="auto")
    are(trainer.global_step, (length + 1) * STEPS_OF_A_LIFE, "steps")


def rows(length: int, folder: Path) -> None:
    """Rows that go straight to the three loggers that write files."""
    loggers = [CSVLogger(), JSONLinesLogger(), TensorBoardLogger()]
    for logger in loggers:
        logger.delivery.start(folder / "run" / type(logger).__name__)
    meter = Meter(folder, length, before=lambda: [logger.save() for logger in loggers])
    for step in range(1, length + 1):
        for logger in loggers:
            logger.log_metrics({"loss": 1.0 / step, "rate": 0.5}, step=step)
        meter.tick(step)
    for logger in loggers:
        logger.finalize()
    for name, head in (("metrics.csv", 1), ("metrics.jsonl", 0)):
        (path,) = (folder / "run").rglob(name)
        with path.open() as file:
            are(sum(1 for _ in file) - head, length, f"rows of {name}")


def fits(length: int, folder: Path) -> None:
    """Fits of one process, each of a new Trainer with a logger, validation and checkpoint; its folder is deleted."""
    meter = Meter(folder, length)
    for number in range(1, length + 1):
        run = folder / "run" / "one"
        trainer = Trainer(
            **QUIET,
            max_epochs=2,
            default_root_dir=run,
            log_every_n_steps=1,
            logger=CSVLogger(run),
            callbacks=[ModelCheckpoint(monitor="val_loss"), LearningRateMonitor()],
        )
        trainer.fit(Regression(), *loaders(2))
        are((trainer.global_step, rows_of(run, "val_loss")), (4, 2), "steps and rows of val_loss")
        if meter.is_due(number):
            meter.tick(number)
        shutil.rmtree(run)


def ranks(length: int, folder: Path) -> None:
    """One epoch of many steps on 2 ranks (DDP, gloo), with a row every 50 steps, a validation and a save 20 times."""
    are(debug_launcher(one_rank, (length, folder), num_processes=RANKS), [length] * RANKS, "steps of the ranks")
    are(rows_of(folder / "run", "train_loss_step"), length // 50, "rows")


def one_rank(length: int, folder: Path) -> int:
    """One of the two ranks."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    run, meter = folder / "run", Meter(folder, length, f"rank {rank}")
    every = length // 20
    trainer = Trainer(
        **{**QUIET, "devices": RANKS},
        strategy="ddp",
        max_epochs=1,
        default_root_dir=run,
        val_check_interval=every,
        logger=CSVLogger(run),
        callbacks=[Measure(meter), ModelCheckpoint(every_n_train_steps=every, keep=KeepNewest(2))],
    )
    trainer.fit(Regression(), *loaders(length * RANKS))
    return trainer.global_step


def accelerator(length: int, folder: Path) -> None:
    """A handwritten loop with the Accelerator: accumulation, clipping, a schedule, gathered values, rows and states."""
    run, meter = folder / "run", Meter(folder, length)
    project = ProjectConfiguration(run, automatic_checkpoint_naming=True, total_limit=2)
    ours = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=["csv", "tensorboard"], project_config=project)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    per_epoch = length // 100
    net, optimizer, loader, schedule = ours.prepare(net, optimizer, loaders(per_epoch)[0], schedule)
    ours.init_trackers("longhaul")
    meter.before = lambda: [ours.get_tracker(name).save() for name in ("csv", "tensorboard")]
    done = 0
    for _ in range(100):
        for batch in loader:
            with ours.accumulate(net):
                errors = (net(batch) - batch.sum(1, keepdim=True)).square()
                ours.backward(errors.mean())
                if ours.sync_gradients:
                    ours.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            done += 1
            if done % 20 == 0:
                ours.log({"loss": ours.gather_for_metrics(errors.detach()).mean().item()}, step=done)
            meter.tick(done)
        ours.save_state()
    ours.end_training()
    are(done, length, "steps")
    are(rows_of(run, "loss"), length // 20, "rows of loss")
    are(len([path for path in (run / "checkpoints").iterdir() if path.is_dir()]), 2, "states that are kept")


def runs(length: int, folder: Path) -> None:
    """Runs of one script in one folder, each a process of its own, with the Trainer's own loggers and checkpoints."""
    run, meter, cpu_s = folder / "run", Meter(folder, length), 0.0
    load_all()
    for number in range(1, length + 1):
        due = meter.is_due(number)
        status, spent_s = in_a_fork(lambda due=due: one_run(run, folder, due))
        are(status, 0, f"status of run {number}")
        cpu_s += spent_s
        if due:
            meter.write(number, cpu_s, json.loads((folder / "figures.json").read_text()))
            cpu_s = 0.0
    are(len(list(run.rglob("status.json"))), length, "run folders")


def one_run(run: Path, folder: Path, measure: bool) -> None:
    """One of the runs."""
    trainer = Trainer(**QUIET, max_epochs=2, default_root_dir=run, log_every_n_steps=1)
    trainer.fit(Regression(), *loaders(4))
    if measure:
        (folder / "figures.json").write_text(json.dumps(figures(run)))


def in_a_fork(work: Callable[[], object]) -> tuple[int, float]:
    """Run something in a process of its own, which has imported everything.

    Returns:
        Its wait status, and its processor seconds.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            end_with_parent()
            work()
            status = 0
        except BaseException:  # noqa: BLE001  the status says it
            import traceback  # late: only where something is wrong

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status, usage = os.wait4(child, 0)
    return status, usage.ru_utime + usage.ru_stime


def load_all() -> None:
    """Import what a first fit loads, but compute nothing: torch does not work on in a fork after a backward."""
    import tensorboard.plugins.hparams.api_pb2  # late: only the legs that fork need these two
    import tensorboard.summary.writer.record_writer  # noqa: F401

    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.0)


def end_with_parent() -> None:
    """No process stays where the one that started it is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


LEGS: dict[str, Callable[[int, Path], None]] = {
    leg.__name__: leg for leg in (ranks, steps, saves, rows, fits, accelerator, epochs, runs, kills)
}


def main() -> None:
    """Run one leg."""
    name, length, folder, cpus = sys.argv[1:]
    end_with_parent()
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    torch.set_num_threads(1)
    (Path(folder) / "run").mkdir()
    LEGS[name](int(length), Path(folder))


if __name__ == "__main__":
    main()

"""Run the checks of `instep test` in each rank, one after another, and measure times and some bandwidths.

Every rank runs every check; the ranks exchange their errors before the next check begins.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import distributed
from instep.callbacks import Callback
from instep.cli import output
from instep.distributed import Triggers
from instep.errors import RemoteError
from instep.state import PartialState, read_environment
from instep.trainer import Trainer, TrainModule

_LARGE_BYTES = {"cpu": 4 << 20}  # number of bytes per rank in the checks of bandwidth
_LARGE_ELSEWHERE_BYTES = 64 << 20
_REPEATS = 5
_TOLERANCE = {"32-true": 1e-5, "64-true": 1e-5}  # relative tolerance of an epoch's mean loss
_TOLERANCE_OF_16_BITS = 5e-2

_FEATURES, _HIDDEN = 64, 16384  # widths for 1,081,345 parameters: enough to measure a checkpoint's bandwidth
BATCHES, _PER_RANK, EPOCHS = 4, 8, 3

QUIET: dict[str, Any] = {
    "max_epochs": EPOCHS,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(TrainModule):
    """Network with one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(_FEATURES, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _optimizer(self.net)


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)


def _data(world: int) -> TensorDataset:
    x = torch.randn(BATCHES * _PER_RANK * world, _FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.mean(dim=1, keepdim=True))


class Watch(Callback):
    """Callback that records the mean loss of each epoch, and saves a checkpoint after the last epoch but one."""

    def __init__(self, save_to: Path | None = None) -> None:
        self.losses: list[float] = []
        self.saved: Path | None = None
        self.save_s = 0.0
        self.first_step = 0
        self._save_to = save_to

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.first_step = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        if self._save_to is not None and trainer.current_epoch == EPOCHS - 2:
            started = time.perf_counter()
            self.saved = trainer.save_checkpoint(self._save_to)
            self.save_s = time.perf_counter() - started


def fit(state: PartialState, root: Path, watch: Watch, ckpt_path: Path | None = None) -> None:
    """Train with the settings of this process's environment, from a checkpoint if one is given; all ranks call this."""
    settings = {**QUIET, "default_root_dir": root, "callbacks": [watch]}
    world = state.num_processes
    trainer = Trainer(**settings, num_nodes=state.num_nodes, global_batch_size=_PER_RANK * world)
    with contextlib.redirect_stdout(io.StringIO()):  # hides what each fit prints
        trainer.fit(Net(), DataLoader(_data(world), _PER_RANK * world), ckpt_path=ckpt_path)


def losses_of_one_process(world: int) -> list[float]:
    """Compute the mean loss of each epoch by a handwritten loop on the CPU, with the whole global batch."""
    net = Net().net
    optimizer = _optimizer(net)
    losses = []
    for _ in range(EPOCHS):
        of_epoch = []
        for x, y in DataLoader(_data(world), _PER_RANK * world):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            of_epoch.append(float(loss.detach()))
        losses.append(sum(of_epoch) / len(of_epoch))
    return losses


@dataclass(frozen=True)
class Result:
    """Outcome of a check.

    Args:
        check: name of the check.
        seconds: time of one call, or of the whole check if it runs only once.
        bytes_per_s: bandwidth at which each rank sends or writes; None if it is not measured, since the check moves too
            few bytes or there is only one process.
        problems: what went wrong, by rank.
        note: further text about the result, for the table.
    """

    check: str
    seconds: float
    bytes_per_s: float | None = None
    problems: dict[int, str] = field(default_factory=dict)
    note: str = ""


def run(timeout_s: float, as_json: bool) -> int:
    """Run all checks in this rank; rank 0 prints them.

    Args:
        timeout_s: seconds that a collective may take.
        as_json: whether to print JSON instead of a table.

    Returns:
        The exit code: 1 if a check failed, else 0.
    """
    asked = Trainer(**QUIET, num_nodes=read_environment().num_nodes)  # this Trainer has the settings of the environment
    state = PartialState(timeout=timedelta(seconds=timeout_s))
    results = list(_all_checks(state, asked))
    bad = [result for result in results if result.problems]
    if state.is_main_process:
        _print(state, asked, results, as_json)
    return 1 if bad else 0


def _all_checks(state: PartialState, asked: Trainer) -> Iterator[Result]:
    devices = {torch.device("cpu"), state.device}
    for device in sorted(devices, key=str):
        yield from _collectives(state, device)
    yield _checked(state, "errors reach every rank", lambda: _errors(state))
    yield _checked(state, "triggers", lambda: _triggers(state))
    yield from _training(state, asked)


def _checked(
    state: PartialState, name: str, body: Callable[[], str], size_bytes: float = 0, calls: int = 1, note: str = ""
) -> Result:
    """Run one check on this rank, and exchange errors with the other ranks.

    Args:
        state: state of this process.
        name: name of the check.
        body: function that is called `calls` times; returns what is wrong, or "" if nothing is.
        size_bytes: number of bytes that a rank sends in one call; 0: no bandwidth is computed.
        calls: number of calls; the first of several calls is a warm-up.
        note: further text for the result.
    """
    seconds, problem = [], ""
    try:
        for _ in range(calls):
            started = time.perf_counter()
            problem = body()
            seconds.append(time.perf_counter() - started)
    except Exception as error:  # noqa: BLE001 (it is the result)
        problem = f"{type(error).__name__}: {error}"
    took = median(seconds[1:] or seconds or [0.0])
    by_rank = distributed.gather_object((problem, took))
    problems = {rank: text for rank, (text, _) in enumerate(by_rank) if text}
    slowest = max(took for _, took in by_rank)
    bandwidth = size_bytes / slowest if size_bytes and slowest and state.num_processes > 1 else None
    return Result(name, slowest, bandwidth, problems, note)


# ---- checks of collectives


def _collectives(state: PartialState, device: torch.device) -> Iterator[Result]:
    rank, world = state.process_index, state.num_processes
    size = _LARGE_BYTES.get(device.type, _LARGE_ELSEWHERE_BYTES)
    large = torch.full((size // 4,), float(rank + 1), device=device)
    total, ranks = world * (world + 1) / 2, torch.arange(1.0, world + 1)
    mine = torch.tensor([rank + 1.0], device=device)

    def expect(value: Tensor, expected: Any) -> str:
        wanted = torch.as_tensor(expected, dtype=value.dtype).expand(value.shape)
        return "" if torch.equal(value.cpu(), wanted) else f"got {value.flatten()[:8].tolist()}, expected {expected}"

    def all_reduce() -> str:
        return expect(distributed.all_reduce_(large.clone()), total)

    def gather() -> str:
        found = distributed.gather(large).view(world, -1)
        return expect(found[:, 0], ranks) or expect(found[:, -1], ranks)

    def broadcast() -> str:
        return expect(distributed.broadcast(large, from_process=world - 1), world)

    def reduce(op: str, expected: float) -> Callable[[], str]:
        return lambda: expect(distributed.reduce({"a": mine}, op)["a"], expected)

    def ragged() -> str:
        expected = torch.cat([ranks[i].repeat(i + 1) for i in range(world)])
        return expect(distributed.gather_ragged(mine.repeat(rank + 1)), expected)

    def pad() -> str:
        filled = [rank + 1.0] * (rank + 1) + [0.0] * (world - rank - 1)
        return expect(distributed.pad_across_processes(mine.repeat(rank + 1)), filled)

    def objects() -> str:
        gathered = distributed.gather_object({"rank": rank})
        [first] = distributed.broadcast_object_list([f"rank {rank}"])
        fine = gathered == [{"rank": i} for i in range(world)] and first == "rank 0"
        return "" if fine else f"got {gathered} and {first!r}"

    def wait() -> str:
        distributed.wait_for_everyone()
        return ""

    kind = f" ({device.type})"
    share = (world - 1) / world  # the best all_reduce sends this share of the data twice over each rank's connection
    yield _checked(state, f"all_reduce{kind}", all_reduce, 2 * share * size, 1 + _REPEATS)
    yield _checked(state, f"gather{kind}", gather, (world - 1) * size, 1 + _REPEATS)
    yield _checked(state, f"broadcast{kind}", broadcast, size, 1 + _REPEATS)
    for op, expected in (("sum", total), ("mean", total / world), ("min", 1.0), ("max", world)):
        yield _checked(state, f"reduce, {op}{kind}", reduce(op, expected), calls=1 + _REPEATS)
    yield _checked(state, f"gather_ragged{kind}", ragged, calls=1 + _REPEATS)
    yield _checked(state, f"pad_across_processes{kind}", pad, calls=1 + _REPEATS)
    if device.type == "cpu":
        yield _checked(state, "objects", objects, calls=1 + _REPEATS)
        yield _checked(state, "wait_for_everyone", wait, calls=1 + _REPEATS)


def _errors(state: PartialState) -> str:
    last = state.num_processes - 1
    mine = ValueError("on purpose") if state.process_index == last else None
    try:
        distributed.raise_together(mine, "instep test")
    except ValueError:
        return "" if mine is not None else "rank's own error appeared elsewhere"
    except RemoteError as error:
        return "" if error.rank == last else f"rank {error.rank} was blamed for rank {last}'s error"
    return f"rank {last}'s error did not arrive"


def _triggers(state: PartialState) -> str:
    """Check that a trigger, set on the last rank just before step 3, reaches all ranks at step 4, and only once."""
    triggers = Triggers(every=1)
    setter, seen = state.num_processes - 1, {}
    for step in range(1, 7):
        if step == 3 and state.process_index == setter:
            triggers.set("instep-test", "a check")
        for trigger in triggers.tick(step):
            seen[step] = (trigger.name, trigger.rank)
    triggers.sync()
    expected = {4: ("instep-test", setter)}
    return "" if seen == expected else f"seen at {seen}, expected {expected}"


# ---- checks of training


def _training(state: PartialState, asked: Trainer) -> Iterator[Result]:
    """Train and save, compare the losses with a handwritten loop, then resume from the checkpoint."""
    tolerance = _TOLERANCE.get(asked.settings.precision, _TOLERANCE_OF_16_BITS)
    with _folder(state) as root:
        first, second = Watch(root / "step"), Watch()

        def train() -> str:
            fit(state, root, first)
            expected = losses_of_one_process(state.num_processes)
            off = max(abs(got / want - 1) for got, want in zip(first.losses, expected, strict=True))
            return "" if off <= tolerance else f"losses {first.losses}, one process has {expected}: off by {off:.1e}"

        def resume() -> str:
            fit(state, root, second, first.saved)
            last = first.losses[-1:]
            found = second.losses[-1:]  # only the last loss, since a resume records the loss of the epoch before again
            if second.first_step != BATCHES * (EPOCHS - 1):
                return f"it went on from step {second.first_step}"
            return "" if found == last else f"loss {found} after the checkpoint, {last} without it"

        result = _checked(state, "training as one process", train, note=f"losses within {tolerance:g}")
        yield result
        if result.problems:
            return
        assert first.saved is not None
        saved = sum(path.stat().st_size for path in first.saved.rglob("*") if path.is_file())
        yield Result("checkpoint, save", first.save_s, saved / first.save_s, note=output.size(saved))
        yield _checked(state, "checkpoint, resume", resume, note="bit-identical")


@contextlib.contextmanager
def _folder(state: PartialState) -> Iterator[Path]:
    """Make a folder that all ranks see: a temporary one, which with several nodes is in the shared current folder."""
    parent = None if state.num_nodes == 1 else os.getcwd()
    with contextlib.ExitStack() as stack:
        if state.is_main_process:
            made = tempfile.TemporaryDirectory(prefix="instep-test-", dir=parent, ignore_cleanup_errors=True)
            path = stack.enter_context(made)
        else:
            path = ""
        yield Path(distributed.broadcast_object(path))
        state.wait_for_everyone()


# ---- output of the results


def _print(state: PartialState, asked: Trainer, results: list[Result], as_json: bool) -> None:
    setup = {
        "processes": state.num_processes,
        "nodes": state.num_nodes,
        "device": state.device.type,
        "backend": state.backend,
        "strategy": asked.strategy.name,
        "precision": asked.settings.precision,
    }
    if as_json:
        output.say_json({**setup, "ok": not any(r.problems for r in results), "checks": [asdict(r) for r in results]})
        return
    output.say(", ".join(f"{name} {value}" for name, value in setup.items() if value is not None))
    rows = [
        (
            result.check,
            "FAILED" if result.problems else "ok",
            f"{result.seconds * 1e3:.1f} ms",
            None if result.bytes_per_s is None else f"{output.size(result.bytes_per_s)}/s",
            result.note,
        )
        for result in results
    ]
    output.table(("check", "", "time", "bandwidth", "note"), rows, right=("time", "bandwidth"))
    for result in results:
        for rank, problem in result.problems.items():
            output.say(f"{result.check}, rank {rank}: {problem}")
    failed = sum(bool(result.problems) for result in results)
    output.say(f"{failed} of {len(results)} checks failed" if failed else "all is well")

"""Faults on a device: what a run leaves when memory, the device, a rank or the process fails, and how it goes on.

Each row starts programs, the `job_...` functions here: fresh interpreters on a device, forks in a rehearsal. A job
writes what it saw into a JSON file; the row looks at that, at the exit code and at what was printed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from row import Answer, Place
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from instep import Trainer, TrainModule
from instep.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from instep.distributed.nested import iter_leaves
from instep.errors import EXIT_HUNG, EXIT_PREEMPTED, NonFiniteError
from instep.utils.seed import rng_state

BATCHES, FAULT, CAP = 12, 7, 4 * 2**30  # batches an epoch, of two; the step of a fault, in mid-epoch; bytes
SOON_S = 20.0  # for the end of a run after its fault
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "cuda_graphs": {"cuda_graphs": True},
}


# ---- rows


def resume_bits(place: Place) -> Answer:
    """Runs with dropout that end by an error in mid-epoch, and go on in another process."""
    answer = Answer()
    if place.rehearses:
        place.stand_in("CUDA graphs: the step runs without one")
    for deterministic in (True, False):
        names = list(VARIANTS) if not place.rehearses else ["plain", "cuda_graphs"] if deterministic else ["bf16-mixed"]
        for resumes in (False, True):
            done = Program(place, "job_bits", deterministic, names, resumes).wait(60)
            answer.check(f"its programs end well, deterministic={deterministic}", done.code == 0, done)
        for name in names:
            first, second, resumed = (
                read(place, f"bits-{deterministic}-{name}-{part}") for part in ("first", "second", "resumed")
            )
            what = f"{name}, {'' if deterministic else 'not '}deterministic"
            if not (first and second and resumed):
                answer.check(f"{what}: all three runs end", False)
                continue
            repeats, same = first["digest"] == second["digest"], resumed["digest"] == first["digest"]
            answer.figures[what] = {"two runs agree": repeats, "the resumed one agrees": same, "from": resumed["from"]}
            if repeats or deterministic:  # Where torch itself does not repeat its bits, no resume can.
                answer.check(f"{what}: resumed bit for bit in mid-epoch", repeats and same, answer.figures[what])
    return answer


def out_of_memory(place: Place) -> Answer:
    """A batch that is far too big, and the search for one that fits."""
    answer = Answer()
    if place.rehearses:
        place.stand_in("a raised torch.OutOfMemoryError")
        place.stand_in("0 for the memory that is reserved")
    broke = Program(place, "job_memory", True).wait(60)
    answer.check("the run ends by its error", broke.code == 1 and "OutOfMemoryError" in broke.text, broke)
    answer.check("it says how to go on", "Saved " in broke.text and "ckpt_path='auto'" in broke.text, broke)
    answer.check("its status says failed", failed(place, "memory"), statuses(place, "memory"))
    goes_on(place, answer, "memory", Program(place, "job_memory", False).wait(60), FAULT - 1)
    searched = Program(place, "job_finder").wait(90)
    seen = read(place, "finder")
    answer.figures["batch-size finder"] = seen
    answer.check("the finder ends well", searched.code == 0, searched)
    answer.check("it found a size between the first and all", 4 <= seen.get("size", 0) < 4096, seen)
    answer.check("a run with that size fits", seen.get("steps") == 3, seen)
    left, cap = seen.get("reserved after the search", CAP), seen.get("cap", 1)
    answer.check("the memory was given back", left < cap / 4, f"{left} of {cap} bytes")
    return answer


def illegal_access(place: Place) -> Answer:
    """An index out of range, and a kernel that writes anywhere: no later call of the device works."""
    answer = Answer()
    if place.rehearses:
        place.stand_in("an IndexError for a device-side assert")
        place.stand_in("a raised torch.AcceleratorError, and a synchronize that raises, for an illegal access")
    for kind, background in (("assert", True), ("wild", False)):
        name = f"access-{kind}"
        broke = Program(place, "job_access", kind, background, True).wait(90)
        if "no such kernel: " in broke.text:
            answer.figures[kind] = f"left out: {broke.text.partition('no such kernel: ')[2].splitlines()[0]}"
            continue
        faults = re.findall(r"fault at (\d+\.\d+)", broke.text)  # of two the first one is before a kernel is built
        took = round(broke.ended - float(faults[-1]), 1) if faults else None
        answer.figures[kind] = {"exit code": broke.code, "s from the fault to the end": took, "error": broke.error}
        answer.check(f"{kind}: the run ends by its error", broke.code == 1, broke)
        answer.check(f"{kind}: it ends soon", took is not None and took < SOON_S, took)
        answer.check(f"{kind}: one error is printed, none that hides it", broke.text.count("Traceback (") == 1, broke)
        answer.check(f"{kind}: its status says failed", failed(place, name), statuses(place, name))
        if not (place.rehearses and kind == "assert"):
            told = "CUDA_LAUNCH_BLOCKING=1 to see it" in broke.text and "The last checkpoint is" in broke.text
            answer.check(f"{kind}: it says what to do", told, broke)
        goes_on(place, answer, name, Program(place, "job_access", kind, background, False).wait(60), FAULT - 3)
    blocking = Program(place, "job_access", "assert", False, True, env={"CUDA_LAUNCH_BLOCKING": "1"}).wait(90)
    named = "look_up" in blocking.text.rpartition("Traceback (")[2]
    answer.check("with CUDA_LAUNCH_BLOCKING=1 the operation at fault is named", named, blocking)
    return answer


def sigterm_in_replay(place: Place) -> Answer:
    """SIGTERM while the device replays a CUDA graph."""
    answer = Answer()
    if place.rehearses:
        place.stand_in("CUDA graphs: the step runs without one")
    stopped = Program(place, "job_graphs", True).wait(60)
    seen = read(place, "graphs-signal")
    answer.figures["at the signal"] = seen
    answer.check("the step was replayed", place.rehearses or seen.get("replayed") is True, seen)
    answer.check("the run ends as one that can be resumed", stopped.code == EXIT_PREEMPTED, stopped)
    answer.check("it says so", "Stopped by SIGTERM" in stopped.text, stopped)
    answer.check("its status says preempted", "preempted" in statuses(place, "graphs"), statuses(place, "graphs"))
    goes_on(place, answer, "graphs", Program(place, "job_graphs", False).wait(60), FAULT)
    return answer


def killed_rank(place: Place) -> Answer:
    """A rank that is killed: the other one ends by itself, without an agent that would end it."""
    answer = Answer()
    if place.rehearses:
        place.stand_in("gloo for NCCL, which a CPU does not have")
    else:
        answer.figures["not seen"] = (
            "a rank killed in an NCCL collective: NCCL takes one rank a device, and there is one"
        )
    for backend, when in (("gloo", "step"), ("nccl", "start")) if place.rehearses else WAYS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env["GLOO_SOCKET_IFNAME"] = "lo"
        ranks = [
            Program(place, "job_rank", backend, when, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        others = ranks[1].wait(90)
        left = ranks[0].wait(60)
        what = f"{backend}, {'both live' if when == 'never' else f'killed in its {when}'}"
        answer.figures[what] = {
            "exit codes": [left.code, others.code],
            "s that the other rank took": round(left.ended - others.ended, 1),
            "error": left.error,
        }
        answer.check(f"{what}: the other rank ends by itself", left.code in (1, EXIT_HUNG), left)
        if when != "never":
            answer.check(f"{what}: it was killed", others.code == -signal.SIGKILL, others)
    return answer


WAYS = (("gloo", "step"), ("nccl", "start"), ("nccl", "never"))  # NCCL refuses a second rank on a device, when it meets


def non_finite(place: Place) -> Answer:
    """Losses that are not finite, told by a flag that stays on the device."""
    answer = Answer()
    trainer, module = trainer_of(place.device, place.folder, nonfinite="skip"), Net(place.device, {3: "inf", 9: "inf"})
    trainer.fit(module, data())
    finite = all(bool(p.isfinite().all()) for p in module.parameters())
    left_out = trainer.position.nonfinite_steps
    answer.figures["steps left out"] = left_out
    answer.check("both were left out, and no weight is spoilt", left_out == 2 and finite, (left_out, finite))
    trainer, found = trainer_of(place.device, place.folder, nonfinite="stop"), "nothing was raised"
    try:
        trainer.fit(Net(place.device, {3: "inf"}), data())
    except NonFiniteError as error:
        found = str(error)
    answer.check("with 'stop' the run ends and the error names the step", "global_step 3" in found, found)
    return answer


# ---- programs


@dataclass
class Ended:
    """How a program ended: `code` is None where it had to be killed, `ended` a time of the clock."""

    code: int | None
    ended: float
    text: str

    @property
    def error(self) -> str:
        """The first line of the error that ended it, or what was reported of a hang."""
        found = re.findall(r"^(?:\[rank\d\]: )?(?:\w+\.)*\w*Error\b.*$|^instep: .*$", self.text, re.MULTILINE)
        return found[-1][:300] if found else ""

    def __str__(self) -> str:
        return f"exit code {self.code}, printed: ... {self.text[-1500:]}"


class Program:
    """A program that runs from here on: a fresh interpreter, or in a rehearsal a fork.

    Args:
        place: of the row.
        name: the function, called with the device, the row's folder and the words.
        words: texts, numbers, or lists of them.
        env: more environment variables.
    """

    def __init__(self, place: Place, name: str, *words: Any, env: dict[str, str] | None = None) -> None:
        arguments = (place.device, str(place.folder), *words)
        self._log = place.folder / f"{name}-{len(list(place.folder.glob('*.log')))}.log"
        self._process: Any
        with self._log.open("wb") as log:
            if place.rehearses:
                context = multiprocessing.get_context("fork")
                self._process = context.Process(target=_forked, args=(name, arguments, env or {}, str(self._log)))
                self._process.start()
                return
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(env or {})}
            words = (sys.executable, "-c", f"import faults; faults.{name}(*{arguments!r})")
            self._process = subprocess.Popen(words, env=env, stdout=log, stderr=log)

    def wait(self, limit_s: float) -> Ended:
        """Wait for its end, and kill it after so many seconds."""
        process, forked = self._process, not isinstance(self._process, subprocess.Popen)
        end = time.monotonic() + limit_s
        code = None
        while code is None and time.monotonic() < end:
            code = process.exitcode if forked else process.poll()
            time.sleep(0.005)
        ended = time.time()
        if code is None:
            process.kill()
        process.join() if forked else process.wait()
        return Ended(code, ended, self._log.read_text(errors="replace"))


def _forked(name: str, arguments: tuple[Any, ...], env: dict[str, str], log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.update(env)
    globals()[name](*arguments)


def job_bits(device: str, folder: str, deterministic: bool, names: list[str], resumes: bool) -> None:
    """Train twice to the end, and once into an error; or go on from that."""
    for name in names:
        for part in ("resumed",) if resumes else ("first", "second", "stopped"):
            root = Path(folder, f"bits-{deterministic}-{name}-{'stopped' if resumes else part}")
            acts = {FAULT: "raise"} if part == "stopped" else {}
            try:
                train(device, root, acts, deterministic=deterministic, **VARIANTS[name])
            except InterruptedError:
                continue
            root.with_name(f"bits-{deterministic}-{name}-{part}.json").write_text(json.dumps(LAST))


def job_memory(device: str, folder: str, breaks: bool) -> None:
    """Run out of memory in mid-step; or go on from that."""
    cap_memory(device)
    run_or_go_on(device, folder, "memory", {FAULT: "memory"} if breaks else {}, breaks, on_exception=True)


def job_finder(device: str, folder: str) -> None:
    """Look for a batch size with little memory, and train with it."""
    from instep.tuner import Tuner

    seen: dict[str, Any] = {"cap": cap_memory(device)}
    module = Greedy(device)
    trainer = trainer_of(device, Path(folder), max_steps=3)
    seen["size"] = Tuner(trainer).scale_batch_size(module, mode="power", init_val=4, steps_per_trial=2)
    if device == "cuda":
        seen["allocated after the search"] = torch.cuda.memory_allocated()
        seen["reserved after the search"] = torch.cuda.memory_reserved()
    else:
        seen["reserved after the search"] = 0
    trainer.fit(module)
    seen["steps"] = trainer.global_step
    Path(folder, "finder.json").write_text(json.dumps(seen))


def job_access(device: str, folder: str, kind: str, background: bool, breaks: bool) -> None:
    """Break the device; or go on from that."""
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "")
    acts = {FAULT: kind} if breaks else {}
    name = f"access-{kind}{blocking}"
    run_or_go_on(device, folder, name, acts, breaks, on_exception=True, every=2, background=background)


def job_graphs(device: str, folder: str, stops: bool) -> None:
    """Get SIGTERM while a graph is replayed; or go on from that."""
    acts = {FAULT: "signal"} if stops else {}
    run_or_go_on(device, folder, "graphs", acts, stops, cuda_graphs=True)


def job_rank(device: str, folder: str, backend: str, when: str) -> None:
    """Be one of two ranks, of which the second kills itself."""
    from instep.state import PartialState

    if backend != "nccl":
        PartialState(cpu=device == "cpu", backend=backend)
    dies = os.environ["RANK"] == "1"
    module = Net(device, {FAULT: "kill"} if dies and when == "step" else {}, dies_at_start=dies and when == "start")
    hang_s = 10.0 if device == "cuda" and when == "step" else 3.0  # the first step loads the device's libraries
    settings: dict[str, Any] = {"devices": 2, "strategy": "ddp", "hang_timeout_s": hang_s}
    trainer_of(device, Path(folder, f"rank-{backend}-{when}"), **settings).fit(module, data())


# ---- what the programs train


class Net(TrainModule):
    """A small net with an embedding and dropout, that does something at some steps.

    Args:
        device: where it trains.
        acts: what it does, by the step that is not done yet, from 1.
        dies_at_start: whether the process kills itself before it meets the others on the device.
    """

    def __init__(self, device: str, acts: dict[int, str], dies_at_start: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.acts, self.dies = device, acts, dies_at_start
        width = 32 if device == "cpu" else 512
        self.embedding = nn.Embedding(64, width)
        layers = [nn.Linear(8 * width, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 64)]
        self.net = nn.Sequential(nn.Flatten(), *layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        act = self.acts.get(self.trainer.global_step + 1, "")
        if act in ACTS:
            print(f"fault at {time.time():.3f}", flush=True)
            batch = ACTS[act](self, batch)
        loss = F.cross_entropy(self.net(look_up(self.embedding, batch[:, :8])), batch[:, 8])
        self.log("loss", loss)
        return loss * float("inf") if act == "inf" else loss

    def configure_optimizers(self) -> Any:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        graphs = self.kind == "cuda" and self.trainer.cuda_graphs
        return torch.optim.AdamW(self.parameters(), 1e-3, capturable=graphs, fused=not graphs)


def look_up(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    """Return the embeddings; a name to find in a traceback."""
    return embedding(ids)


def fill_memory(module: Net, batch: Tensor) -> Tensor:
    """Compute with twice as much until memory runs out."""
    if module.kind == "cpu":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (raised by the rehearsal)")
    held = look_up(module.embedding, batch[:, :8])
    while True:
        held = torch.cat([held, held * 1.5])


def write_anywhere(module: Net, batch: Tensor) -> Tensor:
    """Write to an address that is nobody's."""
    if module.kind == "cpu":

        def fails(_: Any = None) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered (of the rehearsal)")

        torch.cpu.synchronize = fails
        fails()
    try:
        kernel = wild_kernel()
        kernel[(1,)](batch, 0)  # built, and without harm
    except Exception as error:  # noqa: BLE001  said, and the row leaves it out
        print(f"no such kernel: {type(error).__name__}: {error}", flush=True)
        os._exit(3)
    print(f"fault at {time.time():.3f}", flush=True)
    kernel[(1,)](batch, 2**44)
    return batch


def wild_kernel() -> Any:
    """Make a kernel that writes so far behind a tensor, where it is not told 0."""
    global tl
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    @triton.jit
    def kernel(pointer, far):  # pyright: ignore[reportMissingParameterType]
        if far > 0:
            tl.store(pointer + far, 1)

    return kernel


def kill(module: Net, batch: Tensor) -> Tensor:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return batch


ACTS: dict[str, Any] = {
    "memory": fill_memory,
    "assert": lambda module, batch: batch + 1000,
    "wild": write_anywhere,
    "kill": kill,
}


class Greedy(TrainModule):
    """Each sample takes some 12 MiB of the device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.batch_size, self.kind = 4, device
        self.weight = nn.Parameter(torch.ones(2**20 if device == "cuda" else 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.kind == "cpu" and len(batch) > 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (raised by the rehearsal)")
        return (batch[:, None] * self.weight).square().sin().mean()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4096), self.batch_size)  # pyright: ignore[reportArgumentType]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Watch(Callback):
    """Record the losses and where the run began; send SIGTERM after a step, or raise an error before one.

    The error is raised here and not in `training_step`, whose Python code does not run in a replay of its CUDA graph.

    Args:
        signal_at: the step after which SIGTERM is sent; 0 for none.
        raise_at: the step before which the error is raised; 0 for none.
        path: where to write what was seen at the signal.
    """

    def __init__(self, signal_at: int, raise_at: int, path: Path) -> None:
        self.signal_at, self.raise_at, self.path, self.begun = signal_at, raise_at, path, 0
        self.losses: list[Tensor] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.begun = trainer.global_step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 == self.raise_at:
            raise InterruptedError("the fault")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])
        if trainer.global_step == self.signal_at:
            captured = next((guest.captured for guest in trainer._run.guests if hasattr(guest, "captured")), None)
            seen = {"step": self.signal_at, "replayed": None if captured is None else captured.replayed}
            self.path.write_text(json.dumps(seen))
            os.kill(os.getpid(), signal.SIGTERM)


LAST: dict[str, Any] = {}  # what the last run of this process left


def train(
    device: str, root: Path, acts: dict[int, str], on_exception: bool = False, every: int = 3, **settings: Any
) -> None:
    """Train two epochs in a folder, going on with what is there; leave the facts in `LAST`."""
    signal_at, raise_at = (next((step for step, act in acts.items() if act == name), 0) for name in ("signal", "raise"))
    watch = Watch(signal_at, raise_at, root.with_name(f"{root.name}-signal.json"))
    saver = ModelCheckpoint(every_n_train_steps=every, background=settings.pop("background", False))
    callbacks = [watch, saver, *([OnExceptionCheckpoint(root / "failed")] if on_exception else [])]
    module, trainer = Net(device, acts), trainer_of(device, root, callbacks=callbacks, **settings)
    trainer.fit(module, data(), ckpt_path="auto")
    state = {"weights": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict(), "random": rng_state()}
    LAST.clear()
    LAST.update({"from": watch.begun, "digest": digest(state), "losses": torch.stack(watch.losses).tolist()[-3:]})


def run_or_go_on(device: str, folder: str, name: str, acts: dict[int, str], breaks: bool, **settings: Any) -> None:
    """Train into a fault; or go on from it, and compare with a run that had none."""
    root, settings = Path(folder, name), {"deterministic": True, **settings}
    train(device, root, acts, **settings)
    if breaks:
        return
    resumed = dict(LAST)
    train(device, Path(folder, f"{name}-whole"), {}, **settings)
    root.with_name(f"{name}.json").write_text(json.dumps({**resumed, "same": resumed["digest"] == LAST["digest"]}))


def goes_on(place: Place, answer: Answer, name: str, resumed: Ended, least: int) -> None:
    """Check that a run went on from a checkpoint of that step or a later one, to the end without a fault."""
    seen = read(place, name)
    answer.figures[f"{name}: resumed"] = seen
    answer.check(f"{name}: the run goes on", resumed.code == 0 and seen.get("from", 0) >= least, (seen, str(resumed)))
    answer.check(f"{name}: it ends with the bits of a run without the fault", seen.get("same") is True, seen)


def trainer_of(device: str, root: Path, **settings: Any) -> Trainer:
    """Return a Trainer without logger, progress bar and model summary."""
    off = ("logger", "enable_progress_bar", "enable_model_summary")
    given: dict[str, Any] = {"devices": 1, "max_epochs": 2, "log_every_n_steps": 1, **dict.fromkeys(off, False)}
    return Trainer(accelerator=device, default_root_dir=root, **{**given, **settings})


def data() -> DataLoader[Any]:
    """Return the batches: eight ids, and the one to guess."""
    ids = torch.randint(0, 64, (BATCHES * 16, 9), generator=torch.Generator().manual_seed(0))
    return DataLoader(ids, 16, shuffle=True)  # pyright: ignore[reportArgumentType]


def cap_memory(device: str) -> int:
    """Limit this process to `CAP` bytes of the device's memory; return that number."""
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(CAP / torch.cuda.get_device_properties(0).total_memory)
    return CAP


# ---- what is left


def digest(state: Any) -> str:
    """Return a hash of all bits of a nested state."""
    found = hashlib.sha256()
    for name, leaf in iter_leaves(state):
        plain = leaf.detach().cpu().contiguous() if isinstance(leaf, Tensor) else None
        found.update(name.encode())
        found.update(repr(leaf).encode() if plain is None else plain.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def read(place: Place, name: str) -> dict[str, Any]:
    """Return what a job has written; empty where it did not come to that."""
    path = place.folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def statuses(place: Place, name: str) -> str:
    """Return what the run folders of a job say of their ends."""
    found = sorted((place.folder / name).rglob("status.json"))
    return "; ".join(str({key: json.loads(p.read_text()).get(key) for key in ("status", "error")}) for p in found)


def failed(place: Place, name: str) -> bool:
    """Return whether a run folder says that the run failed, and by which error."""
    return "'status': 'failed'" in statuses(place, name) and "'error': None" not in statuses(place, name)

"""What a step costs on a device: the rows of the part `speed`, most wanted first.

- `no_waiting`: no step makes the host wait for the device, with everything on that a step can do.
- `gpt2`, `gpt2_regions`, `gpt2_step`: GPT-2 (124 M parameters, 1,024 tokens, bf16) by the Trainer, eager and compiled
  in three ways, each in turns with a handwritten loop within one fit: tokens per second, MFU, the share of time in
  which the device idles, memory.
- `peers`: the same, eager, by Lightning, Fabric, Accelerate and transformers' Trainer too, in fits of their own.
- `launch_bound`: steps per second of many small layers, with and without CUDA graphs.
- `data_path`: a step whose batches come from host memory beside one whose batch lies on the device.

A rehearsal leaves the peers out, which take seconds to import; REHEARSE_ALL=1 takes them in.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from models import GPT2, GPT2_124M, TINY, Language, adamw, small_layers
from row import Answer, Place
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, supported_activities
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from instep import Trainer, TrainModule
from instep.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from instep.loggers import CSVLogger


def bare(place: Place, **settings: Any) -> Trainer:
    """Return a Trainer with nothing but the loop."""
    return Trainer(accelerator=place.device, devices=1, barebones=True, max_epochs=1, **settings)


def median_ratio(above: list[float], below: list[float]) -> float:
    """Return the median of the ratios of blocks or fits that ran one after the other."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


# ---- no step waits


WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.is_nonzero.default}


class Everything(TrainModule):
    """A step that logs in every way, with a scheduler that moves in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_layers(2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"twice": 2 * loss, "batch": batch_idx})
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Reads(TorchDispatchMode):
    """On a CPU: count the operations whose result the host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Watch(Callback):
    """Forbid waiting from batch `first` on; before the last batches keep the device busy and see if the host goes on.

    Attributes:
        reads: what a CPU's dispatcher has seen.
        ahead: whether the device had not begun with the last batches when the host had launched them; None on a CPU.
    """

    def __init__(self, place: Place, first: int, last: int, busy: int) -> None:
        self.place, self.first, self.last, self.busy = place, first, last, busy
        self.reads, self.ahead = Reads(), None
        self.on, self.asleep = ExitStack(), None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            if self.place.rehearses:
                self.on.enter_context(self.reads)
            else:
                torch.cuda.set_sync_debug_mode("error")
                self.on.callback(torch.cuda.set_sync_debug_mode, "default")
        if batch_idx == self.last - self.busy and not self.place.rehearses:
            torch.cuda._sleep(1_500_000_000)  # cycles: most of a second
            self.asleep = torch.cuda.Event()
            self.asleep.record()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last - 1:
            self.on.close()
            self.ahead = None if self.asleep is None else not self.asleep.query()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.on.close()


def no_waiting(place: Place) -> Answer:
    """Train over 200 optimizer steps in which torch raises an error where the host waits."""
    answer = Answer()
    steps, warm_up = (6, 2) if place.rehearses else (200, 10)
    hand_over = 3 if place.rehearses else 50
    never = 10 * (steps + warm_up)
    # The guard's flags are read at a hand-over, which waits, so each has a fit of its own.
    fits: dict[str, dict[str, Any]] = {
        "with hand-overs to the logger": {"log_every_n_steps": hand_over},
        'with nonfinite="skip"': {"log_every_n_steps": never, "nonfinite": "skip"},
    }
    if place.rehearses:
        place.stand_in("set_sync_debug_mode: a dispatcher that counts reads of values")
        place.stand_in("a busy device that the host runs ahead of: left out")
    for name, settings in fits.items():
        accumulate = 2
        batches = accumulate * (steps + warm_up + 1)
        watch = Watch(place, accumulate * warm_up, accumulate * (warm_up + steps), busy=accumulate * 2)
        batch = (torch.randn(8, 64, device=place.device), torch.randn(8, 1, device=place.device))
        trainer = Trainer(
            accelerator=place.device,
            devices=1,
            max_epochs=1,
            default_root_dir=place.folder,
            logger=CSVLogger(place.folder),
            callbacks=[watch, EMAWeightAveraging(decay=0.99), ModelCheckpoint()],
            gradient_clip_val=0.5,
            accumulate_grad_batches=accumulate,
            enable_progress_bar=True,
            enable_model_summary=False,
            **settings,
        )
        error = ""
        with mock.patch("instep.trainer.guests.nonfinite.host_may_wait", return_value=False):  # as on a GPU
            try:
                trainer.fit(Everything(), [batch] * batches)
            except RuntimeError as failure:
                error = f"{failure}; {_where(failure)}"
        answer.check(f"no step waits, {name}", not error and not watch.reads.seen, error or watch.reads.seen)
        answer.check(f"all steps were made, {name}", trainer.global_step == steps + warm_up + 1, trainer.global_step)
        if watch.ahead is not None:
            answer.check(f"two steps are launched while the device is busy, {name}", watch.ahead, watch.ahead)
    answer.figures = {
        "optimizer steps watched in each fit": steps,
        "with": "log on_step and on_epoch, prog_bar, CSV logger, clipping, accumulation of 2, EMA, scheduler per step",
    }
    return answer


def _where(error: BaseException) -> str:
    """Return the innermost lines of the package in an error's traceback."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "instep" in one.filename]
    return " <- ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in reversed(frames[-3:]))


# ---- GPT-2


def by_hand(net: nn.Module, place: Place, compiled: dict[str, Any] | None = None) -> Callable[[Tensor], None]:
    """Return the step of a handwritten loop."""
    optimizer = adamw(net, place.device)
    model: Any = net if compiled is None else torch.compile(net, **compiled)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(place.device, torch.bfloat16):
            loss = model(batch)
        loss.backward()
        optimizer.step()

    return step


class Turns:
    """Batches of a fit. Between blocks of them a handwritten loop has its blocks, and last each has one profiled.

    Attributes:
        seconds: per step, of each block after the first, which warms up and compiles.
        idle: share of time in which the device idles.
        peak: most bytes on the device in a block.
    """

    def __init__(self, hand: Callable[[Any], None], batch: Any, rounds: int, steps: int, place: Place) -> None:
        self.hand, self.batch, self.rounds, self.steps, self.place = hand, batch, rounds, steps, place
        self.seconds: dict[str, list[float]] = {"Trainer": [], "handwritten": []}
        self.idle: dict[str, float | str] = {}
        self.peak: dict[str, int] = {}

    def __len__(self) -> int:
        return (self.rounds + 2) * self.steps + 1

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.rounds + 1):
            start = self._begin()
            for _ in range(self.steps):
                self.hand(self.batch)
            self._end("handwritten", number, start)
            start = self._begin()
            for _ in range(self.steps):
                yield self.batch
            self._end("Trainer", number, start)
        with self._profiled("handwritten"):
            for _ in range(self.steps):
                self.hand(self.batch)
        with self._profiled("Trainer"):
            for _ in range(self.steps):
                yield self.batch
        yield self.batch

    def _begin(self) -> float:
        self.place.reset_peak_memory()
        return self.place.wait()

    def _end(self, name: str, number: int, start: float) -> None:
        if number:
            self.seconds[name].append((self.place.wait() - start) / self.steps)
            self.peak[name] = self.place.peak_memory()

    @contextmanager
    def _profiled(self, name: str) -> Iterator[None]:
        """Write the share of the time from the first kernel's start to the last one's end in which none ran."""
        kind = ProfilerActivity.CPU if self.place.rehearses else ProfilerActivity.CUDA
        if kind not in supported_activities():
            self.idle[name] = "torch's profiler sees no kernels here"
            yield
            return
        with profile(activities=[kind]) as seen:
            yield
            self.place.wait()
        self.idle[name] = self._share(seen)

    def _share(self, seen: Any) -> float | str:
        path = self.place.folder / "trace.json"
        seen.export_chrome_trace(str(path))
        kinds = {"cpu_op"} if self.place.rehearses else {"kernel", "gpu_memcpy", "gpu_memset"}
        events = json.loads(path.read_text())["traceEvents"]
        spans = sorted((one["ts"], one["ts"] + one["dur"]) for one in events if one.get("cat") in kinds)
        if not spans:
            return "the profiler has seen no kernel"
        busy, end = 0.0, spans[0][0]
        for begin, stop in spans:
            busy += max(0.0, stop - max(begin, end))
            end = max(end, stop)
        return round(1 - busy / (end - spans[0][0]), 4)


def gpt2(place: Place) -> Answer:
    """Measure GPT-2 by the Trainer, eager and compiled, beside a handwritten loop."""
    return _fits_of_gpt2(place, "eager", "compiled")


def gpt2_regions(place: Place) -> Answer:
    """Measure GPT-2 compiled block by block, beside a handwritten loop that is compiled whole."""
    return _fits_of_gpt2(place, "compiled by regions")


def gpt2_step(place: Place) -> Answer:
    """Measure GPT-2 with the whole step compiled, beside a handwritten loop whose model is."""
    return _fits_of_gpt2(place, 'compile="step"')


def _fits_of_gpt2(place: Place, *names: str) -> Answer:
    began = time.perf_counter()
    shape, batch_size, rounds, steps = ((1, *TINY[1:]), 2, 1, 1) if place.rehearses else (GPT2_124M, 16, 5, 10)
    backend: dict[str, Any] = {"backend": "eager"} if place.rehearses else {"backend": "inductor"}
    if place.rehearses:
        place.stand_in("inductor: the backend eager, and no compiled optimizer, which takes seconds")
        place.stand_in("kernels in a profile: operators of the CPU")
        place.stand_in("memory statistics: 0")
    first = GPT2(*shape)
    tokens = batch_size * first.tokens
    batch = first.texts(batch_size, place.device)

    def net() -> GPT2:
        return copy.deepcopy(first).to(place.device)

    hands: dict[str, Callable[[Tensor], None]] = {}
    fits: dict[str, dict[str, Any]] = {
        "eager": {},
        "compiled": {"compile": backend},
        "compiled by regions": {"compile": {"regions": ["Block"], **backend}},
        'compile="step"': {"compile": {"scope": "step", "optimizer": not place.rehearses, **backend}},
    }
    answer, eager_s = Answer(), 0.0
    flops, peak = first.flops_per_token(), place.peak()
    for name in names:
        start, settings = time.perf_counter(), fits[name]
        hand = "eager" if name == "eager" else "compiled"
        hands[hand] = by_hand(net(), place, None if hand == "eager" else backend)
        turns = Turns(hands[hand], batch, rounds, steps, place)
        trainer = bare(place, precision="bf16-mixed", **settings)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                trainer.fit(Language(net(), place.device), turns)
            except Exception as error:  # noqa: BLE001  the others' figures are worth having all the same
                answer.check(f"{name} runs", False, f"{type(error).__name__}: {error}; {_where(error)}")
                continue
        step_s = {who: statistics.median(times) for who, times in turns.seconds.items()}
        ratio = median_ratio(turns.seconds["handwritten"], turns.seconds["Trainer"])
        answer.figures[name] = {
            "tokens per second": {who: round(tokens / value) for who, value in step_s.items()},
            "MFU": {who: round(tokens / value * flops / peak, 3) for who, value in step_s.items()}
            if peak
            else "the device's peak is not known here",
            "share of time in which the device idles": turns.idle,
            "peak memory with both nets on the device, GB": {who: round(n / 1e9, 2) for who, n in turns.peak.items()},
            "blocks, s per step": {who: [round(one, 5) for one in times] for who, times in turns.seconds.items()},
            "all of it, s": round(time.perf_counter() - start, 1),
            "compiled again, times": trainer.run_summary and trainer.run_summary.recompiles,
            "said": sorted({str(one.message).splitlines()[0] for one in said if "compile" in str(one.message)}),
        }
        answer.bar(f"{name}: tokens per second over the handwritten {hand} loop's", ratio, 0.995, least=True)
        if name == "eager":
            eager_s = step_s["Trainer"]
        if name == "compiled":
            why = "this bar is for GPUs" if place.rehearses else "" if eager_s else "there is no eager one"
            share = None if why else step_s["Trainer"] / eager_s
            answer.bar("a compiled step over an eager one", share, 0.85, least=False, why=why)
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
    answer.figures |= {
        "parameters": sum(p.numel() for p in first.parameters()),
        "tokens per batch": tokens,
        "all of it with compiling, s": round(time.perf_counter() - began, 1),
    }
    return answer


# ---- peers


PEERS = ("Lightning", "Fabric", "Accelerate", "transformers")


class Timed:
    """The same ready batch again and again, and the steps per second from batch `first` to the end."""

    batch_size = 1  # transformers asks

    def __init__(self, batch: Any, count: int, first: int, place: Place) -> None:
        self.batch, self.count, self.first, self.place = batch, count, first, place
        self.per_second = 0.0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        start = 0.0
        for index in range(self.count):
            if index == self.first:
                start = self.place.wait()
            if index == self.count - 1:
                self.per_second = (self.count - 1 - self.first) / (self.place.wait() - start)
            yield self.batch


def peers_here(place: Place, answer: Answer, packages: tuple[str, ...]) -> list[str]:
    """Return which packages can be measured; the figures say why others are not."""
    here = []
    for name in packages:
        if place.rehearses and not os.environ.get("REHEARSE_ALL"):
            answer.figures[name] = "left out of the rehearsal: it takes seconds to import"
            continue
        try:
            import_module(name)
            here.append(name)
        except ImportError as error:
            answer.figures[name] = f"left out: {error}"
    return here


def in_turns(ways: dict[str, Callable[[], Timed]], rounds: int, answer: Answer) -> dict[str, list[float]]:
    """Run all fits once per round, each second round from the last to the first.

    Returns:
        Steps per second of each fit. Of peers whose fit fails the figures have the error instead.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in reversed([*ways]) if number % 2 else [*ways]:
            gc.collect()  # The fit before left its nets in cycles, and the device must hold those of all.
            try:
                found[name].append(ways[name]().per_second)
            except Exception as error:
                if name not in PEERS:
                    raise
                answer.figures[name] = f"left out: {type(error).__name__}: {error}"
                del ways[name], found[name]
    return found


def of_trainer(base: Any, net: nn.Module, loss_of: Callable[..., Tensor], optimizer: Callable[[Any], Any]) -> Any:
    """Return a module for a Trainer: ours, or Lightning's, by its base class."""

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return optimizer(self.net)

    return Module()


def lightning_fit(place: Place, module: Callable[[Any], Any], data: Timed, **settings: Any) -> None:
    """Train by Lightning with nothing but its loop.

    Args:
        module: makes the module of Lightning's base class.
        data: batches.
        settings: of its Trainer.
    """
    lightning: Any = import_module("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    kind = "cpu" if place.rehearses else "gpu"
    everything = dict.fromkeys(off, False) | settings
    lightning.Trainer(accelerator=kind, devices=1, max_epochs=1, **everything).fit(
        module(lightning.LightningModule), data
    )


def peers(place: Place) -> Answer:
    """Measure eager GPT-2 in bf16 by other trainers, each in a fit of its own, in turns."""
    answer = Answer()
    packages = peers_here(place, answer, ("lightning", "accelerate", "transformers"))
    shape, batch_size, count, first, rounds = (TINY, 2, 4, 1, 1) if place.rehearses else (GPT2_124M, 16, 26, 5, 3)
    start = GPT2(*shape)
    batch, tokens = start.texts(batch_size, place.device), batch_size * start.tokens

    def net() -> GPT2:
        return copy.deepcopy(start).to(place.device)

    def data(of: Any = batch) -> Timed:
        return Timed(of, count, first, place)

    def hand() -> Timed:
        step, timed = by_hand(net(), place), data()
        for each in timed:
            step(each)
        return timed

    def own() -> Timed:
        bare(place, precision="bf16-mixed").fit(Language(net(), place.device), timed := data())
        return timed

    def optimizer(net: nn.Module) -> Any:
        return adamw(net, place.device)

    def lightning() -> Timed:
        def module(base: Any) -> Any:
            return of_trainer(base, net(), lambda net, batch: net(batch), optimizer)

        lightning_fit(place, module, timed := data(), precision="bf16-mixed")
        return timed

    def fabric() -> Timed:
        made: Any = import_module("lightning.fabric").Fabric(
            accelerator="cpu" if place.rehearses else "gpu", devices=1, precision="bf16-mixed"
        )
        made.launch()
        model = net()
        return _loop(made.backward, made.setup(model, optimizer(model)), data())

    def accelerate() -> Timed:
        made: Any = import_module("accelerate").Accelerator(mixed_precision="bf16", cpu=place.rehearses)
        model = net()
        return _loop(made.backward, made.prepare(model, optimizer(model)), data())

    ways: dict[str, Callable[[], Timed]] = {"handwritten": hand, "Trainer": own}
    if "lightning" in packages:
        ways |= {"Lightning": lightning, "Fabric": fabric}
    if "accelerate" in packages:
        ways["Accelerate"] = accelerate
    if "transformers" in packages:
        ways["transformers"] = lambda: _transformers(place, net(), data({"text": batch}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the others: few workers, no validation
        found = in_turns(ways, rounds, answer)
    answer.figures |= {
        "tokens per second": {name: round(statistics.median(values) * tokens) for name, values in found.items()},
        "over the handwritten loop": {
            name: round(median_ratio(values, found["handwritten"]), 4) for name, values in found.items()
        },
        "fits, steps per second": {name: [round(one, 2) for one in values] for name, values in found.items()},
    }
    ratio = median_ratio(found["Trainer"], found["handwritten"])
    answer.bar("Trainer: tokens per second over the handwritten loop's", ratio, 0.995, least=True)
    for name in ways:
        if name in PEERS:
            answer.bar(
                f"Trainer: tokens per second over {name}'s",
                median_ratio(found["Trainer"], found[name]),
                0.995,
                least=True,
            )
    return answer


def _loop(backward: Callable[[Tensor], Any], prepared: tuple[Any, Any], timed: Timed) -> Timed:
    """Train in a loop of one's own, with the model and optimizer that Fabric and Accelerate give."""
    model, optimizer = prepared
    for batch in timed:
        optimizer.zero_grad()
        backward(model(batch))
        optimizer.step()
    return timed


def _transformers(place: Place, net: nn.Module, timed: Timed) -> Timed:
    """Train by transformers' Trainer, at its defaults but for what would log, save or clip."""
    transformers: Any = import_module("transformers")

    class Own(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return timed

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(inputs["text"])

    settings = transformers.TrainingArguments(
        output_dir=str(place.folder),
        num_train_epochs=1,
        use_cpu=place.rehearses,
        bf16=True,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_strategy="no",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    Own(model=net, args=settings, optimizers=(adamw(net, place.device), None)).train()
    return timed


# ---- launch-bound


def launch_bound(place: Place) -> Answer:
    """Measure steps per second of a net whose kernels take less time than their launches."""
    answer = Answer()
    packages = peers_here(place, answer, ("lightning",))
    count, first, rounds, layers = (12, 6, 1, 2) if place.rehearses else (600, 100, 5, 20)
    batch = (torch.randn(8, 64, device=place.device), torch.randn(8, 1, device=place.device))
    if place.rehearses:
        place.stand_in("CUDA graphs: the steps run the normal way")

    def net() -> nn.Module:
        return small_layers(layers).to(place.device)

    def optimizer(net: nn.Module) -> Any:
        return torch.optim.AdamW(net.parameters(), 1e-3, capturable=not place.rehearses)

    def loss_of(net: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(net(batch[0]), batch[1])

    def hand(graph: bool) -> Timed:
        timed, model = Timed(batch, count, first, place), net()
        opt = optimizer(model)

        def step(batch: Any) -> None:
            opt.zero_grad()
            loss_of(model, batch).backward()
            opt.step()

        train = recorded(step, batch) if graph and not place.rehearses else step
        for each in timed:
            train(each)
        return timed

    def trained(**settings: Any) -> Timed:
        timed = Timed(batch, count, first, place)
        bare(place, **settings).fit(of_trainer(TrainModule, net(), loss_of, optimizer), timed)
        return timed

    def lightning() -> Timed:
        timed = Timed(batch, count, first, place)
        lightning_fit(place, lambda base: of_trainer(base, net(), loss_of, optimizer), timed)
        return timed

    def weights(**settings: Any) -> list[Tensor]:
        model = net()
        bare(place, **settings).fit(of_trainer(TrainModule, model, loss_of, optimizer), [batch] * 20)
        return [p.detach() for p in model.parameters()]

    ways: dict[str, Callable[[], Timed]] = {
        "handwritten": lambda: hand(graph=False),
        "handwritten, one CUDA graph": lambda: hand(graph=True),
        "Trainer": trained,
        "Trainer, cuda_graphs": lambda: trained(cuda_graphs=True),
    }
    if packages:
        ways["Lightning"] = lightning
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = in_turns(ways, rounds, answer)
        apart = max(float((a - b).abs().max()) for a, b in zip(weights(), weights(cuda_graphs=True), strict=True))
    if not place.rehearses:
        normal = sorted({str(one.message) for one in said if "cuda_graphs" in str(one.message)})
        answer.check("cuda_graphs replays the step and the optimizer's", not normal, normal)
    answer.check("cuda_graphs trains the same weights in 20 steps", apart < 1e-3, f"{apart:.2g} apart")
    over = median_ratio(found["Trainer, cuda_graphs"], found["Lightning"]) if "Lightning" in found else None
    answer.figures |= {
        "steps per second": {name: round(statistics.median(values), 1) for name, values in found.items()},
        "fits, steps per second": {name: [round(one, 1) for one in values] for name, values in found.items()},
    }
    answer.bar("cuda_graphs: steps per second over Lightning's", over, 3.0, least=True, why="Lightning is left out")
    ratio = median_ratio(found["Trainer"], found["handwritten"])
    answer.bar("Trainer: steps per second over the handwritten loop's", ratio, 0.9, least=True)
    ratio = median_ratio(found["Trainer, cuda_graphs"], found["handwritten, one CUDA graph"])
    answer.bar("cuda_graphs: steps per second over one graph by hand", ratio, 0.5, least=True)
    return answer


def recorded(step: Callable[[Any], None], batch: Any) -> Callable[[Any], None]:
    """Record a whole step as one CUDA graph, as torch's notes do it."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(batch)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step(batch)
    return lambda batch: graph.replay()


# ---- batches from host memory


class Ready(Dataset[Any]):
    """Batches that are there already; a worker only sends them on."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.batch


class Products(TrainModule):
    """Large matrix products, and the time from its step `first` to its step `last`."""

    def __init__(self, width: int, layers: int, first: int, last: int, place: Place) -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device(place.device):
            self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.width, self.first, self.last, self.place = width, first, last, place
        self.seconds = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.first:
            self.seconds = -self.place.wait()
        if batch_idx == self.last:
            self.seconds = (self.seconds + self.place.wait()) / (self.last - self.first)
        rows = batch[:, : self.width]
        return self.layers(rows.repeat(self.width // len(rows), 1)).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3, fused=True)


def data_path(place: Place) -> Answer:
    """Compare steps whose batches a loader brings from host memory with steps whose batch is there."""
    answer = Answer()
    shape, width, layers = ((4, 64), 16, 1) if place.rehearses else ((64, 3 * 224 * 224), 4096, 12)
    count, first, rounds, workers = (6, 2, 1, 0) if place.rehearses else (150, 50, 3, 4)
    batch = torch.randn(shape)
    if place.rehearses:
        place.stand_in("pinned memory and a stream for copies: the batches stay on the CPU, and there are no workers")

    def loader() -> Any:
        return DataLoader(Ready(batch, count), batch_size=None, num_workers=workers, pin_memory=not place.rehearses)

    def model() -> Products:
        return Products(width, layers, first, count - 1, place)

    def trained(data: Any) -> float:
        module = model()
        bare(place, precision="bf16-mixed").fit(module, data)
        return module.seconds

    def by_hand() -> float:
        module = model()
        optimizer = module.configure_optimizers()
        for batch_idx, each in enumerate(loader()):
            optimizer.zero_grad()
            with torch.autocast(place.device, torch.bfloat16):
                loss = module.training_step(each.to(place.device, non_blocking=True), batch_idx)
            loss.backward()
            optimizer.step()
        return module.seconds

    there = "Trainer, the batch on the device"
    ways: dict[str, Callable[[], float]] = {
        there: lambda: trained([batch.to(place.device)] * count),
        "Trainer, a loader with workers": lambda: trained(loader()),
        "handwritten, a loader with workers, copies on the step's stream": by_hand,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    answer.figures |= {
        "bytes per batch": batch.nbytes,
        "s per step": {name: round(statistics.median(values), 5) for name, values in found.items()},
        "over the batch on the device": {
            name: round(median_ratio(values, found[there]), 4) for name, values in found.items()
        },
        "fits, s per step": {name: [round(one, 5) for one in values] for name, values in found.items()},
    }
    ratio = median_ratio(found["Trainer, a loader with workers"], found[there])
    answer.bar("a step with a loader over one whose batch is there", ratio, 1.05, least=False)
    return answer

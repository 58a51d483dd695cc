"""What a save of 1, 8 and 20 GB of weights costs: the rows of the part `saves`.

Each row saves the same weights in the background (`Trainer.save_later`, as `ModelCheckpoint(background=True)` does), by
torch.distributed.checkpoint's `async_save` with pinned staging and at its defaults, and by `torch.save` with fsync:

- `host blocked`: seconds until the call returns.
- `loop blocked`: seconds until the device has changed all weights after it, as the next step would.
- `safe`: seconds until the call's own promise holds: for instep until every byte was read back and verified, for
  `async_save` until its future is done.

The weights are changed right after each call; what is read back must be what they were before, bit for bit. Whoever
comes too late in a row's time is left out, and the figures say so.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from row import Answer, Place
from safetensors import safe_open
from torch import nn

from instep import Trainer, TrainModule
from instep.callbacks import Callback

READ_BACK = 60  # tensors of one checkpoint that are compared


class Wide(TrainModule):
    """Weights of a given size, next to no arithmetic, and an optimizer that leaves them as they are."""

    def __init__(self, gigabytes: float, place: Place) -> None:
        super().__init__()
        self.width, self.place = 256 if place.rehearses else 4096, place
        count = max(1, round(gigabytes * 1e9 / (4 * self.width**2)))
        self.layers = nn.ParameterList(self.drawn(index) for index in range(count))

    def drawn(self, index: int) -> torch.Tensor:
        """Return the weights that a layer begins with."""
        generator = torch.Generator(self.place.device).manual_seed(index)
        return torch.rand(self.width, self.width, device=self.place.device, generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers[0].square().mean() + 0.0 * batch.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)

    @torch.no_grad()
    def change(self) -> None:
        """Add 1 to all weights."""
        torch._foreach_add_(list(self.layers), 1.0)

    def differ(self, folder: Path, changes: int) -> list[str]:
        """Return which of a checkpoint's weights are not those after so many changes. Of many some are read."""
        wrong, count = [], 0
        step = max(1, len(self.layers) // READ_BACK)
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  it is no dict
                    if not name.startswith("layers.") or int(name.rpartition(".")[2]) % step:
                        continue
                    expected = self.drawn(int(name.rpartition(".")[2]))
                    for _ in range(changes):
                        expected += 1.0
                    count += 1
                    if not torch.equal(file.get_tensor(name).to(self.place.device), expected):
                        wrong.append(name)
        return wrong if count else ["no weights were found"]


@contextmanager
def host_memory(seen: dict[str, float]) -> Iterator[None]:
    """Sample this process's resident memory while the block runs, and write how far it grew, in GB."""
    ended = threading.Event()
    before = highest = _resident()

    def sample() -> None:
        nonlocal highest
        while not ended.wait(0.02):
            highest = max(highest, _resident())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        seen["host memory, GB"] = round((max(highest, _resident()) - before) / 1e9, 3)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Measured:
    """Saves of one row, by name.

    Args:
        model: whose weights are saved and changed.
        place: where the row runs.
        budget_s: no save begins that would end later, by what the longest one took.
    """

    def __init__(self, model: Wide, place: Place, budget_s: float) -> None:
        self.model, self.place, self.budget_s = model, place, budget_s
        self.began, self.longest_s, self.changes = time.perf_counter(), 0.0, 0
        self.found: dict[str, Any] = {}

    def save(self, name: str, begin: Callable[[Path], Callable[[], Any]]) -> Any:
        """Time a save, and return its result; None where no time is left.

        Args:
            name: for the figures.
            begin: starts it, and returns the function that waits until it is safe and gives its result.
        """
        if time.perf_counter() - self.began + 1.5 * self.longest_s > self.budget_s:
            self.found[name] = "left out: the row's time was used up"
            return None
        folder, seen = self.place.folder / "saved", dict[str, float]()
        self.place.reset_peak_memory()
        on_device = self.place.peak_memory()
        with host_memory(seen):
            start = self.place.wait()
            wait = begin(folder)
            host = time.perf_counter() - start
            self.model.change()
            self.changes += 1
            loop = self.place.wait() - start
            result = wait()
            safe = time.perf_counter() - start
        self.longest_s = max(self.longest_s, safe)
        seen["device memory, GB"] = round((self.place.peak_memory() - on_device) / 1e9, 3)
        self.found[name] = {"host blocked, s": host, "loop blocked, s": loop, "safe, s": safe, **seen}
        return result

    def remove(self) -> None:
        """Remove what was saved."""
        shutil.rmtree(self.place.folder / "saved", ignore_errors=True)


class Saves(Callback):
    """Saves in the background after each batch, and reads back what was saved."""

    def __init__(self, measured: Measured, answer: Answer) -> None:
        self.measured, self.answer = measured, answer

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        name = f"instep in the background, save {batch_idx + 1}"
        before = self.measured.changes

        def begin(folder: Path) -> Callable[[], Any]:
            pending = trainer.save_later(folder, None, weights_only=False)
            return lambda: trainer.finish_save(pending)

        path = self.measured.save(name, begin)
        if path is not None:
            wrong = module.differ(path, before)
            self.answer.check(f"{name}: it reads back as it was before the change", not wrong, wrong)
        self.measured.remove()


def torch_save(model: Wide, folder: Path) -> Callable[[], Any]:
    """Save by `torch.save`, and fsync."""
    folder.mkdir()
    with open(folder / "state.pt", "wb") as file:
        torch.save(model.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())
    return lambda: None


def dcp_save(model: Wide, folder: Path, pinned: bool) -> Callable[[], Any]:
    """Save by torch.distributed.checkpoint; the call returns when the weights may be changed."""
    import torch.distributed.checkpoint as dcp  # late: half a second

    stager: Any = None
    if pinned:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # late: an older torch has none

        here = not model.place.rehearses  # pinned memory and copies that are not waited for one by one
        stager = DefaultStager(StagingOptions(here, False, False, here))
    future: Any = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder, async_stager=stager, no_dist=True)

    def wait() -> None:
        future.result()
        if stager is not None:
            stager.close()  # torch 2.11 takes a stager for one save only

    return wait


def copy_bandwidth(place: Place) -> float:
    """Return the bytes per second of a copy from the device to pinned memory."""
    source = torch.zeros(1_000_000 if place.rehearses else 1_000_000_000, dtype=torch.uint8, device=place.device)
    target = torch.empty(source.shape, dtype=torch.uint8, pin_memory=not place.rehearses)
    times = []
    for _ in range(4):
        start = place.wait()
        target.copy_(source, non_blocking=True)
        times.append(place.wait() - start)
    return source.nbytes / min(times)


def saves_of(place: Place, gigabytes: float, saves: int, budget_s: float) -> Answer:
    """Measure all saves of one size."""
    answer = Answer()
    wanted = gigabytes * 1e9
    if not place.rehearses:
        for what, free, needed in (
            ("device", torch.cuda.mem_get_info()[0], 1.2 * wanted),
            ("disk", shutil.disk_usage(place.folder).free, 1.2 * wanted),
            ("host", os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 1.5 * wanted),
        ):
            if free < needed:
                place.leave_out(f"the {what} has {free / 1e9:.0f} GB free, and {needed / 1e9:.0f} are needed")
    else:
        place.stand_in("GB: MB")
        place.stand_in("memory statistics of the device: 0")
        place.stand_in("pinned memory: ordinary memory")
    per_second = copy_bandwidth(place)
    model = Wide(gigabytes / 1000 if place.rehearses else gigabytes, place)
    size = sum(p.nbytes for p in model.parameters())
    measured = Measured(model, place, budget_s)
    trainer = Trainer(
        accelerator=place.device,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Saves(measured, answer)],
        default_root_dir=place.folder,
    )
    trainer.fit(model, [torch.zeros(1)] * saves)
    model.to(place.device)
    others: dict[str, Callable[[Path], Callable[[], Any]]] = {
        **{
            f"async_save, pinned, save {number + 1}": lambda folder: dcp_save(model, folder, pinned=True)
            for number in range(min(saves, 2))
        },
        "torch.save, fsync": lambda folder: torch_save(model, folder),
        "async_save": lambda folder: dcp_save(model, folder, pinned=False),
    }
    for name, begin in others.items():
        try:
            measured.save(name, begin)
        except Exception as error:  # noqa: BLE001  the figures of the others are worth having all the same
            measured.found[name] = f"failed: {type(error).__name__}: {error}"
        measured.remove()
    copy_s = size / per_second
    answer.figures |= {
        "bytes": size,
        "a copy of as many bytes to pinned memory, s": round(copy_s, 4),
        "GB/s of that copy": round(per_second / 1e9, 1),
    }
    for name, found in measured.found.items():
        answer.figures[name] = (
            {key: round(value, 4) for key, value in found.items()} if isinstance(found, dict) else found
        )
    later = measured.found[f"instep in the background, save {saves}"]
    why, host, over = "", None, None
    if isinstance(later, dict):
        host, over = later["host blocked, s"], later["loop blocked, s"] / max(copy_s, 0.05)
    else:
        why = later
    answer.bar("a save but the first blocks the host, s", host, 0.1, least=False, why=why)
    answer.bar("a save but the first blocks the loop, over a copy (or 0.05 s)", over, 1.2, least=False, why=why)
    return answer


def gb1(place: Place) -> Answer:
    """Save 1 GB."""
    return saves_of(place, 1, saves=4, budget_s=40)


def gb8(place: Place) -> Answer:
    """Save 8 GB."""
    return saves_of(place, 8, saves=3, budget_s=120)


def gb20(place: Place) -> Answer:
    """Save 20 GB."""
    return saves_of(place, 20, saves=2, budget_s=230)

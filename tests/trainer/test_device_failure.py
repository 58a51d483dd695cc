"""A device that fails at every call after an error, as CUDA does after an illegal access: a CPU stands in for it."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from instep.checkpoint.background import BackgroundSaver, HostBuffers
from instep.checkpoint.store import CheckpointStore
from instep.profilers.run_clock import RunClock
from instep.strategies import Strategy
from instep.tuner import Tuner
from tests.trainer.toys import Toy, loader, quiet

ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
ERRORS = [
    ILLEGAL,
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
]


class Device:
    """Device whose events and waits raise once it has failed."""

    def __init__(self) -> None:
        self.fails = False

    def ask(self, *_: Any) -> bool:
        if self.fails:
            raise torch.AcceleratorError("CUDA error: it has failed before")
        return True

    query = synchronize = ask

    def elapsed_time(self, end: Any) -> float:
        return float(self.ask())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cpu, "synchronize", device.ask)
    monkeypatch.setattr(RunClock, "_event", lambda clock: device.ask() and device)
    return device


class Breaks(Toy):
    """Raises in its third step, or in the backward of that step."""

    act: Any = None
    in_backward = False

    def break_now(self, *_: Any) -> None:
        error, device, device.fails = self.act
        raise error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 2 and self.act:
            if not self.in_backward:
                self.break_now()
            loss.register_hook(self.break_now)
        return loss


def breaks(error: Exception, device: Device, fails: bool = True, in_backward: bool = False) -> Breaks:
    module = Breaks()
    module.act, module.in_backward = (type(error)(str(error)), device, fails), in_backward
    return module


class AsksTheDevice(Callback):
    """Waits for the device at the end."""

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        torch.cpu.synchronize()


def fit(root: Path, module: Toy, *callbacks: Callback) -> Any:
    savers = [ModelCheckpoint(every_n_train_steps=1), OnExceptionCheckpoint(root / "apart")]
    trainer = quiet(max_epochs=2, enable_checkpointing=True, default_root_dir=root, callbacks=[*savers, *callbacks])
    trainer.fit(module, loader(), ckpt_path="auto")
    return trainer


def kept(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if (path / "manifest.json").exists())


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("error", ERRORS, ids=["torch", "cublas", "triton"])
def test_a_run_on_a_failed_device_ends_with_its_first_error_and_what_to_do(
    error: Exception, in_backward: bool, device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = type(error)
    module = breaks(error, device, in_backward=in_backward)
    with pytest.raises(kind) as caught:
        fit(tmp_path, module, AsksTheDevice())
    assert str(caught.value) == str(error)
    assert caught.value.__context__ is None, "no other error hides it"
    (note,) = vars(caught.value)["__notes__"]
    assert "cpu fails at every call from here on" in note
    assert "step-00000002-1." in note
    assert "CUDA_LAUNCH_BLOCKING=1" in note
    gc.collect()  # the batches that were left
    assert "Traceback" not in capsys.readouterr().err, "what only says the same is not printed"
    status = json.loads(next(tmp_path.rglob("status.json")).read_text())
    assert (status["status"], status["error"]) == ("failed", f"{kind.__name__}: {error}")
    assert kept(tmp_path) == ["step-00000002-1"], "nothing is saved off it"
    device.fails = False  # another process
    module.act = None
    assert fit(tmp_path, module).global_step == 8


@pytest.mark.parametrize("error", ERRORS, ids=["torch", "cublas", "triton"])
def test_a_device_that_still_answers_is_saved(error: Exception, device: Device, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught:
        fit(tmp_path, breaks(error, device, fails=False))
    assert not hasattr(caught.value, "__notes__")
    assert kept(tmp_path) == ["on_exception-1", "step-00000002-1"]


def test_save_on_exception_leaves_a_failed_device_alone(device: Device, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=100, save_on_exception=True)
    trainer = quiet(max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path, callbacks=[saver])
    with pytest.raises(torch.AcceleratorError) as caught:
        trainer.fit(breaks(ILLEGAL, device), loader())
    assert "There is no checkpoint." in vars(caught.value)["__notes__"][0]
    assert kept(tmp_path) == []


def test_host_memory_is_given_back_where_the_copies_will_not_come(device: Device, tmp_path: Path) -> None:
    saver = BackgroundSaver()
    recorder = saver.record(lambda writer: writer.tensors("a.safetensors", {"a": torch.ones(3)}))
    saver._buffers._copying.append(device)
    device.fails = True
    saver.start(CheckpointStore(tmp_path), 1, recorder)
    with pytest.warns(UserWarning, match="a background save failed: CUDA error"):
        saver.close()
    assert saver.buffer_bytes == 0
    assert kept(tmp_path) == []
    buffers = HostBuffers()
    buffers.copy("a", [torch.ones(3)])
    buffers._copying.append(device)
    for _ in range(2):
        buffers.close()
    assert buffers.bytes == 0


# ---- out of memory


class Held:
    """Stands for the activations of a step."""


STEPS: list[Any] = []  # what the steps held; apart from the module, whose lists a trial puts back


class Short(Toy):
    """Runs out of memory above eight samples, while its step holds something."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(loader(64).dataset, self.batch_size)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        held = Held()
        STEPS.append(weakref.ref(held))
        if len(batch[0]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().training_step(batch, batch_idx)


class Fills(Strategy):
    """Prepares the module anew, for which memory is needed."""

    held = 0

    def prepare_training(self, module: Any, optimizers: Any) -> None:
        self.held += sum(step() is not None for step in STEPS)
        super().prepare_training(module, optimizers)


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_a_step_that_ran_out_of_memory_is_let_go_before_the_module_is_put_back(mode: str, tmp_path: Path) -> None:
    strategy, module = Fills(), Short()
    STEPS.clear()
    gc.disable()  # what is let go is let go on purpose
    try:
        trainer = quiet(max_epochs=1, strategy=strategy, default_root_dir=tmp_path)
        assert Tuner(trainer).scale_batch_size(module, mode=mode, steps_per_trial=1) == (8 if mode == "power" else 7)
    finally:
        gc.enable()
    assert len(STEPS) > 3
    assert strategy.held == 0

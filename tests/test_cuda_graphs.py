"""`Trainer(cuda_graphs=True)`: what is replayed computes what the normal step does; what cannot be says why.

On a CPU a recorder stands in that computes again at each replay, into the memory of what was recorded, as a graph does.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule
from instep.callbacks import Callback
from instep.cuda_graphs import WARM_UP, CudaRecorder
from instep.distributed.nested import iter_leaves
from instep.errors import SettingError
from tests.helpers import gpu


class Net(TrainModule):
    def __init__(self, log: Any = None, scheduled: bool = False, dropout: float = 0.0, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))
        self.logged, self.scheduled, self.kind = log, scheduled, device

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.net(batch[0].reshape(-1, 8)), batch[1])
        self.log("loss", loss)
        if self.logged is not None:
            self.log("other", self.logged)
        return {"loss": loss, "twice": loss.detach() * 2}

    def configure_optimizers(self) -> Any:
        if self.kind == "cuda":
            rate: Any = torch.tensor(0.01, device="cuda") if self.scheduled else 0.01
            optimizer: Any = torch.optim.AdamW(self.parameters(), rate, capturable=True)
        else:
            optimizer = torch.optim.SGD(self.parameters(), 0.01 if self.net[3].p else 0.05, momentum=0.9)
        if not self.scheduled:
            return optimizer
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8), "interval": "step"}]


class Seen(Callback):
    """What a user sees of each step; the tensors are read at the end only."""

    def __init__(self, before: Callable[[int, Any], object] = lambda step, module: None) -> None:
        self.outputs: list[Any] = []
        self.before = before

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.before(trainer.global_step, module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append((outputs["loss"], outputs["twice"], trainer.callback_metrics.get("loss")))


class Stand:
    """Recorder on a CPU: counts, and computes again where a graph would be replayed.

    Attributes:
        module: whose weights and optimizer a recording leaves as they were.
    """

    def __init__(self) -> None:
        self.warm_ups, self.captures, self.replays = 0, 0, 0
        self.module: Any = None

    def warm_up(self, run: Callable[[], Any]) -> Any:
        self.warm_ups += 1
        return run()

    def _tensors(self) -> list[Tensor]:
        trainer = self.module.trainer
        states = [each for state in trainer.optimizers[0].state.values() for each in state.values()]
        found = [*self.module.parameters(), *self.module.buffers(), *states]
        return [each for each in found if isinstance(each, Tensor)]

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], Any]]:
        self.captures += 1
        before = [(each, each.detach().clone()) for each in self._tensors()]
        with torch.random.fork_rng(devices=[]):
            result = run()
        with torch.no_grad():
            for each, value in before:
                each.copy_(value)

        def replay() -> None:
            self.replays += 1
            logged = self.module._log_buffer
            count = len(logged)
            again = run()
            del logged[count:]
            with torch.no_grad():
                for (_, ours), (_, new) in zip(iter_leaves(result), iter_leaves(again), strict=True):
                    if isinstance(ours, Tensor):
                        ours.copy_(new)

        return result, replay


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand()
    monkeypatch.setattr("instep.cuda_graphs.recorder_for", lambda device: made)
    return made


def data(count: int = 96, batch: int = 8) -> DataLoader[Any]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch, shuffle=True)


def train(
    folder: Path,
    module: Any = None,
    loader: Any = None,
    before: Any = None,
    save: Path | None = None,
    ckpt_path: Path | None = None,
    **settings: Any,
) -> Any:
    module, seen = module or Net(), Seen(before) if before else Seen()
    settings = {"accelerator": "cpu", "max_epochs": 2, "devices": 1, **settings}
    trainer = Trainer(
        default_root_dir=folder,
        callbacks=[seen],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    torch.manual_seed(3)
    trainer.fit(module, loader or data(), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    outputs = [[None if each is None else float(each) for each in row] for row in seen.outputs]
    return outputs, {name: each.cpu() for name, each in module.state_dict().items()}


def same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    assert (
        one[0] == other[0]
        if not tolerance
        else np.allclose(np.array(one[0], float), np.array(other[0], float), atol=tolerance, equal_nan=True)
    )
    for name, value in one[1].items():
        torch.testing.assert_close(other[1][name], value, atol=tolerance, rtol=tolerance)


def both(folder: Path, stand: Stand, make: Callable[[], Any] = Net, **settings: Any) -> None:
    plain = train(folder, make(), **settings)
    assert stand.captures == stand.replays == 0
    stand.module = make()
    same(plain, train(folder, stand.module, cuda_graphs=True, **settings))


def test_a_replayed_step_is_the_normal_one(tmp_path: Path, stand: Stand) -> None:
    both(tmp_path, stand, log_every_n_steps=1, gradient_clip_val=0.1)
    steps = 2 * 12
    assert (stand.warm_ups, stand.captures, stand.replays) == (WARM_UP, 2, 2 * (steps - WARM_UP))


def test_a_batch_of_another_shape_runs_the_normal_way(tmp_path: Path, stand: Stand) -> None:
    def collate(samples: list[Any]) -> Any:
        nonlocal count
        count += 1
        x, y = (torch.stack(each) for each in zip(*samples, strict=True))
        return (x[None] if count % 4 == 2 else x), y

    count = 0
    loader = DataLoader(data().dataset, 8, shuffle=True, collate_fn=collate)  # pyright: ignore[reportArgumentType]
    with pytest.warns(UserWarning, match=r"batch\[0\] is \(\(1, 8, 8\).* and was \(\(8, 8\)"):
        both(tmp_path, stand, loader=loader)
    assert stand.captures == 2
    assert WARM_UP < stand.replays < 2 * (2 * 12 - WARM_UP)


def test_the_smaller_last_batch_has_a_weight_of_its_own(tmp_path: Path, stand: Stand) -> None:
    both(tmp_path, stand, loader=data(100))
    assert (stand.captures, stand.replays) == (2, 2 * (2 * 12 - WARM_UP))


def test_weights_that_are_replaced_or_frozen_are_recorded_anew(tmp_path: Path, stand: Stand) -> None:
    def change(step: int, module: Any) -> None:
        if step == 8:
            module.net[0].weight.data = module.net[0].weight.data.clone() * 0.5
        if step == 12:
            module.net[4].bias.requires_grad = False
            module.net[4].bias.grad = None

    both(tmp_path, stand, before=change)
    assert stand.captures == 2 * 3  # of the step, and of the optimizer since its gradients moved


def test_a_changed_setting_of_the_optimizer_counts(tmp_path: Path, stand: Stand) -> None:
    def change(step: int, module: Any) -> None:
        if step >= 8:
            module.trainer.optimizers[0].param_groups[0]["lr"] = 0.5 / step

    with pytest.warns(UserWarning, match="settings or gradients were changed after each of 3 recordings"):
        both(tmp_path, stand, before=change)
    assert stand.captures == 1 + 3


def test_an_optimizer_with_a_scheduler_steps_the_normal_way(tmp_path: Path, stand: Stand) -> None:
    with pytest.warns(UserWarning, match="the step of SGD runs the normal way, since a scheduler changes its lr"):
        both(tmp_path, stand, lambda: Net(scheduled=True))
    assert stand.captures == 1
    assert stand.replays == 2 * 12 - WARM_UP


class Fussy(Net):
    """It cannot be recorded, and its error has no text."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == WARM_UP + 1:
            raise RuntimeError
        return super().training_step(batch, batch_idx)


def with_array(samples: list[Any]) -> Any:
    x, y = zip(*samples, strict=True)
    return torch.stack(x), torch.stack(y), np.zeros(3)


@pytest.mark.parametrize(
    ("make", "settings", "why"),
    [
        (lambda: Net(log=1.5), {}, r"self.log\('other', ...\) got a float that a replay would not compute anew"),
        (Net, {"accumulate_grad_batches": 2}, "has no effect, since accumulate_grad_batches is more than 1"),
        (Net, {"nonfinite": "skip"}, "has no effect, since nonfinite= looks at the loss"),
        (Fussy, {}, "RuntimeError; no step is recorded"),
    ],
)
def test_what_cannot_be_replayed_says_why(
    make: Callable[[], Any], settings: dict[str, Any], why: str, tmp_path: Path, stand: Stand
) -> None:
    stand.module = make()
    with pytest.warns(UserWarning, match=why):
        train(tmp_path, stand.module, cuda_graphs=True, max_steps=8, **settings)
    assert stand.replays == 0


def test_an_array_in_a_batch(tmp_path: Path, stand: Stand) -> None:
    loader = DataLoader(data().dataset, 8, collate_fn=with_array)
    stand.module = Net()
    with pytest.warns(UserWarning, match=r"batch\[2\] is a ndarray, whose changes a replay would not see"):
        train(tmp_path, stand.module, loader, cuda_graphs=True)
    assert stand.captures == stand.replays == 0


def test_a_step_is_replayed_on_where_the_optimizers_recording_breaks(
    tmp_path: Path, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = stand.capture

    def breaks(run: Callable[[], Any]) -> Any:
        if stand.captures == 1:
            stand.captures += 1
            try:
                raise RuntimeError("no sum of this kind while a stream is recorded")
            finally:  # as torch's block does where it cannot end the recording
                raise RuntimeError("the recording could not be ended")
        return capture(run)

    monkeypatch.setattr(stand, "capture", breaks)
    with pytest.warns(UserWarning, match="SGD runs the normal way, since no sum of this kind"):
        both(tmp_path, stand)
    assert stand.captures == 2
    assert stand.replays == 2 * 12 - WARM_UP


def test_a_batch_without_tensors_is_replayed(tmp_path: Path, stand: Stand) -> None:
    class Own(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(torch.ones(4, 8)).square().mean() * batch["factor"]

    stand.module = Own()
    trainer = Trainer(accelerator="cpu", devices=1, barebones=True, max_epochs=1, cuda_graphs=True)
    trainer.fit(stand.module, [{"factor": 2.0}] * 8)
    assert stand.replays == 2 * (8 - WARM_UP)


@pytest.mark.parametrize("count", [96, 100])
def test_no_graph_of_autograd_is_alive_when_a_step_is_recorded(
    count: int, tmp_path: Path, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(Net):
        losses: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            self.losses.append(weakref.ref(output["loss"]))
            return output

    alive: list[int] = []
    capture = stand.capture

    def watched(run: Callable[[], Any]) -> Any:
        alive.append(sum(loss() is not None for loss in Watched.losses))
        return capture(run)

    def freeze(step: int, module: Any) -> None:
        if step == 13:  # the batch before was the smaller one of 100
            module.net[4].bias.requires_grad = False
            module.net[4].bias.grad = None

    monkeypatch.setattr(stand, "capture", watched)
    stand.module = Watched()
    train(tmp_path, stand.module, data(count), freeze, cuda_graphs=True)
    assert alive[0] == alive[2] == 0  # of the step; the optimizer's come after it
    assert len(alive) == 4


def test_a_compiled_step_takes_it_whole() -> None:
    with pytest.raises(SettingError, match="both take the whole step"):
        Trainer(accelerator="cpu", cuda_graphs=True, compile="step")


def test_without_a_cuda_device_the_run_is_the_same(tmp_path: Path) -> None:
    plain = train(tmp_path)
    with pytest.warns(UserWarning, match="cuda_graphs=True has no effect, since accelerator='cpu' has no CUDA") as said:
        same(plain, train(tmp_path, cuda_graphs=True))
    assert len(said) == 1  # not in each epoch


class FakeGraph:
    """CUDA's recording as far as it can fail: an operation that cannot be recorded spoils it, and its end says so."""

    made: ClassVar[list[FakeGraph]] = []
    spoiled = False

    def __init__(self) -> None:
        self.state = "new"
        self.made.append(self)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.state, self.pool = "open", pool
        FakeGraph.spoiled = False

    def capture_end(self) -> None:
        if self.spoiled or self.state != "open":
            raise RuntimeError("operation failed due to a previous error during capture")
        self.state = "ended"

    def reset(self) -> None:
        self.state = "reset"

    def replay(self) -> None: ...


def test_a_recording_that_fails_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, ended = ["main"], []

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        streams.append(stream)
        try:
            yield
        finally:
            streams.pop()

    side = SimpleNamespace(device_index=1)
    for name, value in {
        "CUDAGraph": FakeGraph, "Stream": lambda device: side, "stream": on, "graph_pool_handle": lambda: (0, 7),
        "synchronize": lambda device: None, "empty_cache": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: ended.append(args), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: ended.append(args), raising=False)
    monkeypatch.setattr(FakeGraph, "made", [])
    recorder = CudaRecorder(torch.device("cpu"))

    def reads_a_value() -> None:
        assert streams == ["main", side]
        FakeGraph.spoiled = True
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):  # what the user did, not what followed from it
        recorder.capture(reads_a_value)
    assert streams == ["main"]
    assert ended == [(1, (0, 7))] * 2
    failed, empty = FakeGraph.made
    assert (failed.state, empty.state) == ("reset", "ended")  # the second brings the generator out of its recording
    result, replay = recorder.capture(lambda: 5)
    assert (result, replay) == (5, FakeGraph.made[-1].replay)
    assert FakeGraph.made[-1].state == "ended"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Stand | None:
    """Nothing on a device, which records by itself; on a CPU the stand-in, whose `module` must be set."""
    if gpu.DEVICE == "cuda":
        return None
    gpu.stand_in("torch.cuda.CUDAGraph: computes again at each replay")
    made = Stand()
    monkeypatch.setattr("instep.cuda_graphs.recorder_for", lambda device: made)
    return made


def graphed(folder: Path, recorder: Stand | None, module: Any, **settings: Any) -> Any:
    if recorder is not None:
        recorder.module = module
    return train(folder, module, cuda_graphs=True, **{**gpu.ON_DEVICE, **settings})


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_recorded_steps_on_a_device_have_the_plain_losses(
    scheduled: bool, precision: str, tmp_path: Path, caplog: Any, recorder: Stand | None
) -> None:
    scheduled = scheduled and gpu.on_device("a recorded optimizer whose rate changes")
    make = lambda: Net(scheduled=scheduled, device=gpu.DEVICE)  # noqa: E731
    plain = train(tmp_path, make(), **gpu.ON_DEVICE, precision=precision)
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("error")
        replayed = graphed(tmp_path, recorder, make(), precision=precision)
    same(plain, replayed, 1e-5 if precision == "32-true" else 1e-2)
    assert "the step is recorded" in caplog.text


@pytest.mark.gpu
def test_draws_differ_from_replay_to_replay(tmp_path: Path, recorder: Stand | None) -> None:
    outputs, _ = graphed(tmp_path, recorder, Net(dropout=0.5, device=gpu.DEVICE))
    assert len({row[0] for row in outputs}) == len(outputs)
    assert all(row[1] == pytest.approx(2 * row[0]) for row in outputs)


class Reading(Net):
    """Reads a value of the device in its step, which cannot be recorded, and drops activations out."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        float(batch[0].sum())
        if gpu.DEVICE == "cpu" and (calls := self.__dict__.setdefault("calls", [])) is not None:
            calls.append(batch_idx)
            if len(calls) == WARM_UP + 1:
                raise RuntimeError("operation not permitted when stream is capturing")
        return super().training_step(batch, batch_idx)


@pytest.mark.gpu
def test_a_step_that_cannot_be_recorded_goes_on_as_it_was(tmp_path: Path, recorder: Stand | None) -> None:
    size, held = 4096 if gpu.DEVICE == "cuda" else 8, list[int]()
    settings: dict[str, Any] = {"loader": data(12 * size, size), **gpu.ON_DEVICE}
    expected, stream = train(tmp_path, Net(dropout=0.5, device=gpu.DEVICE), **settings), gpu.current_stream()
    settings["before"] = lambda step, module: held.append(gpu.memory_bytes())
    with pytest.warns(UserWarning, match=r"not permitted when stream is capturing.*no step is recorded"):
        found = graphed(tmp_path, recorder, Reading(dropout=0.5, device=gpu.DEVICE), **settings)
    assert gpu.current_stream() == stream
    same(expected, found, 1e-5)  # and with it what dropout has drawn
    if gpu.on_device("that no batch is kept"):
        assert held[-1] - held[WARM_UP + 2] < 4 * size * 8 * 4  # four of the batches since


@pytest.mark.gpu
def test_a_recorded_run_resumes_where_it_was(tmp_path: Path, recorder: Stand | None) -> None:
    whole, _ = graphed(tmp_path, recorder, Net(dropout=0.5, device=gpu.DEVICE), max_epochs=4)
    graphed(tmp_path, recorder, Net(dropout=0.5, device=gpu.DEVICE), save=tmp_path / "half")
    again, _ = graphed(
        tmp_path, recorder, Net(dropout=0.5, device=gpu.DEVICE), max_epochs=4, ckpt_path=tmp_path / "half"
    )
    losses = [row[0] for row in whole][len(whole) // 2 :]
    assert [row[0] for row in again] == pytest.approx(losses, abs=1e-5)


def test_channels_last_stays_through_a_checkpoint(tmp_path: Path) -> None:
    class Pictures(TrainModule):
        def __init__(self, last: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 1))
            if last:
                self.to(memory_format=torch.channels_last)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01)

    loader = DataLoader(TensorDataset(torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(0))), 4)
    settings: Any = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    plain = Trainer(max_epochs=2, enable_checkpointing=False, **settings)
    expected = Pictures(last=False)
    plain.fit(expected, loader)
    first = Trainer(max_epochs=1, enable_checkpointing=False, **settings)
    first.fit(Pictures(last=False), loader)
    first.save_checkpoint(tmp_path / "plain")
    resumed = Pictures(last=True)
    Trainer(max_epochs=2, enable_checkpointing=False, **settings).fit(resumed, loader, ckpt_path=tmp_path / "plain")
    assert resumed.net[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(resumed.net[0].weight, expected.net[0].weight)

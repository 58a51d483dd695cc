"""What the package does on a CUDA device and no other test reaches, with one device.

Each test says in its first line which code it is for. `tests/helpers/gpu.py` says how they are rehearsed without one.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator, Callback
from instep.accelerator import (
    AutocastKwargs,
    GradScalerKwargs,
    ProfileKwargs,
    clear_device_cache,
    preparing,
    synchronize_rng_states,
)
from instep.big_models import attach_layerwise_casting_hooks, cpu_offload, cpu_offload_with_hook, disk_offload
from instep.callbacks import (
    DeviceStatsMonitor,
    EMAWeightAveraging,
    GradientMonitor,
    LearningRateFinder,
    ModelCheckpoint,
    ThroughputMonitor,
    WeightAveraging,
)
from instep.callbacks.progress import bar
from instep.cli.main import main
from instep.data import tune_loader
from instep.errors import NonFiniteError, SettingError
from instep.loggers import CSVLogger
from instep.profilers import PyTorchProfiler
from instep.strategies import DataParallelStrategy
from instep.trainer.log import ScalarTransfer
from instep.utils.flops import peak_flops
from instep.utils.seed import isolate_rng, rng_state, set_rng_state
from tests.callbacks.fakes import RecordingLogger
from tests.helpers import gpu
from tests.trainer.toys import LoggingToy, Toy, assert_same, loader, quiet, samples, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:This process .*multi-threaded:DeprecationWarning"),  # loaders fork beside CUDA
]
DEVICE = torch.device(gpu.DEVICE)


class Dropping(LoggingToy):
    """Draws on the device in each step, and keeps what it logged."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def on_the_device(**settings: Any) -> Any:
    return quiet(**gpu.ON_DEVICE, **settings)


# ---- a run


def test_a_run_ends_with_the_weights_of_one_on_the_cpu(tmp_path: Path) -> None:
    """`loaders`, `prefetch`, `log`, `run_clock` and `module`: batches, logged values and times of a device."""
    found: list[tuple[dict[str, Tensor], Tensor, float]] = []
    for settings in ({}, gpu.ON_DEVICE):
        torch.manual_seed(0)
        module = LoggingToy()
        trainer = quiet(**settings, max_epochs=3, logger=CSVLogger(tmp_path), log_every_n_steps=5)
        trainer.fit(module, loader(60, shuffle=True), loader(6))
        val_loss = float(trainer.callback_metrics["val_loss"])
        predictions = torch.cat(trainer.predict(module, loader(6)))  # pyright: ignore[reportArgumentType]
        found.append((weights(module), predictions.cpu(), val_loss))
        device = gpu.DEVICE if settings else "cpu"
        assert trainer.strategy.root_device.type == device
        assert module.on_gpu == (device == "cuda")
        assert trainer.run_summary is not None
        times = trainer.run_summary.time_s
        assert all(times[part] > 0 for part in ("forward", "backward", "optimizer"))
        assert sum(times.values()) == pytest.approx(trainer.run_summary.wall_s)
    (expected, output, loss), (on, output_on, loss_on) = found
    for name, value in expected.items():
        torch.testing.assert_close(on[name].cpu(), value, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output_on, output, atol=1e-4, rtol=1e-4)
    assert loss_on == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_draws_what_the_whole_one_did(background: bool, tmp_path: Path) -> None:
    """`background`, `codec` and `seed`: a state from a device's memory, with its generator's."""
    whole = Dropping()
    on_the_device(max_epochs=2).fit(whole, loader(24, shuffle=True))
    first, resumed = Dropping(), Dropping()
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=5, background=background)
    trainer = on_the_device(max_steps=10, callbacks=saving, enable_checkpointing=True)
    trainer.fit(first, loader(24, shuffle=True))
    torch.rand(7, device=DEVICE)  # what else the program draws
    path, saving = saving.last_model_path, ModelCheckpoint(tmp_path, every_n_train_steps=5, background=background)
    trainer = on_the_device(max_epochs=2, callbacks=saving, enable_checkpointing=True)
    trainer.fit(resumed, loader(24, shuffle=True), ckpt_path=path)
    assert_same(weights(resumed), weights(whole))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_run_come_out_of_pinned_memory(workers: int) -> None:
    """`index`: the loader's own batches, and those of its workers."""
    pinned: list[bool] = []

    class Looking(Toy):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            pinned.extend(part.is_pinned() for part in batch)
            return batch

    on_the_device(max_epochs=1).fit(Looking(), loader(num_workers=workers))
    assert len(pinned) == 8
    if gpu.on_device("that batches lie in pinned memory"):
        assert all(pinned)


def collate_there(batch: list[Any]) -> list[Tensor]:
    return [torch.stack(parts).to(DEVICE) for parts in zip(*batch, strict=True)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("where", ["data set", "collation"])
def test_data_may_be_on_the_device_already(where: str, precision: str) -> None:
    """`index` and `prefetch`: what cannot be pinned, and the step's stream may still compute."""
    x, y = samples().tensors
    there = TensorDataset(x.to(DEVICE), y.to(DEVICE))
    source = DataLoader(there, 3) if where == "data set" else DataLoader(samples(), 3, collate_fn=collate_there)
    found, expected = Toy(), Toy()
    found.load_state_dict(expected.state_dict())
    on_the_device(max_epochs=2, precision=precision).fit(found, source)
    on_the_device(max_epochs=2, precision=precision).fit(expected, loader())
    assert_same(weights(found), weights(expected))


def test_scalars_are_read_when_they_have_arrived() -> None:
    """`log.ScalarTransfer`: values of the device and of the host, of several dtypes."""
    values = [torch.tensor(1.5, device=DEVICE), 2, torch.tensor(3), torch.tensor(4.5, device=DEVICE).double()]
    five = torch.tensor(5, device=DEVICE)
    ScalarTransfer([*values, five]).floats()  # the first pinned memory may make the host wait
    gpu.keep_busy(0.3)
    transfer = ScalarTransfer([*values, five + 1])
    if gpu.on_device("that a transfer is on its way"):
        assert not transfer.ready
    assert transfer.floats() == [1.5, 2.0, 3.0, 4.5, 6.0]
    assert transfer.ready


def test_one_device_is_trained_on_alone() -> None:
    """`dp` and `devices`: strategies and indices of devices, with one that is there and one that is not."""
    module = Toy()
    with pytest.warns(UserWarning, match="strategy='dp' has one device here"):
        on_the_device(max_epochs=1, strategy=DataParallelStrategy(module="layer")).fit(module, loader())
    assert module.device.type == gpu.DEVICE
    said = "sees 1 GPUs, numbered from 0" if gpu.DEVICE == "cuda" else "sees no GPU: it trains on cpu"
    with pytest.raises(SettingError, match=said):
        on_the_device(max_epochs=1, strategy=DataParallelStrategy(device_ids=[7, 8])).fit(module, loader())
    if gpu.on_device("a choice of devices by index"):
        quiet(accelerator="gpu", devices=[0], max_epochs=1).fit(module, loader())
        assert module.device == torch.device("cuda", 0)
        with pytest.raises(SettingError, match=r"devices=\[63\]: this process sees \d+ cuda devices"):
            quiet(accelerator="gpu", devices=[63])


def test_an_average_is_kept_where_it_was_asked_for() -> None:
    """`weight_averaging`: averages in the host's memory of weights on a device."""
    found = []
    for where in (None, "cpu"):
        torch.manual_seed(2)
        module, averaging = Toy(), EMAWeightAveraging(where, decay=0.5)
        on_the_device(max_epochs=2, callbacks=averaging).fit(module, loader(), loader(3))
        found.append(weights(module))
        assert module.device.type == gpu.DEVICE
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)
    on_the_device(max_epochs=1, callbacks=WeightAveraging(gpu.DEVICE)).fit(Toy(), loader(), loader(3))


# ---- precision


class Overflowing(Toy):
    """Two layers with an optimizer each; in one step only the first one's gradients overflow."""

    def __init__(self, make: Callable[..., Any]) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.other, self.make = nn.Linear(4, 1), make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = (layer(batch[0]).float().square().mean() for layer in (self.layer, self.other))
        return first * (float("inf") if batch_idx == 1 else 1e-3) + second * 1e-3

    def configure_optimizers(self) -> Any:
        return [self.make(layer.parameters(), lr=0.1) for layer in (self.layer, self.other)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}])
def test_optimizers_of_one_loss_leave_a_step_out_together(
    settings: dict[str, Any], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gradients`: the scaler's flags of several optimizers, and of fused ones, which look at them by themselves."""
    gpu.allow_float16(monkeypatch)
    stepped: list[tuple[bool, bool]] = []

    class Watching(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.before = weights(module)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            after = weights(module)
            first, second = (
                not torch.equal(self.before[name], after[name]) for name in ("layer.weight", "other.weight")
            )
            stepped.append((first, second))

    module = Overflowing(lambda *args, **kwargs: torch.optim.SGD(*args, **kwargs, fused=fused))
    trainer = on_the_device(precision="16-mixed", max_epochs=1, callbacks=Watching(), **settings)
    trainer.fit(module, loader())
    done, left_out = (True, True), (False, False)
    assert stepped == (
        [done, left_out, done, done] if "accumulate_grad_batches" not in settings else [left_out] * 3 + [done]
    )
    assert trainer.strategy.precision.state_dict()["scale"] == 2.0**15


def test_a_search_leaves_the_scaler_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """`trial`: what a search for a learning rate whose gradients overflow does to the gradient scaler."""
    gpu.allow_float16(monkeypatch)
    scales: list[float] = []

    class Watching(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            scales.append(trainer.strategy.precision.state_dict()["scale"])

    class Overflows(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (1e-3 if scales else float("inf"))

    module = Overflows()
    search = LearningRateFinder(num_training_steps=8, early_stop_threshold=None, update_attr=False)
    trainer = on_the_device(precision="16-mixed", max_epochs=1, callbacks=[search, Watching()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no rate to suggest
        trainer.fit(module, loader(48))
    assert scales[0] == 2.0**16
    assert trainer.global_step == 16


def test_an_accelerator_scales_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accelerator` and its `loader`: float16, with the options of handlers, and a state that is saved."""
    gpu.allow_float16(monkeypatch)
    name = "fp16"
    if gpu.DEVICE == "cpu":
        monkeypatch.setitem(preparing._PRECISION, name := "fp16 of the rehearsal", "16-mixed")
    handlers = [GradScalerKwargs(init_scale=256.0, growth_interval=3), AutocastKwargs(cache_enabled=False)]
    skipped: list[bool] = []
    for part in ("first", "resumed"):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=gpu.DEVICE == "cpu", mixed_precision=name, kwargs_handlers=handlers)
        layer = nn.Linear(4, 1)
        model, optimizer, batches = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.1), loader())
        if part == "resumed":
            accelerator.load_state(tmp_path / "state")
            assert accelerator.scaler.get_scale() == 128.0
            accelerator.end_training()
            break
        for index, (x, y) in enumerate(batches):
            assert x.device.type == gpu.DEVICE
            output = model(x)
            assert output.dtype == torch.float32  # outputs of a prepared model are float32, as Accelerate's are
            with accelerator.autocast(AutocastKwargs(enabled=False)):
                assert nn.functional.linear(x, layer.weight).dtype == torch.float32
            with accelerator.autocast():
                assert nn.functional.linear(x, layer.weight).dtype == torch.float16
            loss = (output.squeeze(-1) - y).square().mean() * (float("inf") if index == 1 else 1.0)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            skipped.append(accelerator.optimizer_step_was_skipped)
            optimizer.zero_grad()
        accelerator.save_state(tmp_path / "state")
        accelerator.end_training()
    assert skipped == [False, True, False, False]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_with_a_nan_is_left_out_by_its_kernel(optimizer: Any, tmp_path: Path) -> None:
    """`nonfinite`: flags that stay on the device, and what they make of a run that stops."""

    class Sick(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (float("nan") if batch_idx == 2 else 1.0)

        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=0.1, fused=True)

    module, trainer = Sick(), on_the_device(max_epochs=1, nonfinite="skip")
    with pytest.warns(UserWarning, match=r"the loss is nan.*The update was left out \(number 1\)"):
        trainer.fit(module, loader())
    assert trainer.position.nonfinite_steps == 1
    assert all(torch.isfinite(p).all() for p in module.parameters())
    with pytest.raises(NonFiniteError, match="layer") as caught:
        on_the_device(max_epochs=1, nonfinite="stop").fit(Sick(), loader())
    assert caught.value.global_step == 3
    if gpu.on_device("a warning of optimizers that make the host wait"):

        class Slow(Toy):
            def configure_optimizers(self) -> Any:
                return torch.optim.RMSprop(self.parameters(), lr=0.1)

        with pytest.warns(UserWarning, match="makes the host wait for the device once per step of RMSprop"):
            on_the_device(max_epochs=1, nonfinite="skip").fit(Slow(), loader())


@pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32:UserWarning")  # torch 2.9's own
def test_products_are_rounded_only_where_it_was_asked_for() -> None:
    """`precision.float32_products`: TF32."""
    torch.manual_seed(0)
    one, other = torch.randn(256, 256, dtype=torch.float64), torch.randn(256, 256, dtype=torch.float64)
    exact = one @ other
    errors: dict[Any, float] = {}

    class Multiplying(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            product = one.to(DEVICE, torch.float32) @ other.to(DEVICE, torch.float32)
            errors[tf32] = float((product.cpu().double() - exact).norm() / exact.norm())
            return super().training_step(batch, batch_idx)

    for tf32 in (False, True) if gpu.on_device("TF32") else (False,):
        on_the_device(max_steps=1, tf32=tf32).fit(Multiplying(), loader())
    assert errors[False] < 1e-6
    if True in errors:
        assert 1e-5 < errors[True] < 1e-2
    assert torch.get_float32_matmul_precision() == "highest"


# ---- what watches a run


def test_monitors_read_the_device() -> None:
    """`device_stats_monitor`, `gradient_monitor`, `throughput_monitor`, `flops` and the bar's facts."""
    logger = RecordingLogger()
    monitors = [DeviceStatsMonitor(), GradientMonitor(), ThroughputMonitor(lambda batch: len(batch[0]), window_size=4)]
    on_the_device(max_epochs=1, logger=logger, callbacks=monitors, log_every_n_steps=2).fit(Toy(), loader(48))
    names = {name for _, row in logger.rows for name in row}
    prefix = "DeviceStatsMonitor.on_train_batch_end/"
    assert {"grad_2.0_norm/layer.weight", "grad_2.0_norm_total"} <= names
    assert any(name.endswith("batches_per_sec") for name in names)
    assert prefix + ("allocated_bytes.all.peak" if gpu.DEVICE == "cuda" else "cpu_percent") in names
    norms = logger.of("grad_2.0_norm_total")
    assert list(norms) == list(range(2, 17, 2))
    assert all(norm > 0 for norm in norms.values())
    bar._memory.cache_clear()
    facts = bar._memory(0)
    if gpu.on_device("what torch says of a device"):
        assert facts[-1].startswith("GPU ")
        peak = peak_flops(DEVICE, "bf16-mixed")
        assert peak is None or peak > 1e14
        assert (peak is not None) == any(name in torch.cuda.get_device_name() for name in ("H100", "H200", "A100"))


def test_nvidias_library_is_asked_about_the_device_of_the_run() -> None:
    """`device_stats_monitor`: NVML, by the UUID that torch knows."""
    logger, prefix = RecordingLogger(), "DeviceStatsMonitor.on_train_batch_end/"
    trainer = on_the_device(max_epochs=1, logger=logger, callbacks=DeviceStatsMonitor(), log_every_n_steps=1)
    trainer.fit(Toy(), loader(48))
    values = {name.removeprefix(prefix): value for _, row in logger.rows for name, value in row.items()}
    if gpu.on_device("what NVML says"):
        assert values["memory.total"] == pytest.approx(torch.cuda.get_device_properties(0).total_memory, rel=0.1)
        assert 0 < values["memory.used"] <= values["memory.total"]


def test_histograms_are_counted_in_a_deterministic_run() -> None:
    """`gradient_monitor`: counting is refused by torch on CUDA where algorithms must be deterministic."""

    class Kept(RecordingLogger):
        counts: list[float] = []

        def _log_histogram(self, name: str, histogram: Any, step: int) -> None:
            self.counts.append(float(histogram.counts.sum()))

    torch.use_deterministic_algorithms(True)
    try:
        module, logger = Dropping(), Kept()
        trainer = on_the_device(
            max_steps=2, logger=logger, log_every_n_steps=1, callbacks=GradientMonitor(histograms=True)
        )
        module.training_step = lambda batch, batch_idx: sum(p.sum() for p in module.parameters())  # no matrix product
        trainer.fit(module, loader())
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert logger.counts == [float(p.numel()) for p in module.parameters()] * 2


PROFILES = pytest.mark.skipif(
    gpu.REHEARSES and torch.version.cuda is not None,
    reason="not rehearsed: torch's profiler wants CUPTI where it is built for CUDA, and there may be none",
)


@PROFILES
def test_profiles_have_the_devices_kernels(tmp_path: Path) -> None:
    """`profilers.pytorch`: kernels, ranges for Nsight, and a snapshot of the allocator."""
    there = gpu.on_device("what a profile has of a device")
    options: dict[str, Any] = {"export_memory_snapshot": True} if there else {"activities": ["cpu"]}
    profiler = PyTorchProfiler(tmp_path, **options)
    on_the_device(max_steps=8, profiler=profiler).fit(Toy(), loader(40))
    table = (tmp_path / "fit-pytorch.txt").read_text()
    assert "Self CPU time total" in table
    trace = json.loads(next(tmp_path.glob("*.pt.trace.json")).read_text())
    if there:
        assert "Self CUDA time total" in table
        assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
        assert next(tmp_path.glob("*memory*.pickle")).stat().st_size > 0
        marked = PyTorchProfiler(tmp_path / "marked", emit_nvtx=True)
        on_the_device(max_steps=2, profiler=marked).fit(Toy(), loader())


@PROFILES
def test_an_accelerator_profiles_the_device(tmp_path: Path) -> None:
    """`accelerator.handlers.ProfileKwargs`: activities by their names."""
    kinds = ["cpu", "cuda"] if gpu.DEVICE == "cuda" else ["cpu"]
    accelerator = Accelerator(cpu=gpu.DEVICE == "cpu")
    with accelerator.profile(ProfileKwargs(activities=kinds)) as profile:
        product = torch.ones(64, 64, device=accelerator.device) @ torch.ones(64, 64, device=accelerator.device)
        assert float(product[0, 0]) == 64.0
    names = {event.key for event in profile.key_averages()}
    assert "aten::mm" in names
    accelerator.end_training()


def test_the_environment_names_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    """`cli.env`: devices, their memory, and the versions of CUDA and NCCL."""
    assert main(["env"]) == 0
    assert "torch" in capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    if gpu.on_device("what is said of a device"):
        assert said["versions"]["cuda"] == torch.version.cuda
        assert said["versions"]["nccl"].count(".") == 2
        [found] = [device for device in said["devices"] if device["device"] == "cuda:0"]
        assert found["name"] == torch.cuda.get_device_name(0)
        assert 0 < found["free_bytes"] <= found["memory_bytes"]


def test_a_loader_is_tuned_with_pinned_memory() -> None:
    """`data.tune`: what it tries where there is a device."""
    best, found = tune_loader(loader(64), workers=[0], seconds=0.05)
    assert found == [best]
    assert best.pin_memory == (gpu.DEVICE == "cuda")
    assert best.batches_per_s > 0


# ---- generators and memory


def drawn() -> list[float]:
    return torch.rand(3, device=DEVICE).tolist()


def test_the_devices_generator_is_kept_and_put_back() -> None:
    """`utils.seed` and `accelerator.rng`."""
    drawn()  # a device that was never used has no state
    state = rng_state()
    first = drawn()
    assert (gpu.DEVICE in state) == (gpu.DEVICE == "cuda")
    set_rng_state(state)
    assert drawn() == first
    with isolate_rng():
        second = drawn()
    assert drawn() == second
    with isolate_rng(include_cuda=False):
        third = drawn()
    assert (drawn() == third) == (gpu.DEVICE == "cpu")
    before = rng_state()
    synchronize_rng_states(["cuda", "python"])  # of one process: nothing changes
    after = rng_state()
    assert all(map(torch.equal, before.get("cuda", ()), after.get("cuda", ())))


def test_cached_memory_is_given_back() -> None:
    """`distributed.out_of_memory.clear_device_cache`."""
    held = torch.ones(2**24, device=DEVICE)
    del held
    cached = gpu.cached_bytes()
    clear_device_cache(garbage_collection=True)
    if gpu.on_device("how much memory is cached"):
        assert cached - gpu.cached_bytes() >= 4 * 2**24


class Deep(nn.Module):
    """Layers one after another, which are read one ahead."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_blocks_are_copied_ahead_of_their_forward(kind: str, tmp_path: Path) -> None:
    """`big_models.prefetch` and `hooks`: a thread's copies on a stream of its own."""
    width = 1024 if gpu.DEVICE == "cuda" else 64
    model = Deep(width).eval()
    x = torch.randn(4, width)
    with torch.no_grad():
        expected = [model(x * n) for n in range(1, 6)]
        if kind == "memory":
            cpu_offload(model, gpu.IN_A_MAP)
        else:
            disk_offload(model, tmp_path, gpu.IN_A_MAP)
        for n, value in enumerate(expected, 1):
            gpu.keep_busy(0.01)  # the step before has not ended when the next block's memory is given back
            found = model(x * n)
            torch.testing.assert_close(found.cpu(), value, atol=1e-4, rtol=1e-4)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_models_take_turns_on_the_device() -> None:
    """`big_models.hooks`: one model leaves the device when the next comes; layers kept in bfloat16."""
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    expected = other(one(torch.ones(2, 8)))
    first, first_hook = cpu_offload_with_hook(one, gpu.IN_A_MAP)
    second, second_hook = cpu_offload_with_hook(other, gpu.IN_A_MAP, prev_module_hook=first_hook)
    half = first(torch.ones(2, 8))
    assert half.device.type == one.weight.device.type == gpu.DEVICE
    found = second(half)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)
    assert one.weight.device.type == "cpu"
    second_hook.offload()
    assert other.weight.device.type == "cpu"
    model = Deep().to(DEVICE).eval()
    x = torch.randn(2, 64, device=DEVICE)
    with torch.no_grad():
        whole = model(x)
        attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, non_blocking=True)
        torch.testing.assert_close(model(x), whole, atol=0.05, rtol=0.05)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


# ---- compiling


@pytest.mark.filterwarnings("ignore")  # what torch's compiler thinks of small models
@pytest.mark.skipif(gpu.DEVICE == "cuda" and not (which("gcc") or which("clang")), reason="no C compiler for Triton")
def test_a_compiled_module_that_records_graphs_trains_the_same_weights() -> None:
    """`compile.overwrites_outputs` and `log`: the next step writes into what this one logged."""
    found = []
    recorded = gpu.on_device("torch.compile's own CUDA graphs")
    for compiled in (None, {"mode": "reduce-overhead"} if recorded else {"backend": "eager"}):
        torch.manual_seed(0)
        module = Logged()
        trainer = on_the_device(max_epochs=3, compile=compiled)
        trainer.fit(module, DataLoader(samples(48), 4, shuffle=True))
        found.append((weights(module), module.kept, float(trainer.callback_metrics["train_loss_epoch"])))
    (plain, kept, loss), (compiled_weights, kept_compiled, loss_compiled) = found
    for name, value in plain.items():
        torch.testing.assert_close(compiled_weights[name], value, atol=1e-4, rtol=1e-4)
    assert [float(each) for each in kept_compiled] == pytest.approx([float(each) for each in kept], abs=1e-4)
    assert loss_compiled == pytest.approx(loss, abs=1e-4)


class Logged(LoggingToy):
    """Keeps a copy of what its hook got of each step, and reads it at the end alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(outputs["loss"].clone())

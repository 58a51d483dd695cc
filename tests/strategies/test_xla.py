"""XLA: refusals and what processes of its own do, by stand-ins; the rest in `make test-xla`, where torch_xla is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from instep import Trainer
from instep.callbacks import Callback
from instep.errors import MissingPackageError, SettingError, StateError
from instep.state import GradientState, PartialState
from instep.strategies import Precision, XLAStrategy, resolve_strategy
from instep.strategies import xla as xla_file
from tests.helpers.spawn import HANG_S
from tests.strategies import xla_mlp
from tests.strategies.xla_mlp import TiedMLP, Trained, handwritten, train

ROOT = Path(__file__).parents[2]
XLA = torch.device("xla", 0)
absent = pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed")


def precision(name: str = "32-true") -> Precision:
    return Precision(name, XLA)


# ---- what is refused, anywhere


@pytest.mark.parametrize(
    "options, field", [({"spmd": "tensor"}, "spmd"), ({"spmd": "data", "blocks": (nn.Linear,)}, "blocks")]
)
def test_wrong_options_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingError) as caught:
        XLAStrategy(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "strategy, hint", [("xla", r"torch_xla\.launch\(main\)"), ("xla_spmd", "devices=1"), ("xla_fsdp", "devices=1")]
)
def test_several_processes_that_xla_did_not_start_are_refused(strategy: str, hint: str) -> None:
    with pytest.raises(SettingError, match=hint):
        resolve_strategy(strategy, 2)
    assert resolve_strategy(strategy, 1).name == strategy


def test_other_devices_and_float16_are_refused() -> None:
    with pytest.raises(SettingError, match="accelerator='xla'"):
        XLAStrategy().connect(torch.device("cpu"), Precision("32-true", torch.device("cpu")))
    with pytest.raises(SettingError, match="bf16-mixed"):
        XLAStrategy().connect(XLA, precision("16-mixed"))


@pytest.mark.parametrize("name", ["single_device", "ddp", "fsdp"])
def test_other_strategies_do_not_run_on_its_devices(name: str) -> None:
    with pytest.raises(SettingError, match="'xla_fsdp'"):
        resolve_strategy(name, 1).connect(XLA, precision())


def test_the_device_says_which_strategy_auto_is() -> None:
    assert resolve_strategy("auto", 1, "xla").name == "xla"
    assert resolve_strategy("auto", 1, "cuda").name == "single_device"


@absent
def test_xla_without_torch_xla_names_the_pip_install() -> None:
    with pytest.raises(MissingPackageError, match=r"pip install 'instep\[xla\]'"):
        XLAStrategy().connect(XLA, precision())
    with pytest.raises(SettingError, match="no such device"):
        Trainer(accelerator="xla")


# ---- one process per device: no such machine is here, so torch_xla is a list of what is asked of it


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of torch_xla, in order, by a process that is one of two."""
    asked: list[str] = []
    package, model = ModuleType("torch_xla"), ModuleType("torch_xla.core.xla_model")
    for module, name in (
        (package, "sync"),
        (model, "reduce_gradients"),
        (model, "broadcast_master_param"),
        (model, "set_rng_state"),
    ):
        monkeypatch.setattr(module, name, lambda *_, name=name: asked.append(name), raising=False)
    monkeypatch.setattr(model, "get_rng_state", lambda: 0, raising=False)
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setitem(sys.modules, "torch_xla.core", ModuleType("torch_xla.core"))
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", model)
    monkeypatch.setattr(xla_file, "_check_backward", lambda device: None)
    monkeypatch.setattr(xla_file, "add_generator", lambda *_: None)
    monkeypatch.setattr(PartialState, "num_processes", 2)
    return asked


@absent
def test_processes_average_their_gradients_once_a_window_and_before_clipping(calls: list[str]) -> None:
    PartialState(cpu=True)
    weight = nn.Parameter(torch.ones(2))
    optimizer, strategy = torch.optim.SGD([weight], lr=0.1), XLAStrategy()
    strategy.connect(XLA, precision())
    strategy.prepare_training(nn.Linear(1, 1), [optimizer])
    assert calls == ["set_rng_state", "broadcast_master_param"]
    calls.clear()
    with strategy.no_sync():
        strategy.backward(weight.sum())
    strategy.backward(weight.sum())
    assert calls == ["sync"]
    strategy.gradients.unscale(optimizer)  # what comes before a look at gradients, and before clipping
    strategy.gradients.unscale(optimizer)
    strategy.gradients.step(optimizer)
    assert calls == ["sync", "reduce_gradients", "sync"]
    strategy.backward(weight.sum())
    strategy.gradients.step(optimizer)
    assert calls[3:] == ["reduce_gradients", "sync"]
    calls.clear()
    strategy.gradients.step(optimizer, lambda: strategy.backward(weight.sum()))
    assert calls == ["reduce_gradients", "sync"]


@absent
def test_a_backward_before_the_device_was_known_is_explained() -> None:
    with pytest.raises(StateError, match="addressable_runtime_device_count"):
        xla_file._check_backward(XLA)


@absent
def test_devices_of_several_hosts_are_refused(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ModuleType("torch_xla.runtime")
    monkeypatch.setattr(runtime, "process_count", lambda: 4, raising=False)
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    with pytest.raises(SettingError, match=r"has 4 of them.*torch_xla\.launch"):
        XLAStrategy("fsdp").connect(XLA, precision())


@absent
def test_a_handwritten_loop_has_one_process(calls: list[str]) -> None:
    PartialState(cpu=True)
    strategy = XLAStrategy()
    strategy.connect(XLA, precision())
    with pytest.raises(SettingError, match="xla_spmd"):
        strategy.wrap(nn.Linear(1, 1))


# ---- with torch_xla: one device


@pytest.fixture(scope="module")
def metrics() -> Any:
    """torch_xla's counters, after torch has learned of its device."""
    import torch_xla.debug.metrics  # late: not everywhere
    import torch_xla.runtime

    torch_xla.runtime.addressable_runtime_device_count()
    return torch_xla.debug.metrics


@pytest.fixture(scope="module")
def alone(metrics: Any) -> Trained:
    """The run on the CPU."""
    return train(accelerator="cpu")


class Watch(Callback):
    """What has been compiled after each micro-batch, and when gradients were said to be reduced."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics
        self.compiled: list[int] = []
        self.synced: list[tuple[str, bool]] = []

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.synced.append(("backward", GradientState().is_xla_gradients_synced))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.synced.append(("before step", GradientState().is_xla_gradients_synced))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.compiled.append(self._metrics.metric_data("CompileTime")[0])


@pytest.mark.xla
def test_losses_are_those_of_the_cpu(metrics: Any, alone: Trained) -> None:
    watch = Watch(metrics)
    got = train(callbacks=[watch])
    assert got.losses == pytest.approx(alone.losses, abs=1e-5)
    assert got.metrics == pytest.approx(alone.metrics, abs=1e-5)
    assert got.losses[-1] < 0.5 * got.losses[0]
    # The first window makes gradients and the optimizer's state, the second is what follows, and the rate's last
    # change is to a round number, which XLA compiles in.
    assert watch.compiled[12] == watch.compiled[-1], watch.compiled
    assert watch.compiled[0] > 0
    assert watch.synced[:6] == 2 * [("backward", False), ("backward", False), ("before step", True)]
    fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
    assert fallbacks == ["aten::_local_scalar_dense"]  # .item()


@pytest.mark.xla
@pytest.mark.parametrize("name, dtype", [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_bfloat16_on_xla_is_near_float32(name: str, dtype: torch.dtype, alone: Trained, tmp_path: Path) -> None:
    got = train(precision=name, steps=4)
    assert got.losses == pytest.approx(alone.losses[:8], abs=3e-2)
    assert got.losses != pytest.approx(alone.losses[:8], abs=1e-5)
    path = got.trainer.save_checkpoint(tmp_path / "half")
    assert load_file(path / "model.safetensors")["up.weight"].dtype == dtype


@pytest.mark.xla
def test_a_resumed_run_draws_the_same_random_numbers(metrics: Any, tmp_path: Path) -> None:
    whole = train(dropout=0.5, steps=6)
    half = train(dropout=0.5, steps=3)
    path = half.trainer.save_checkpoint(tmp_path / "half")
    torch.rand(3, device=XLA).cpu()  # the device's stream has moved on
    rest = train(dropout=0.5, steps=6, ckpt_path=path)
    assert half.losses + rest.losses == whole.losses
    other = train(dropout=0.5, steps=3, seed=2)
    assert other.losses != half.losses


@pytest.mark.xla
def test_checkpoints_go_from_and_to_the_cpu(alone: Trained, tmp_path: Path) -> None:
    on_xla = train(steps=3).trainer.save_checkpoint(tmp_path / "xla")
    stored = load_file(on_xla / "model.safetensors")
    assert sorted(stored) == ["down.bias", "up.bias", "up.weight"]  # down.weight is up.weight
    on_cpu = train(accelerator="cpu", steps=3).trainer.save_checkpoint(tmp_path / "cpu")
    for kind, path in (("cpu", on_xla), ("xla", on_cpu)):
        resumed = train(accelerator=kind, steps=6, ckpt_path=path)
        assert resumed.losses == pytest.approx(alone.losses[6:12], abs=1e-5), kind


@pytest.mark.xla
def test_evaluation_outside_of_fit(alone: Trained) -> None:
    got = train()
    model = TiedMLP()
    model.load_state_dict(got.trainer.strategy.full_model_state())
    predictions = got.trainer.predict(got.module, xla_mlp.loader(2, shuffle=False))
    x = torch.cat([batch[0] for batch in xla_mlp.loader(2, shuffle=False)])
    torch.testing.assert_close(torch.cat(predictions), model(x).detach(), atol=1e-6, rtol=1e-5)
    [result] = got.trainer.validate(got.module, xla_mlp.loader(3, shuffle=False))
    assert result["val_loss"] == pytest.approx(got.metrics["val_loss"], abs=1e-6)


@pytest.mark.xla
def test_a_handwritten_loop_on_xla_ends_each_step_once(metrics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_xla  # late: not everywhere

    ends: list[int] = []
    sync = torch_xla.sync
    monkeypatch.setattr(torch_xla, "sync", lambda: ends.append(sync()))
    PartialState(xla=True)
    on_xla = handwritten()
    assert len(ends) == 4  # windows
    PartialState._reset_state()
    assert on_xla == pytest.approx(handwritten(cpu=True), abs=1e-5)


# ---- with torch_xla: two devices in one process of its own, since SPMD is for the whole process


@pytest.fixture(scope="module")
def spmd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `xla_spmd.py` saw."""
    environ = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-m", "tests.strategies.xla_spmd", str(tmp_path_factory.mktemp("spmd"))]
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=HANG_S)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.xla
@pytest.mark.parametrize(
    "name, cpu",
    [
        ("xla_spmd", "cpu"),
        ("xla_fsdp", "cpu"),
        ("xla_fsdp with blocks", "cpu"),
        ("odd batches", "cpu, odd"),
        ("handwritten", "cpu, handwritten"),
    ],
)
def test_losses_on_two_devices_are_those_of_the_cpu(name: str, cpu: str, spmd: dict[str, Any]) -> None:
    assert spmd["losses"][name] == pytest.approx(spmd["losses"][cpu], abs=1e-5)


@pytest.mark.xla
def test_weights_and_states_lie_as_the_strategy_says(spmd: dict[str, Any]) -> None:
    assert set(spmd["lies"]["xla_spmd"].values()) == {"{replicated}"}
    # (8, 8) weights are cut along the first dimension, and their moments alike
    assert spmd["lies"]["xla_fsdp"] == {
        "up.weight": "{devices=[2,1]0,1}",
        "up.bias": "{devices=[2]0,1}",
        "exp_avg": "{devices=[2,1]0,1}",
        "exp_avg_sq": "{devices=[2,1]0,1}",
    }
    assert spmd["lies"]["resumed"] == spmd["lies"]["xla_fsdp"]
    assert spmd["lies"]["batch"] == "{devices=[2,1]0,1}"
    assert spmd["lies"]["output"] == ""  # the compiler's choice
    assert spmd["lies"]["output of a block"] == "{devices=[2,1]0,1}"


@pytest.mark.xla
@pytest.mark.parametrize("way", ["xla_fsdp to cpu", "cpu to xla_fsdp", "xla_fsdp to xla_spmd"])
def test_checkpoints_of_two_devices(way: str, spmd: dict[str, Any]) -> None:
    assert spmd["resumed"][way] == pytest.approx(spmd["losses"]["cpu"][6:12], abs=1e-5)

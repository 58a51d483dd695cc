"""ZeRO on two processes and on one: the same losses as without it, and runs that go on bit for bit."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from instep import Trainer
from instep.callbacks import Callback, ModelCheckpoint
from instep.checkpoint import load_weights
from instep.errors import SettingError
from tests.helpers.spawn import run_ranks
from tests.strategies.tiny_gpt import GLOBAL_BATCH, Block, TinyGPT, loader, train

pytestmark = [pytest.mark.dist, pytest.mark.deepspeed]
STEPS, SAVED = 4, 2
SMALL: dict[str, Any] = {"layers": 2}
# The strategy's arguments, settings of the run, and how far losses may be from those of one process in float32.
Case = tuple[dict[str, Any], dict[str, Any], float]
STAGES: dict[str, Case] = {f"stage {stage}": ({"stage": stage}, {}, 1e-5) for stage in (1, 2, 3)}
MORE: dict[str, Case] = {
    "stage 2, offloaded": ({"stage": 2, "offload_optimizer": "cpu"}, {}, 1e-5),
    "stage 3, offloaded": ({"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}, {}, 1e-5),
    "stage 3, bf16": ({"stage": 3}, {"precision": "bf16-mixed"}, 0.05),
}
# 65,536 is too large a scale for some steps: they are left out, and the schedule waits.
FP16: dict[str, Case] = {"stage 2, fp16": ({"stage": 2}, {"precision": "16-true"}, 0.3)}
HAS_FP16 = torch.ops.mkldnn._is_mkldnn_fp16_supported()  # what DeepSpeed asks on a CPU


class Halved(Callback):
    """Halves the gradients before each step."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        trainer.strategy.gradients.multiply(optimizer, 0.5)


class InfiniteOnce(TinyGPT):
    """The gradient of one parameter is infinite in the second micro-batch, whose loss is not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            hook = self.norm.bias.register_hook(lambda grad: (hook.remove(), torch.full_like(grad, float("inf")))[1])
        return loss


class Descends(TinyGPT):
    """Steps by the gradient itself: Adam does not mind a factor."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class BuiltLate(TinyGPT):
    """Its last block is made in `configure_model`, where stage 3 cuts up what is made."""

    def configure_model(self) -> None:
        if len(self.blocks) == SMALL["layers"]:
            self.blocks.append(Block())


class LeavesWindowsOpen(Callback):
    """Ends each epoch in the middle of a window."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 6 else None  # windows of 4


def strategy_of(arguments: dict[str, Any]) -> Any:
    from instep.strategies import DeepSpeedStrategy

    return DeepSpeedStrategy(**arguments)


def saver(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, every_n_train_steps=SAVED, save_top_k=-1)


def run(strategy: Any, folder: Path, ckpt_path: Path | None = None, **settings: Any) -> list[float]:
    """Losses by step, with checkpoints; on one process in windows twice as long as on two."""
    torch.manual_seed(1 if ckpt_path is None else 99)
    return train(
        strategy,
        steps=STEPS,
        module=TinyGPT(**SMALL),
        callbacks=[saver(folder)],
        enable_checkpointing=True,
        ckpt_path=ckpt_path,
        **settings,
    ).losses


def trained(cases: dict[str, Case], root: Path) -> dict[str, tuple[list[float], list[float]]]:
    """By case: the losses, and those of a run that went on in the middle."""
    found = {}
    for name, (arguments, settings, _) in cases.items():
        whole = run(strategy_of(arguments), root / name, **settings)
        rest = run(strategy_of(arguments), root / "b" / name, middle(root / name), **settings)
        found[name] = whole, rest
    return found


def middle(folder: Path) -> Path:
    return folder / f"step-0000000{SAVED}-1"


def small() -> TinyGPT:
    torch.manual_seed(1)
    return TinyGPT(**SMALL)


def altered(strategy: str) -> dict[str, list[float]]:
    """Runs in which something happens between backward and step."""
    torch.manual_seed(1)
    bad = InfiniteOnce(**SMALL)
    with warnings.catch_warnings():
        descends, settings = Descends(**SMALL), {"steps": STEPS, "gradient_clip_val": None}
        halved = train(strategy, module=descends, callbacks=[Halved()], **settings).losses
        guard = Quiet("nonfinite")
        skipped = train(strategy, steps=STEPS, module=bad, callbacks=[guard], nonfinite="skip").losses
    return {"halved": halved, "skipped": skipped}


class Quiet(Callback):
    """Turns the guard's reports, which are meant, into no errors."""

    def __init__(self, text: str) -> None:
        self.text = text

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        warnings.filterwarnings("ignore", "global_step .* not finite")


def afterwards(stage: int, folder: Path) -> dict[str, Any]:
    """What can be done with a module when its fit is over."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "strategy": f"deepspeed_stage_{stage}",
        "global_batch_size": GLOBAL_BATCH,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    module = small()
    trainer = Trainer(max_steps=2, val_check_interval=4, **settings)
    warnings.simplefilter("error")
    trainer.fit(module, loader(), loader(GLOBAL_BATCH, shuffle=False))
    losses = [trainer.callback_metrics["val_loss"].item()]
    losses += [trainer.validate(module, loader(GLOBAL_BATCH, shuffle=False), verbose=False)[0]["val_loss"]]
    shapes = [it.shape for it in trainer.predict(module, loader(GLOBAL_BATCH, shuffle=False)) or []]
    trainer.save_checkpoint(folder / "last")
    whole = trainer.strategy.full_model_state()
    again = Trainer(max_steps=4, **settings)
    again.fit(module, loader())
    return {"losses": losses, "shapes": shapes, "whole": whole, "again": again.callback_metrics["train_loss"].item()}


def on_two(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = trained(STAGES, root)
    found["stage 0"] = train("deepspeed_stage_0", steps=STEPS, module=small()).losses
    found["after"] = afterwards(3, root / "after")
    found["built late"] = built_late("deepspeed_stage_3")
    return found


def built_late(strategy: str) -> list[float]:
    torch.manual_seed(1)
    return train(strategy, steps=2, module=BuiltLate(**SMALL)).losses


def more_on_two(root: Path) -> dict[str, Any]:
    return {
        **trained(MORE | FP16 if HAS_FP16 else MORE, root),
        "altered": {it: altered(f"deepspeed_stage_{it}") for it in (1, 2, 3)},
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def alone(root: Path) -> list[float]:
    return run("auto", root / "plain")


@pytest.fixture(scope="module")
def two(root: Path, alone: list[float]) -> list[dict[str, Any]]:
    return run_ranks(on_two, 2, root)


@pytest.fixture(scope="module")
def more(root: Path) -> list[dict[str, Any]]:
    return run_ranks(more_on_two, 2, root)


def check(ranks: list[dict[str, Any]], name: str, alone: list[float], tolerance: float) -> None:
    for rank in ranks:
        whole, rest = rank[name]
        assert len(whole) == STEPS
        assert whole == pytest.approx(alone, abs=tolerance)
        assert rest == whole[SAVED:]


@pytest.mark.parametrize("name", STAGES)
def test_losses_are_those_of_one_process_and_a_run_goes_on_bit_for_bit(
    name: str, two: list[dict[str, Any]], alone: list[float]
) -> None:
    check(two, name, alone, STAGES[name][2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *MORE,
        *(
            pytest.param(name, marks=pytest.mark.skipif(not HAS_FP16, reason="the processor has no float16"))
            for name in FP16
        ),
    ],
)
def test_offloaded_and_in_low_precision_a_run_goes_on_bit_for_bit(
    name: str, more: list[dict[str, Any]], alone: list[float]
) -> None:
    check(more, name, alone, (MORE | FP16)[name][2])


def test_a_module_that_is_made_in_parts_is_the_same(two: list[dict[str, Any]]) -> None:
    assert two[1]["built late"] == pytest.approx(built_late("auto"), abs=1e-5)


def test_stage_0_is_plain_data_parallelism(two: list[dict[str, Any]], alone: list[float]) -> None:
    assert two[0]["stage 0"] == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_low_precision_keeps_float32_weights(more: list[dict[str, Any]], root: Path) -> None:
    weights = load_weights(middle(root / "stage 3, bf16"))
    assert weights["head.weight"].dtype == torch.float32
    assert weights["head.weight"] is weights["embedding.weight"]
    assert not torch.equal(weights["head.weight"], weights["head.weight"].bfloat16().float())


@pytest.mark.slow
def test_gradients_are_multiplied_and_left_out_as_without_it(more: list[dict[str, Any]]) -> None:
    expected = altered("auto")
    assert expected["halved"] != expected["skipped"]
    for rank in more:
        for stage, found in rank["altered"].items():
            assert found["halved"] == pytest.approx(expected["halved"], abs=1e-5), stage
            assert found["skipped"] == pytest.approx(expected["skipped"], abs=1e-5), stage


def test_after_a_fit_the_module_is_evaluated_saved_and_trained_again(two: list[dict[str, Any]], root: Path) -> None:
    first, second = (rank["after"] for rank in two)
    assert first["losses"][0] == pytest.approx(first["losses"][1], abs=1e-6)
    assert {tuple(shape) for shape in first["shapes"]} == {(4, 32)}
    assert first["again"] == second["again"] < 5.0
    assert second["whole"] == {}
    saved = load_weights(root / "after" / "last")
    assert saved.keys() == first["whole"].keys() == small().state_dict().keys()
    assert all(torch.equal(saved[key], value) for key, value in first["whole"].items())


def on_one(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("auto", "deepspeed_stage_2", "deepspeed_stage_3"):
        found[strategy] = train(
            strategy, steps=6, module=small(), callbacks=[LeavesWindowsOpen()], limit_val_batches=0
        ).losses
        short = train(strategy, steps=2, module=small(), limit_train_batches=1, limit_val_batches=0)
        found[f"{strategy}, short epochs"] = short.losses  # of one batch, in windows of 4
    found["anew"] = trained_anew()
    found["refused"] = refusals()
    return found


def trained_anew() -> list[list[float]]:
    """Of two fits with one strategy, between which the module got its first weights again."""
    kept, module = strategy_of({"stage": 2}), small()
    weights = copy.deepcopy(module.state_dict())
    losses = []
    for _ in range(2):
        losses.append(train(kept, steps=2, module=module, limit_val_batches=0).losses)
        module.load_state_dict(weights)
    return losses


def refusals() -> dict[str, str]:
    class Manual(TinyGPT):
        def __init__(self) -> None:
            super().__init__(**SMALL)
            self.automatic_optimization = False

    class ByRows(TinyGPT):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adafactor(self.parameters())

    class ByShape(TinyGPT):
        def configure_optimizers(self) -> Any:
            flat = [p for p in self.parameters() if p.ndim < 2]
            return torch.optim.AdamW([{"params": flat}, {"params": [p for p in self.parameters() if p.ndim >= 2]}])

    runs: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "manual": (Manual, {}, {"global_batch_size": None, "gradient_clip_val": None}),
        "optimizer": (ByRows, {}, {}),
        "shape": (ByShape, {"stage": 3}, {}),
        "value": (TinyGPT, {}, {"gradient_clip_algorithm": "value"}),
        "clip": (TinyGPT, {"config": {"gradient_clipping": 0.5}}, {}),
        "accumulation": (TinyGPT, {"config": {"gradient_accumulation_steps": 3}}, {}),
        "precision": (TinyGPT, {}, {"precision": "64-true"}),
        "contradiction": (TinyGPT, {"config": {"bf16": {"enabled": True}}}, {}),
    }
    said = {}
    for name, (cls, arguments, settings) in runs.items():
        try:
            train(strategy_of(arguments), steps=1, module=cls(), **settings)
        except SettingError as error:
            said[name] = str(error)
    return said


def test_deepspeed_on_one_process_agrees_and_refuses_unfit_modules(tmp_path: Path) -> None:
    (found,) = run_ranks(on_one, 1, tmp_path)
    for stage in (2, 3):
        for kind in ("", ", short epochs"):
            assert found[f"deepspeed_stage_{stage}{kind}"] == pytest.approx(found[f"auto{kind}"], abs=1e-5)
    assert found["anew"][0] == found["anew"][1]
    parts = {
        "manual": "optimizes manually",
        "optimizer": "Adafactor may look at whole parameters",
        "shape": "tell them apart by p.ds_shape",
        "value": "clips by norm",
        "clip": r"gradient_clipping=0.5, and the run clips at 1.0",
        "accumulation": "accumulates 4 micro-batches",
        "precision": "not there with DeepSpeed",
        "contradiction": "bf16.enabled=True",
    }
    assert found["refused"].keys() == parts.keys()
    for name, part in parts.items():
        assert part in found["refused"][name]


def on_a_disk(root: Path) -> list[list[float]]:
    SMALL["layers"] = 24  # less stays in memory
    nvme = {"stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme", "nvme_path": str(root / "disk")}
    return [*trained({"nvme": (nvme, {}, 1e-5)}, root)["nvme"]]


@pytest.mark.slow
@pytest.mark.skipif(
    "INSTEP_TEST_NVME" not in os.environ,
    reason="INSTEP_TEST_NVME=1 runs it; DeepSpeed then compiles async_io for some minutes, which needs libaio",
)
def test_states_on_a_disk_are_those_of_one_process_and_go_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load(verbose=False)  # before two processes compile it
    monkeypatch.setitem(SMALL, "layers", 24)
    alone = run("auto", tmp_path / "alone")
    for whole, rest in run_ranks(on_a_disk, 2, tmp_path):
        assert whole == pytest.approx(alone, abs=1e-5)
        assert rest == whole[SAVED:]

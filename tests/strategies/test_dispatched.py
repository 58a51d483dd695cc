"""Models with a device map under the Trainer: they stay where the map has put them, and give what whole ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from instep import Trainer, TrainModule
from instep.big_models import init_empty_weights, load_checkpoint_and_dispatch
from instep.checkpoint import load_weights, write_tensors
from instep.errors import SettingError
from tests.helpers.spawn import run_ranks
from tests.strategies.tiny_gpt import TinyGPT, loader

HALF = {"embedding": "cpu", "position": "cpu", "head": "cpu", "norm": "cpu", "blocks.0": "cpu", "blocks.1": "disk"}
ON_CPU = {"": "cpu"}


class Big(TrainModule):
    def __init__(self, file: Path, device_map: Any) -> None:
        super().__init__()
        self.file, self.device_map = file, device_map
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            with init_empty_weights():
                net = TinyGPT(layers=2)
            self.net = load_checkpoint_and_dispatch(net, self.file, device_map=self.device_map)

    def training_step(self, batch: Any) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any) -> None:
        self.log("mean", self.net(batch[0]).mean())

    test_step = validation_step

    def predict_step(self, batch: Any) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(strategy: str = "auto") -> Trainer:
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", strategy=strategy, max_steps=1, enable_model_summary=False, **quiet)


def predicted(strategy: str, file: Path) -> Tensor:
    outputs: Any = trainer(strategy).predict(Big(file, HALF), loader(7, 3, shuffle=False))
    return torch.cat(outputs)


def saved(folder: Path) -> tuple[Path, Tensor]:
    torch.manual_seed(0)
    net, file = TinyGPT(layers=2), folder / "model.safetensors"
    write_tensors(file, net.state_dict())
    with torch.no_grad():
        return file, torch.cat([net(batch[0]) for batch in loader(7, 3, shuffle=False)])


def test_evaluations_leave_weights_where_the_map_has_put_them(tmp_path: Path) -> None:
    file, expected = saved(tmp_path)
    assert torch.equal(predicted("auto", file), expected)
    module = Big(file, HALF)
    for evaluate in (trainer().validate, trainer().test):
        (found,) = evaluate(module, loader(7, 3, shuffle=False), verbose=False)
        assert found["mean"] == pytest.approx(float(expected.mean()), abs=1e-6)
    assert all(p.is_meta for p in module.net.blocks[1].parameters())


def test_offloaded_weights_are_not_trained_and_trained_ones_are_the_models_own(tmp_path: Path) -> None:
    file, _ = saved(tmp_path)
    before = load_weights(file)
    with pytest.raises(SettingError, match=r"weights of Big .* are offloaded .* such as net\.blocks\.1\."):
        trainer().fit(Big(file, HALF), loader(4, 2))
    module = Big(file, ON_CPU)
    trainer().fit(module, loader(4, 2))
    assert not torch.equal(module.net.norm.weight, before["norm.weight"])
    another = Big(file, ON_CPU)  # mapped from the same file in the same process
    another.configure_model()
    assert torch.equal(another.net.norm.weight, before["norm.weight"])


def _two_ranks(file: Path) -> Any:
    with pytest.raises(SettingError, match="a model in Big is spread by a device map already"):
        predicted("fsdp", file)
    return predicted("ddp", file)


@pytest.mark.dist
def test_each_rank_has_a_copy_mapped_from_the_same_files(tmp_path: Path) -> None:
    file, expected = saved(tmp_path)
    for found in run_ranks(_two_ranks, 2, file):
        torch.testing.assert_close(found, expected)

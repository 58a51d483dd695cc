"""Pruned runs: the same masks on all ranks and after a stop, and plain weights in checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from instep import TrainModule
from instep.callbacks import ModelCheckpoint, ModelPruning
from instep.checkpoint import load_weights
from instep.errors import Preempted, SettingError
from tests.helpers.spawn import run_ranks
from tests.trainer.resuming import StopAt, _same
from tests.trainer.toys import Toy, assert_same, loader, quiet


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.last(torch.tanh(self.norm(self.first(x)))).squeeze(-1), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.last(torch.tanh(self.norm(self.first(x)))).squeeze(-1), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def fit(root: Path, pruning: ModelPruning, *others: Any, seed: int = 1, **settings: Any) -> tuple[Net, Any, Path]:
    torch.manual_seed(seed)
    module, saver = Net(), ModelCheckpoint(save_last=True)
    trainer = quiet(
        **{"max_epochs": 4, "default_root_dir": root, "trigger_every": 1, "enable_checkpointing": True, **settings},
        callbacks=[pruning, saver, *others],
    )
    try:
        trainer.fit(module, loader(24, 4), loader(8, 4), ckpt_path="auto")
    except Preempted:
        assert others
    return module, trainer, Path(saver.last_model_path)


def sparsity(state: dict[str, Any]) -> float:
    weights = [value for name, value in state.items() if name.startswith(("first", "last"))]
    return sum(int((value == 0).sum()) for value in weights) / sum(value.numel() for value in weights)


CASES: dict[str, dict[str, Any]] = {
    "l1": {"pruning_fn": "l1_unstructured"},
    "random": {"pruning_fn": "random_unstructured", "resample_parameters": True},
    "kept masks": {"pruning_fn": "l1_unstructured", "make_pruning_permanent": False, "amount": lambda epoch: 5 + epoch},
    "structured": {
        "pruning_fn": "ln_structured", "use_global_unstructured": False, "pruning_dim": 0, "pruning_norm": 2,
        "parameter_names": ["weight"], "use_lottery_ticket_hypothesis": False, "prune_on_train_epoch_end": False,
    },
}  # fmt: skip


class OfLinear(ModelPruning):
    def filter_parameters_to_prune(self, parameters_to_prune: Any = ()) -> Any:
        return [(part, name) for part, name in parameters_to_prune if isinstance(part, nn.Linear)]


@pytest.mark.parametrize("name", CASES)
def test_a_stopped_run_ends_with_the_same_bits(tmp_path: Path, name: str) -> None:
    def pruning() -> ModelPruning:
        return OfLinear(**{"amount": 0.3, **CASES[name]})

    whole, trainer, path = fit(tmp_path / "whole", pruning())
    for number, stop in enumerate((5, 8, 16)):  # 6 steps an epoch: before the epoch's end, within one
        fit(tmp_path / "stopped", pruning(), StopAt(stop), seed=1 + number)
    again, resumed, _ = fit(tmp_path / "stopped", pruning(), seed=20)
    assert_same(dict(again.state_dict()), dict(whole.state_dict()))
    _same(resumed.optimizers[0].state_dict(), trainer.optimizers[0].state_dict(), "optimizer")
    permanent = CASES[name].get("make_pruning_permanent", True)
    assert hasattr(whole.first, "weight_mask") is not permanent
    held = load_weights(path)
    assert ("first.weight" in held) is permanent
    losses = [trainer.validate(module, loader(), ckpt_path=path, verbose=False) for module in (Net(), whole)]
    assert losses[0] == losses[1]
    if permanent:
        assert 0.3 < sparsity(held) == sparsity(dict(whole.state_dict()))
        assert_same(dict(Net.load_from_checkpoint(path).state_dict()), dict(whole.state_dict()))


def test_what_is_left_has_its_first_values_and_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    first = Net().state_dict()
    with caplog.at_level(logging.INFO):
        module, *_ = fit(tmp_path, ModelPruning("l1_unstructured", amount=0.25, verbose=1), max_epochs=1)
    for name in ("first.weight", "last.weight", "last.bias"):
        value = module.state_dict()[name]
        assert torch.equal(value, first[name] * (value != 0))
    lines = [message for message in caplog.messages if message.startswith("Applied")]
    assert lines == ["Applied `L1Unstructured`. Pruned: 0/65 (0.00%) -> 16/65 (24.62%)"]


def test_earlier_masks_are_not_kept(tmp_path: Path) -> None:
    pruning = OfLinear("l1_unstructured", amount=1, make_pruning_permanent=False)
    module, *_ = fit(tmp_path, pruning, max_epochs=20)
    hooks = [hook for part in (module.first, module.last) for hook in part._forward_pre_hooks.values()]
    assert [len(hook) for hook in hooks if isinstance(hook, prune.PruningContainer)] == [1, 1, 1, 1]
    assert int(sum((mask == 0).sum() for name, mask in module.named_buffers() if name.endswith("_mask"))) == 20


def test_wrong_arguments_are_named() -> None:
    for arguments, text in (
        ({"pruning_fn": "l2"}, "isn't available"),
        ({"pruning_fn": prune.L1Unstructured(0.5)}, "not an object of it"),
        ({"pruning_fn": "ln_structured", "pruning_dim": 0}, "`pruning_norm` should be provided"),
        ({"pruning_fn": "random_structured", "pruning_dim": 0}, "set use_global_unstructured=False"),
        ({"pruning_fn": prune.L1Unstructured, "use_global_unstructured": False}, "only supported with"),
        ({"amount": 2.0}, "amount=2.0: expected a fraction"),
        ({"amount": -1}, "amount=-1: expected a fraction"),
        ({"amount": "half"}, "should be provided and be either"),
        ({"verbose": 3}, "any of"),
        ({"parameter_names": ["gamma"]}, "gamma isn't in"),
    ):
        with pytest.raises(SettingError, match=text):
            ModelPruning(**{"pruning_fn": "l1_unstructured", **arguments})
    toy, stranger = Toy(), nn.Linear(2, 2)
    for places, text in (
        ([(stranger, "weight")], "missing modules"),
        ([(toy.layer, "gamma")], "gamma"),
        ([1], "list of tuple"),
    ):
        with pytest.raises(SettingError, match=text):
            quiet(max_epochs=1, callbacks=[ModelPruning("l1_unstructured", places)]).fit(toy, loader())
    two = [ModelPruning("l1_unstructured"), ModelPruning("l1_unstructured")]
    with pytest.raises(SettingError, match="prune the same parameters"):
        quiet(max_epochs=1, callbacks=two).fit(toy, loader())


def prune_on_ranks(root: Path) -> dict[str, Any]:
    def pruning() -> ModelPruning:
        return ModelPruning("random_unstructured", amount=0.3, resample_parameters=True)

    settings = {"devices": "auto", "strategy": "ddp", "max_epochs": 3}
    whole, *_ = fit(root / "whole", pruning(), **settings)
    fit(root / "stopped", pruning(), StopAt(4), **settings)
    again, *_ = fit(root / "stopped", pruning(), **settings)
    assert_same(dict(again.state_dict()), dict(whole.state_dict()))
    with pytest.raises(SettingError, match="needs whole parameters, and strategy='fsdp'"):
        fit(root / "cut", pruning(), devices="auto", strategy="fsdp")
    return {name: value for name, value in whole.state_dict().items() if "norm" not in name}


@pytest.mark.dist
def test_all_ranks_have_the_masks_of_the_first(tmp_path: Path) -> None:
    first, second = run_ranks(prune_on_ranks, 2, tmp_path)
    assert_same(first, second)
    assert sparsity(first) > 0.5

"""Groups of parameters by name and layer; and every optimizer of torch resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instep import TrainModule
from instep.errors import SettingError
from instep.optim import biases_and_norms, layerwise_lr, param_groups
from tests.trainer.toys import quiet


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def names(module: nn.Module, group: dict[str, Any]) -> list[str]:
    known = {p: name for name, p in module.named_parameters()}
    return [known[p] for p in group["params"]]


def test_every_parameter_is_in_one_group() -> None:
    module = Tied()
    module.layers[0].bias.requires_grad = False
    options = {biases_and_norms: {"weight_decay": 0.0}, "head.*": {"lr": 1.0}, "layers.2.*": {"lr": 2.0, "name": "top"}}
    groups = param_groups(module, options, lr=0.1, weight_decay=0.5)
    got = {group["name"]: (names(module, group), group["lr"], group["weight_decay"]) for group in groups}
    assert got == {
        "head": (["embed.weight"], 1.0, 0.5),  # tied: by its second name
        "rest": (["layers.0.weight", "layers.1.weight"], 0.1, 0.5),
        "biases_and_norms": (["layers.1.bias", "norm.weight", "norm.bias"], 0.1, 0.0),
        "top": (["layers.2.weight"], 2.0, 0.5),
        "biases_and_norms+head": (["head.bias"], 1.0, 0.0),
        "biases_and_norms+top": (["layers.2.bias"], 2.0, 0.0),
    }
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters())) - 1
    assert "layers.0.bias" in names(module, param_groups(module, frozen=True)[0])


def test_names_are_those_without_wrappers() -> None:
    module = Tied().to("meta")
    compiled = nn.Module()  # as torch.compile wraps it, which takes seconds
    compiled._orig_mod = module.layers[1]
    module.layers[1] = compiled
    assert [group["name"] for group in param_groups(module, {"layers.1.weight": {"lr": 1.0}})] == [
        "rest",
        "layers.1.weight",
    ]


def test_rates_by_layer() -> None:
    module = Tied()
    options = {biases_and_norms: {"weight_decay": 0.0}, "norm.*": {"lr": 7.0}}
    groups = layerwise_lr(module, "layers.*", lr=16.0, decay=0.5, options=options, weight_decay=0.1)
    rates = {name: group["lr"] for group in groups for name in names(module, group)}
    assert rates == {
        "embed.weight": 1.0,
        **{f"layers.{n}.{part}": 2.0 * 2**n for n in range(3) for part in ("weight", "bias")},
        "norm.weight": 7.0,
        "norm.bias": 7.0,
        "head.bias": 16.0,
    }
    assert len({group["name"] for group in groups}) == len(groups)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: param_groups(m, {"heads.*": {}}), "'heads.\\*' matches no parameter. Near: head.bias"),
        (lambda m: param_groups(m, {3: {}}), "keys that are patterns"),
        (lambda m: param_groups(m, {"head.*": {"weigt_decay": 0.0}}), "Did you mean 'weight_decay'"),
        (lambda m: layerwise_lr(m, "layers.*", lr=1.0, options={"*": {"beta": 0.0}}), "takes. Did you mean 'betas'"),
        (lambda m: param_groups(m.parameters(), {}), "module is a generator: expected the nn.Module itself"),
        (lambda m: param_groups({"*": {}}, m), "module is a dict"),
        (lambda m: param_groups(m, m), "expected options by pattern"),
        (lambda m: param_groups(m, {"*": 0.1}), "expected a dict of options for"),
        (lambda m: layerwise_lr(m, "encoder.*", lr=1.0), "matches no parameter"),
        (lambda m: layerwise_lr(m, "layers", lr=1.0), "with one \\* for its number"),
        (lambda m: layerwise_lr(m, "layers.*", lr=1.0, decay=1.5), "decay=1.5"),
        (lambda m: param_groups(m.requires_grad_(False)), "nothing to optimize"),
    ],
)
def test_wrong_parameter_groups_are_refused(call: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        call(Tied())


# ---- every optimizer of torch

OPTIMIZERS = sorted(
    name
    for name in torch.optim.__all__
    if isinstance(cls := getattr(torch.optim, name), type)
    and issubclass(cls, torch.optim.Optimizer)
    and name != "Optimizer"
)


class Small(TrainModule):
    """Two matrices: no bias, which Muon does not take; SparseAdam wants sparse gradients."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(6, 4, sparse=optimizer == "SparseAdam")
        self.out = nn.Linear(4, 2, bias=False).requires_grad_(optimizer != "SparseAdam")
        self.optimizer = optimizer

    def training_step(self, batch: Any) -> Any:
        return self.out(self.table(batch)).square().mean()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.arange(12) % 6, batch_size=2, shuffle=True)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)([p for p in self.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    whole = Small(name)
    quiet(max_steps=8).fit(whole)
    torch.manual_seed(3)
    first = Small(name)
    before = quiet(max_steps=5)
    before.fit(first)
    path = before.save_checkpoint(tmp_path / "half")
    torch.manual_seed(4)
    second = Small(name)
    after = quiet(max_steps=8)
    after.fit(second, ckpt_path=path)
    assert after.global_step == 8
    for key, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[key], value), key
        assert name == "SparseAdam" or not torch.equal(first.state_dict()[key], value)

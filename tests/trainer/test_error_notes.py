"""An error that passes through a run names its place; a loss or an optimizer with nothing to train names the cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator, Callback
from instep.errors import HookError, UsageError
from tests.trainer.toys import Toy, quiet, samples

F = nn.functional


class Classifier(Toy):
    """Three classes out of four features, by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


def labelled(y: Tensor, width: int = 4, x_dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(len(y), width, dtype=x_dtype), y), batch_size=2)


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


class FailsLater(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss((batch[0][:, : 4 - batch_idx], batch[1]))


@pytest.mark.parametrize(
    ("module", "loader", "place", "layer"),
    [
        (
            Classifier,
            labelled(torch.zeros(6, dtype=torch.int64), width=3),
            "Classifier.training_step, epoch 0, batch_idx 0; the batch is [float32[2, 3], int64[2]]",
            "net.0, a Linear(in_features=4, out_features=5, bias=True), was given input float32[2, 3]",
        ),
        (
            Classifier,
            labelled(torch.zeros(6)),
            "Classifier.training_step, epoch 0, batch_idx 0; the batch is [float32[2, 4], float32[2]]",
            "cross_entropy was given input float32[2, 3], target float32[2]",
        ),
        (
            Classifier,
            labelled(torch.full((6,), 7)),
            "Classifier.training_step, epoch 0, batch_idx 0",
            "cross_entropy was given input float32[2, 3], target int64[2]",
        ),
        (FailsLater, labelled(torch.zeros(6, dtype=torch.int64)), "FailsLater.training_step, epoch 0, batch_idx 1", ""),
    ],
    ids=["shape", "float-labels", "label-range", "later-batch"],
)
def test_torchs_error_names_the_hook_the_batch_and_the_layer(module: Any, loader: Any, place: str, layer: str) -> None:
    with pytest.raises((RuntimeError, IndexError)) as caught:
        quiet(max_epochs=1).fit(module(), loader)
    assert f"This came from {place}" in notes_of(caught.value)
    assert layer in notes_of(caught.value)


class RaisesAtEnd(Callback):
    def on_validation_epoch_end(self, *args: Any) -> None:
        raise KeyError("mine")


class RaisesInBatch(Callback):
    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, idx: int, loader: int
    ) -> None:
        if loader == 1:
            raise KeyError("mine")


@pytest.mark.parametrize(
    ("callback", "place"),
    [
        (RaisesAtEnd(), "RaisesAtEnd.on_validation_epoch_end, epoch 1."),
        (RaisesInBatch(), "RaisesInBatch.on_validation_batch_end, epoch 1, batch_idx 0 of loader 1; the batch is"),
    ],
    ids=["epoch", "batch"],
)
def test_a_callbacks_error_names_its_hook_and_only_a_batch_hook_its_batch(callback: Any, place: str) -> None:
    loader = DataLoader(samples(), batch_size=4)
    trainer = quiet(max_epochs=3, check_val_every_n_epoch=2, num_sanity_val_steps=0, callbacks=[callback])
    with pytest.raises(KeyError) as caught:
        trainer.fit(Toy(), loader, [loader, loader])
    assert f"This came from {place}" in notes_of(caught.value)


class Frozen(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class FrozenHead(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)
        self.layer.requires_grad_(False)


class FrozenByHand(Frozen):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch))


class GradientsOff(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.set_grad_enabled(False)
        return self.loss(batch)


class InList(Toy):
    def __init__(self) -> None:
        super().__init__()
        del self.layer
        self.layers = [nn.Linear(4, 1)]


class InDictOfLists(InList):
    def __init__(self) -> None:
        super().__init__()
        self.layers = {"a": [nn.Linear(4, 1)]}  # pyright: ignore[reportAttributeAccessIssue]


class BareParameters(InList):
    def __init__(self) -> None:
        super().__init__()
        self.layers = (nn.Parameter(torch.ones(4)),)  # pyright: ignore[reportAttributeAccessIssue]


class Empty(InList):
    def __init__(self) -> None:
        super().__init__()
        del self.layers


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Frozen, "all parameters of Frozen are frozen"),
        (FrozenByHand, "all parameters of FrozenByHand are frozen"),
        (FrozenHead, r"2 of 4 parameters of FrozenHead are frozen \(layer.weight, layer.bias\)"),
        (GradientsOff, "gradients are turned off"),
        (InList, "InList.layers is a plain list, so torch does not see"),
        (InDictOfLists, "InDictOfLists.layers is a plain dict, so torch does not see"),
        (BareParameters, "BareParameters.layers is a plain tuple, so torch does not see"),
        (Empty, "Empty has no parameters"),
    ],
)
def test_nothing_to_train_names_the_cause_in_its_first_line(module: Any, text: str) -> None:
    with pytest.raises(HookError, match=text) as caught:
        quiet(max_epochs=1).fit(module(), DataLoader(samples(), batch_size=4))
    assert "\n" not in str(caught.value)
    torch.set_grad_enabled(True)


def test_layers_in_a_list_beside_others_are_warned_of_unless_they_are_frozen() -> None:
    module = Toy()
    module.more = [nn.Linear(1, 1)]
    with pytest.warns(UserWarning, match="Toy.more is a plain list, so torch does not see"):
        quiet(max_epochs=1).fit(module, DataLoader(samples(), batch_size=4))
    module.more[0].requires_grad_(False)
    module.same = [module.layer]
    quiet(max_epochs=1).fit(module, DataLoader(samples(), batch_size=4))


def test_a_loop_with_a_frozen_model_names_the_cause() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(nn.Linear(2, 1).requires_grad_(False))
    with pytest.raises(UsageError, match="all parameters of Linear are frozen"):
        accelerator.backward(model(torch.ones(3, 2)).mean())
    accelerator.end_training()

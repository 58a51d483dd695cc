from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import TrainModule
from instep.callbacks import ImageSampler
from instep.errors import HookError, SettingError
from instep.loggers import Logger
from tests.trainer.toys import Toy, loader, quiet

PICTURES = torch.linspace(0, 1, 6 * 4 * 4).reshape(6, 1, 4, 4)
DATA = DataLoader(TensorDataset(PICTURES, torch.arange(6) % 3), batch_size=3)


class Album(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.pictures: list[tuple[str, int, list[Any]]] = []

    def _log_image(self, name: str, images: list[Any], step: int) -> None:
        self.pictures.append((name, step, images))


class Classifier(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(16, 3))
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.rand(())  # random numbers that training must not miss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(torch.rand(()).item())
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(*callbacks: Any, module: TrainModule | None = None, val: Any = DATA, **settings: Any) -> Any:
    album, module = Album(), module or Classifier()
    torch.manual_seed(0)
    quiet(logger=album, callbacks=callbacks, **{"max_epochs": 3, **settings}).fit(module, DATA, val)
    return module, album.pictures


def test_the_same_samples_every_second_epoch_and_training_is_the_same() -> None:
    module, pictures = fit(ImageSampler(num_samples=2, every_n_epochs=2))
    assert [(name, step) for name, step, _ in pictures] == [("samples/input", 2), ("samples/input", 6)]
    for _, _, images in pictures:
        assert [image.array.shape for image in images] == [(4, 4, 1)] * 2
        expected = (PICTURES[:2, 0].numpy() * 255).round().astype(np.uint8)
        assert np.abs(np.stack([image.array[:, :, 0] for image in images]).astype(int) - expected).max() <= 1
        assert [image.caption.partition(", ")[2] for image in images] == ["target 0", "target 1"]
        assert all(image.caption.startswith("predicted ") for image in images)
    assert fit()[0].drawn == module.drawn


def test_samples_of_the_users_and_pictures_of_the_module() -> None:
    class Coder(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.layer[1].training or torch.is_grad_enabled()
            return torch.zeros(len(x), 3, 2, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.layer[1].training
            return self.layer(batch[0]).sum()

    _, pictures = fit(ImageSampler(1, batch={"x": PICTURES}), module=Coder(), val=None)
    assert [(name, step) for name, step, _ in pictures] == [
        (f"samples/{name}", step) for step in (2, 4, 6) for name in ("input", "prediction")
    ]
    assert pictures[1][2][0].array.shape == (2, 2, 3)
    _, pictures = fit(ImageSampler(sample_fn=lambda module, batch: {"drawn": torch.ones(2, 1, 3, 3)}), max_epochs=1)
    assert [(name, len(images)) for name, _, images in pictures] == [("samples/drawn", 2)]


def test_image_sampler_needs_a_validation_with_pictures() -> None:
    with pytest.raises(SettingError, match=r"takes its samples from the validation, .* Give ImageSampler\(batch="):
        fit(ImageSampler(), val=None)
    with pytest.raises(HookError, match=r"no pictures in a batch with tensors of the shapes \(3, 4\), \(3,\)"):
        quiet(logger=Album(), callbacks=ImageSampler(), max_epochs=1, num_sanity_val_steps=0).fit(
            Toy(), loader(), loader()
        )

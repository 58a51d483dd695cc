"""Several optimizers in automatic optimization: all step from one loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from instep import TrainModule
from instep.errors import HookError
from instep.strategies import DDPStrategy
from tests.helpers.spawn import run_ranks
from tests.trainer.resuming import Scaled
from tests.trainer.toys import Toy, assert_same, loader, quiet, samples, weights


class Two(TrainModule):
    """A body and a head with an optimizer each."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.dropout = nn.Dropout(dropout)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.dropout(self.body(x).tanh())).squeeze(-1), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizers = [SGD(self.body.parameters(), lr=0.1, momentum=0.9), Adam(self.head.parameters(), lr=0.05)]
        step = [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"} for optimizer in optimizers]
        return [{"optimizer": o, "lr_scheduler": s} for o, s in zip(optimizers, step, strict=True)]


def by_hand(model: Two, batches: list[Any], *, clip: float, accumulate: int = 1) -> None:
    """The same by hand: each window's batches have as many samples."""
    optimizers = [SGD(model.body.parameters(), lr=0.1, momentum=0.9), Adam(model.head.parameters(), lr=0.05)]
    decays = [ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    for window in range(len(batches) // accumulate):
        model.zero_grad()
        for batch in batches[window * accumulate : (window + 1) * accumulate]:
            (model.loss(batch) / accumulate).backward()
        nn.utils.clip_grad_norm_(list(model.parameters()), clip)
        for optimizer, decay in zip(optimizers, decays, strict=True):
            optimizer.step()
            decay.step()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_windows_equal_a_handwritten_loop_bit_for_bit(accumulate: int):
    module, other = Two(), Two()
    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    trainer.fit(module, loader(30))
    by_hand(other, [*loader(30)] * 2, clip=0.5, accumulate=accumulate)
    assert_same(weights(module), weights(other))
    assert trainer.global_step == 20 // accumulate


@pytest.mark.parametrize("scaled", [False, True])
def test_a_resumed_run_goes_on_bit_for_bit(scaled: bool, tmp_path: Path):
    def run(steps: int, ckpt_path: Any = None) -> Any:
        torch.manual_seed(5)
        module = Two(dropout=0.5)
        trainer = quiet(max_steps=steps, gradient_clip_val=0.5, callbacks=[Scaled()] if scaled else [])
        trainer.fit(module, loader(30, shuffle=True), ckpt_path=ckpt_path)
        return trainer, module

    _, whole = run(13)
    half, _ = run(5)
    _, module = run(13, half.save_checkpoint(tmp_path / "half"))
    assert_same(weights(module), weights(whole))


def test_each_hook_gets_the_optimizer_that_it_is_about():
    calls: list[Any] = []

    class Hooks(Two):
        def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
            calls.append(("step", type(optimizer.optimizer).__name__))
            optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            calls.append(("zero", type(optimizer).__name__))
            optimizer.zero_grad()

        def configure_gradient_clipping(self, optimizer: Any, value: Any, algorithm: Any) -> None:
            calls.append(("clip", type(optimizer).__name__))
            self.clip_gradients(optimizer, value, algorithm)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            calls.append(("before", type(optimizer).__name__))

    module, other = Hooks(), Two()
    quiet(max_steps=1, gradient_clip_val=1e6).fit(module, loader())
    both = [("step", "SGD"), *(("zero", k) for k in ("SGD", "Adam")), *(("before", k) for k in ("SGD", "Adam"))]
    assert calls == [*both, ("clip", "SGD"), ("clip", "Adam"), ("step", "Adam")]
    quiet(max_steps=1).fit(other, loader())
    assert_same(weights(module), weights(other))


@pytest.mark.filterwarnings("ignore:global_step 2")
@pytest.mark.parametrize("how", ["guard", "scaler"])
def test_what_is_not_finite_in_one_leaves_all_of_the_step_out(how: str):
    class Overflows(Two):
        def on_after_backward(self) -> None:
            if self.trainer.global_step == 1:
                self.head.bias.grad.fill_(float("inf"))

    def run(kind: Any, steps: int) -> Any:
        module = kind()
        callbacks = [Scaled()] if how == "scaler" else []
        quiet(max_steps=steps, nonfinite="skip" if how == "guard" else None, callbacks=callbacks).fit(module, loader())
        return weights(module)

    assert_same(run(Overflows, 2), run(Two, 1))


# ---- what cannot be


@pytest.mark.parametrize(
    ("optimizers", "text"),
    [
        (lambda m: [{"optimizer": SGD(m.body.parameters()), "frequency": 1}, {"optimizer": SGD(m.head.parameters())}],
         "gave an optimizer a 'frequency'.*automatic_optimization = False"),
        (lambda m: [SGD(m.parameters()), Adam(m.head.parameters())], "head.weight is in two optimizers"),
        (lambda m: [SGD(m.body.parameters()), LBFGS(m.head.parameters())], "LBFGS evaluates the loss within its step"),
    ],
)  # fmt: skip
def test_optimizers_that_do_not_go_together(optimizers: Any, text: str):
    module = Two()
    module.configure_optimizers = lambda: optimizers(module)
    with pytest.raises(HookError, match=text):
        quiet(max_steps=1).fit(module, loader())


def test_a_frequency_of_one_optimizer_is_warned_of():
    module = Two()
    module.configure_optimizers = lambda: {"optimizer": SGD(module.parameters(), lr=0.1), "frequency": 2}
    with pytest.warns(UserWarning, match="the 'frequency' of an optimizer is not used"):
        quiet(max_steps=1).fit(module, loader())


# ---- several ranks

LOCAL = {"comm_hook": "post_local_sgd", "comm_state": {"period": 3, "warmup_steps": 2}}


def fit_everywhere() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp", "local_sgd"):
        module = Two()
        trainer = quiet(
            strategy=DDPStrategy(**LOCAL) if strategy == "local_sgd" else strategy,
            devices=2, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5,
        )  # fmt: skip
        trainer.fit(module, DataLoader(samples(26), 2))
        full = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in module.named_parameters()}
        seen[strategy] = {name: p.detach().clone() for name, p in full.items()}
    module = Searching()
    quiet(strategy="ddp", devices=2, max_epochs=1).fit(module, DataLoader(samples(13), 4))
    return {**seen, "search": weights(module)}


class Searching(Toy):
    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__()

    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


@pytest.mark.dist
def test_two_ranks_agree_with_one():
    first, second = run_ranks(fit_everywhere, 2)
    searching = Searching()
    quiet(max_epochs=1).fit(searching, DataLoader(samples(13), 8))
    assert_same(first["search"], second["search"])  # no rank searches longer than another
    for name, value in weights(searching).items():
        torch.testing.assert_close(first["search"][name], value, rtol=1e-4, atol=1e-5)
    alone = Two()
    quiet(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5).fit(alone, DataLoader(samples(26), 4))
    for strategy in ("ddp", "fsdp", "local_sgd"):
        found = first[strategy]
        assert_same(found, second[strategy])
        if strategy != "local_sgd":
            for name, value in weights(alone).items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)

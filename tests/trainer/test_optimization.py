"""The training step: gradients, accumulation, schedulers, clipping, and whatever a module may override."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instep import Callback, TrainModule
from instep.errors import HookError, SettingError, UsageError
from instep.strategies import Gradients, Strategy
from tests.trainer.resuming import Scaled
from tests.trainer.toys import ScoredToy, SkippingToy, Stream, Toy, assert_same, loader, quiet, samples, weights


def handwritten(model: Any, data: Any, optimizer: torch.optim.Optimizer, epochs: int = 1) -> None:
    for _ in range(epochs):
        for batch in data:
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()


# ---- the same as a handwritten loop


class Dropping(Toy):
    def __init__(self, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__()
        self.kind = optimizer
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.01)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_fit_equals_a_handwritten_loop_bit_for_bit(kind: Any):
    module = Dropping(kind)
    other = copy.deepcopy(module)
    batches = list(loader())  # a DataLoader draws from the global generator each time it is iterated
    torch.manual_seed(3)
    handwritten(other, batches, kind(other.parameters(), lr=0.01), epochs=3)
    torch.manual_seed(3)
    quiet(max_epochs=3).fit(module, loader(), loader(6))
    assert_same(weights(module), weights(other))


def test_the_order_of_a_shuffled_loader_depends_on_seed_and_epoch_only():
    orders = []
    for _ in range(2):
        torch.manual_seed(5)
        module = Toy()
        torch.manual_seed(6)
        quiet(max_epochs=2).fit(module, loader(shuffle=True))
        orders.append(module.seen)
    assert orders[0] == orders[1]
    assert orders[0][:4] != orders[0][4:]
    first, second = ({x for batch in half for x in batch} for half in (orders[0][:4], orders[0][4:]))
    assert first == second


# ---- accumulation


@pytest.mark.parametrize("data", ["sized", "unsized"])
def test_every_window_is_the_mean_over_its_own_samples(data: str):
    # 10 samples in batches of 2: with windows of 3 batches the last one has 2.
    made = loader(10, 2) if data == "sized" else torch.utils.data.DataLoader(Stream(10), 2)
    module = Toy()
    other = copy.deepcopy(module)
    trainer = quiet(max_epochs=1, accumulate_grad_batches=3)
    trainer.fit(module, made)
    assert trainer.global_step == 2
    big = samples(10).tensors
    handwritten(
        other, [(big[0][:6], big[1][:6]), (big[0][6:], big[1][6:])], torch.optim.SGD(other.parameters(), lr=0.1)
    )
    for name, value in weights(module).items():
        torch.testing.assert_close(value, weights(other)[name], rtol=1e-6, atol=1e-7)


def test_a_short_last_batch_weighs_as_many_samples_as_it_has():
    module = Toy()
    other = copy.deepcopy(module)
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, loader(7, 4))
    handwritten(other, [samples(7).tensors], torch.optim.SGD(other.parameters(), lr=0.1))
    for name, value in weights(module).items():
        torch.testing.assert_close(value, weights(other)[name], rtol=1e-6, atol=1e-7)


def test_validation_waits_for_the_windows_end_and_leaves_it_alone():
    def fit(**settings: Any) -> tuple[Any, list[int]]:
        torch.manual_seed(0)
        module = Toy()
        batches: list[int] = []
        module.on_validation_start = lambda: batches.append(module.trainer.position.batch)
        quiet(max_epochs=1, accumulate_grad_batches=4, num_sanity_val_steps=0, **settings).fit(
            module, loader(20, 2), loader(4)
        )
        return module, batches

    plain, _ = fit(limit_val_batches=0)
    checked, batches = fit(val_check_interval=3)
    assert batches == [4, 8, 10]
    assert_same(weights(plain), weights(checked))


@pytest.mark.filterwarnings("ignore:training_step returned None")
def test_none_skips_a_batch_and_nothing_of_the_window_before_comes_back():
    class Skips(SkippingToy):
        skipped = (2,)

    module = Skips()
    other = copy.deepcopy(module)
    trainer = quiet(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, loader(12, 3))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    batches = list(loader(12, 3))
    for window in ((0, 1), (3,)):
        optimizer.zero_grad()
        for i in window:
            (other.loss(batches[i]) * 0.5).backward()
        optimizer.step()
    assert trainer.global_step == 2
    for name, value in weights(module).items():
        torch.testing.assert_close(value, weights(other)[name], rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:training_step returned None")
@pytest.mark.parametrize("own", [False, True])
def test_a_window_of_nothing_but_none_changes_nothing(own: bool):
    class Skips(SkippingToy):
        skipped = (1, 2, 3)

    class OwnStep(Skips):
        def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

    module = (OwnStep if own else Skips)()
    other = copy.deepcopy(module)
    quiet(max_epochs=1).fit(module, loader())
    handwritten(other, list(loader())[:1], torch.optim.SGD(other.parameters(), lr=0.1))
    assert_same(weights(module), weights(other))


@pytest.mark.filterwarnings("ignore:training_step returned None")
@pytest.mark.parametrize("own", [False, True])
def test_a_window_that_is_left_out_as_a_whole_asks_nothing_of_a_gradient_scaler(own: bool):
    class Skips(SkippingToy):
        skipped = (2, 3)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)  # a step with zeros would go on with the momentum

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    class OwnStep(Skips):
        def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)

    module, scaled = (OwnStep if own else Skips)(), Scaled()
    other = copy.deepcopy(module)
    trainer = quiet(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.05, callbacks=[scaled])
    trainer.fit(module, loader(12, 3))
    optimizer, window = other.configure_optimizers(), list(loader(12, 3))[:2]
    for _ in range(2):
        optimizer.zero_grad()
        for batch in window:
            (other.loss(batch) * 0.5).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.05)
        optimizer.step()
    for name, value in weights(module).items():
        torch.testing.assert_close(value, weights(other)[name], rtol=1e-6, atol=1e-7)
    assert trainer.global_step == 4
    trainer.strategy.gradients.update_scaler()
    state = trainer.strategy.precision.scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (8.0, 2), "it counts the steps that were taken"


@pytest.mark.filterwarnings("ignore:training_step returned None")
def test_a_window_that_is_left_out_as_a_whole_asks_nothing_of_a_strategys_own_step():
    class Counted(Gradients):
        taken = 0

        def step(self, optimizer: Any, closure: Any = None, **kwargs: Any) -> None:
            super().step(optimizer, closure, **kwargs)
            self.taken += 1

    class Single(Strategy):
        gradients_class = Counted

    class Skips(SkippingToy):
        skipped = (2, 3)

    trainer = quiet(strategy=Single(), max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(Skips(), loader(12, 3))
    assert (trainer.global_step, trainer.strategy.gradients.taken) == (4, 2)


# ---- configure_optimizers


def forms(module: Toy) -> dict[str, Any]:
    sgd = torch.optim.SGD(module.parameters(), lr=1.0)
    step = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    return {
        "optimizer": sgd,
        "list": [sgd],
        "two lists": ([sgd], [step]),
        "two lists with dict": ([sgd], [{"scheduler": step, "interval": "step"}]),
        "dict": {"optimizer": sgd, "lr_scheduler": step},
        "dict of dict": {"optimizer": sgd, "lr_scheduler": {"scheduler": step, "interval": "step", "frequency": 2}},
        "list of dicts": [{"optimizer": sgd, "lr_scheduler": step}],
    }


@pytest.mark.parametrize(
    ("form", "rate"),
    [
        ("optimizer", 1.0),
        ("list", 1.0),
        ("two lists", 0.25),
        ("two lists with dict", 0.5**8),
        ("dict", 0.25),
        ("dict of dict", 0.5**4),
        ("list of dicts", 0.25),
    ],
)
def test_every_form_of_configure_optimizers(form: str, rate: float):
    module = Toy()
    module.configure_optimizers = lambda: forms(module)[form]
    trainer = quiet(max_epochs=2)
    trainer.fit(module, loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == rate
    assert trainer.global_step == 8


def test_no_optimizer_trains_nothing_and_says_so():
    module = Toy()
    before = weights(module)
    module.configure_optimizers = lambda: None
    trainer = quiet(max_epochs=1)
    with pytest.warns(UserWarning, match="trains nothing"):
        trainer.fit(module, loader())
    assert_same(weights(module), before)
    assert trainer.global_step == 4


# ---- schedulers


def rates(interval: str, frequency: int = 1, **settings: Any) -> list[float]:
    """The learning rate seen by each batch."""
    seen: list[float] = []

    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.optimizers().param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=8.0)
            halve = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
            return [sgd], [{"scheduler": halve, "interval": interval, "frequency": frequency}]

    quiet(**settings).fit(Model(), loader(8, 2))
    return seen


@pytest.mark.parametrize(
    ("interval", "frequency", "settings", "expected"),
    [
        ("step", 1, {}, [8, 4, 2, 1]),
        ("step", 2, {}, [8, 8, 4, 4]),
        ("step", 1, {"accumulate_grad_batches": 2}, [8, 8, 4, 4]),
        ("step", 1, {"accumulate_grad_batches": 3}, [8, 8, 8, 4]),
        ("epoch", 1, {"max_epochs": 3, "limit_train_batches": 1}, [8, 4, 2]),
        ("epoch", 2, {"max_epochs": 4, "limit_train_batches": 1}, [8, 8, 4, 4]),
    ],
)
def test_schedulers_step_once_per_optimizer_step_or_epoch(
    interval: str, frequency: int, settings: dict[str, Any], expected: list[float]
):
    assert rates(interval, frequency, **{"max_epochs": 1, **settings}) == expected


def test_a_plateau_scheduler_gets_its_metric():
    class Model(ScoredToy):
        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=1.0)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, factor=0.1, patience=0)
            return {"optimizer": sgd, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}

    trainer = quiet(max_epochs=4)
    trainer.fit(Model([3.0, 2.0, 2.0, 2.0], "val"), loader(), loader(3))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_plateau_schedulers_missing_metric_is_an_error_that_lists_what_there_is():
    class Model(Toy):
        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=1.0)
            return {
                "optimizer": sgd,
                "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(sgd),
                "monitor": "val_los",
            }

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train_loss", 1.0)
            return super().training_step(batch, batch_idx)

    with pytest.raises(SettingError, match=r"'val_los', which is not available.*train_loss"):
        quiet(max_epochs=1).fit(Model(), loader())


# ---- clipping


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped(algorithm: str):
    module = Toy(lr=1.0)
    other = copy.deepcopy(module)
    quiet(max_epochs=1, limit_train_batches=1, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm).fit(
        module, loader()
    )
    other.loss(next(iter(loader()))).backward()
    clip = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
    clip(other.parameters(), 0.05)
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert_same(weights(module), weights(other))


def test_gradients_are_whole_and_unclipped_before_the_step_and_clipped_at_it():
    norms: list[float] = []

    class Norms(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters()])))

    quiet(max_epochs=1, limit_train_batches=1, gradient_clip_val=1e-3, callbacks=Norms()).fit(module := Toy(), loader())
    assert norms[0] > 1e-2
    assert float(nn.utils.get_total_norm([p.grad for p in module.parameters()])) <= 1.001e-3


# ---- overrides


def test_an_own_optimizer_step_decides_when_to_step():
    class Sparse(Toy):
        def optimizer_step(self, epoch: Any, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            assert isinstance(optimizer, torch.optim.SGD)
            if batch_idx % 2 == 0:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    module = Sparse()
    other = copy.deepcopy(module)
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())
    handwritten(other, list(loader())[::2], torch.optim.SGD(other.parameters(), lr=0.1))
    assert_same(weights(module), weights(other))
    assert trainer.global_step == 4


def test_an_own_optimizer_step_must_run_its_closure():
    module = Toy()
    module.optimizer_step = lambda *args, **kwargs: None
    with pytest.raises(HookError, match="The closure hasn't been executed"):
        quiet(max_epochs=1).fit(module, loader())


def test_own_backward_zero_grad_clipping_and_scheduler_step():
    called: list[str] = []

    class Own(Toy):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            called.append("backward")
            super().backward(loss, *args, **kwargs)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            called.append("zero_grad")
            optimizer.zero_grad(set_to_none=False)

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            called.append(f"clip {gradient_clip_val} {gradient_clip_algorithm}")
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            called.append(f"schedule {metric}")
            super().lr_scheduler_step(scheduler, metric)

        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=1.0)
            return [sgd], [torch.optim.lr_scheduler.StepLR(sgd, 1)]

    module = Own()
    other = copy.deepcopy(module)
    quiet(max_epochs=1, limit_train_batches=1).fit(module, loader())
    assert called == ["zero_grad", "backward", "clip None norm", "schedule None"]
    other.loss(next(iter(loader()))).backward()
    nn.utils.clip_grad_norm_(other.parameters(), 0.05)
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert_same(weights(module), weights(other))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clip_gradients_with_0_clips_nothing(algorithm: str):
    class Own(Toy):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0, gradient_clip_algorithm=algorithm)

    module, plain = Own(), Toy()
    plain.load_state_dict(module.state_dict())
    for each in (module, plain):
        quiet(max_epochs=1, limit_train_batches=1).fit(each, loader())
    assert_same(weights(module), weights(plain))
    with pytest.raises(SettingError, match="gradient_clip_algorithm='nrom'"):
        module.clip_gradients(module.optimizers(), 1.0, "nrom")


def test_lbfgs_evaluates_the_loss_again_within_a_step():
    class Model(Toy):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)

    module = Model()
    other = copy.deepcopy(module)
    trainer = quiet(max_epochs=2)
    trainer.fit(module, loader(6, 6))
    optimizer = torch.optim.LBFGS(other.parameters(), lr=0.5, max_iter=4)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = other.loss(samples(6).tensors)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert_same(weights(module), weights(other))
    assert trainer.global_step == 2
    assert len(module.seen) > 4
    with pytest.raises(SettingError, match="LBFGS evaluates the loss within its step"):
        quiet(max_epochs=1, accumulate_grad_batches=2).fit(Model(), loader())


def test_an_optimizer_whose_step_needs_the_closure_gets_it_with_gradients_on():
    class Needs(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any) -> Any:
            closure()
            return super().step()

    class Model(Toy):
        def configure_optimizers(self) -> Any:
            return Needs(self.parameters(), lr=1.0)

    module = Model()
    other = copy.deepcopy(module)
    quiet(max_epochs=1, limit_train_batches=1).fit(module, loader())
    other.loss(next(iter(loader()))).backward()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert_same(weights(module), weights(other))


# ---- what training_step may take and return


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"los": 1}, "'loss' key needs to be present.*los"),
        (3.0, "returned float"),
        (torch.zeros(2, requires_grad=True), r"shape \(2,\)"),
        (torch.tensor(1.0), "without a graph"),
        ({"loss": torch.tensor(1.0)}, "without a graph"),
        ([torch.tensor(1.0)], "returned list"),
    ],
)
def test_a_wrong_return_is_an_error(returned: Any, message: str):
    module = Toy()
    module.training_step = lambda batch, batch_idx: returned
    with pytest.raises(HookError, match=message):
        quiet(max_epochs=1).fit(module, loader())


def test_a_dict_is_trained_by_its_loss_and_handed_on_detached():
    outputs: list[Any] = []

    class Model(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "double": [loss * 2], "text": "hello"}

        def on_train_batch_end(self, outputs_: Any, batch: Any, batch_idx: int) -> None:
            outputs.append(outputs_)

    plain, module = Toy(), Model()
    module.load_state_dict(plain.state_dict())
    quiet(max_epochs=1).fit(module, loader())
    quiet(max_epochs=1).fit(plain, loader())
    assert_same(weights(module), weights(plain))
    assert [sorted(output) for output in outputs] == [["double", "loss", "text"]] * 4
    assert not any(output["loss"].requires_grad or output["double"][0].requires_grad for output in outputs)


def test_a_tensor_is_handed_on_as_a_dict_with_the_loss():
    outputs: list[Any] = []
    module = Toy()
    module.on_train_batch_end = lambda outputs_, batch, batch_idx: outputs.append(outputs_)
    quiet(max_epochs=1).fit(module, loader())
    assert [list(output) for output in outputs] == [["loss"]] * 4


def test_steps_may_leave_batch_idx_out():
    class Short(Toy):
        def training_step(self, batch: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.loss(batch)

        def validation_step(self, batch: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.loss(batch)

    trainer = quiet(max_epochs=1)
    trainer.fit(Short(), loader(), [loader(3), loader(3)])
    assert trainer.global_step == 4


def test_a_step_must_take_the_batch():
    module = Toy()
    module.training_step = lambda: None
    with pytest.raises(HookError, match="first argument must be the batch"):
        quiet(max_epochs=1).fit(module, loader())


# ---- manual optimization


class Manual(Toy):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        schedule = self.lr_schedulers()
        if schedule is not None:
            schedule.step()


def test_manual_optimization_equals_a_handwritten_loop():
    module = Manual()
    other = copy.deepcopy(module)
    trainer = quiet(max_epochs=2)
    trainer.fit(module, loader())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for batch in [*loader(), *loader()]:
        optimizer.zero_grad()
        other.loss(batch).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
    assert_same(weights(module), weights(other))
    assert trainer.global_step == 8


def test_manual_clipping_takes_the_gradient_scaler_out_first():
    class Scaled(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            trainer.strategy.precision.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    module = Manual()
    scaled = copy.deepcopy(module)
    quiet(max_epochs=2).fit(module, loader())
    quiet(max_epochs=2, callbacks=[Scaled()]).fit(scaled, loader())
    assert_same(weights(module), weights(scaled))


class Gan(TrainModule):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)
        self.required: list[tuple[bool, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for_generator, for_critic = self.optimizers()
        self.toggle_optimizer(for_generator)
        self.required.append((self.generator.weight.requires_grad, self.critic.weight.requires_grad))
        for_generator.zero_grad()
        self.manual_backward(-self.critic(self.generator(batch[0])).mean())
        assert self.critic.weight.grad is None or batch_idx
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        with self.toggled_optimizer(for_critic):
            self.required.append((self.generator.weight.requires_grad, self.critic.weight.requires_grad))
            for_critic.zero_grad()
            fake = self.generator(batch[0]).detach()
            self.manual_backward(self.critic(fake).mean() - self.critic(batch[0]).mean())
            for_critic.step()
        assert self.generator.weight.requires_grad
        assert self.critic.weight.requires_grad

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]


def test_a_gan_counts_batches_and_toggles_its_halves():
    module = Gan()
    before = weights(module)
    trainer = quiet(max_steps=3)
    trainer.fit(module, loader())
    assert trainer.global_step == 3
    assert module.required == [(True, False), (False, True)] * 3
    assert all(not torch.equal(value, before[name]) for name, value in weights(module).items() if "weight" in name)


class Three(TrainModule):
    """Three optimizers; the last two share a layer."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shared, self.frozen = (nn.Linear(4, 4) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.required: list[list[bool]] = []

    def look(self) -> None:
        self.required.append([part.weight.requires_grad for part in self.children()])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two, three = self.optimizers()
        self.toggle_optimizer(one)
        self.look()
        self.untoggle_optimizer(one)
        self.look()
        self.toggle_optimizer(two)
        self.toggle_optimizer(three)  # without the other in between
        self.look()
        self.untoggle_optimizer(three)
        self.look()
        one.step()

    def configure_optimizers(self) -> Any:
        groups = [[self.first, self.frozen], [self.second, self.shared], [self.shared]]
        return [torch.optim.SGD([p for part in group for p in part.parameters()], lr=0.1) for group in groups]


def test_what_two_optimizers_share_is_free_again_after_a_toggle():
    module = Three()
    quiet(max_steps=1).fit(module, loader())
    free = [True, True, True, False]
    assert module.required == [[True, False, False, False], free, [False, False, True, False], free]


def test_accumulation_by_hand_counts_the_batches_that_stepped():
    steps: list[int] = []

    class Accumulates(Toy):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch) / 2)
            self.log("loss", 1.0)
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            steps.append(self.global_step)

    trainer = quiet(max_epochs=1, log_every_n_steps=1)
    trainer.fit(Accumulates(), loader())
    assert steps == [0, 1, 1, 2]


def test_schedulers_are_left_to_manual_optimization():
    class Scheduled(Manual):
        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=8.0)
            halve = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
            return [sgd], [halve]

    trainer = quiet(max_epochs=1, limit_train_batches=2)
    trainer.fit(Scheduled(), loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 2.0


@pytest.mark.parametrize("steps", ["none", "bare"])
def test_manual_optimization_that_never_steps_warns_once_in_the_first_epoch(steps: str):
    class Forgets(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            if steps == "bare":
                self.optimizers(use_pl_optimizer=False).step()

    with pytest.warns(UserWarning, match="no optimizer stepped in the first epoch") as seen:
        quiet(max_epochs=3).fit(Forgets(), loader())
    assert len([one for one in seen if "no optimizer stepped" in str(one.message)]) == 1


def test_a_late_first_step_of_manual_optimization_is_no_reason_to_warn():
    class Late(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            if self.trainer.is_last_batch:
                self.optimizers().step()

    trainer = quiet(max_epochs=2)
    trainer.fit(Late(), loader())
    assert trainer.global_step == 2


@pytest.mark.parametrize("overridden", [False, True])
def test_an_optimizer_step_of_skipped_batches_alone_counts_and_changes_nothing(overridden: bool):
    class Skips(SkippingToy):
        skipped = (1,)

        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=8.0, weight_decay=0.5)
            return [sgd], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5), "interval": "step"}]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            weights.append([p.detach().clone() for p in self.parameters()])

    if overridden:
        Skips.optimizer_step = lambda self, epoch, batch_idx, optimizer, closure: optimizer.step(closure=closure)
    weights: list[list[torch.Tensor]] = []
    trainer = quiet(max_epochs=1, limit_train_batches=2, gradient_clip_val=0.1, gradient_clip_algorithm="value")
    with pytest.warns(UserWarning, match="the batch is skipped"):
        trainer.fit(Skips(), loader())
    assert trainer.global_step == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == 2.0
    assert all(map(torch.equal, *weights))


def test_hooks_of_manual_optimization():
    calls: list[str] = []

    class Records(Callback):
        def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
            calls.append("before_backward")

        def on_after_backward(self, trainer: Any, module: Any) -> None:
            calls.append("after_backward")

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            assert type(optimizer) is torch.optim.SGD
            calls.append("before_step")

    class ByClosure(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            def closure() -> Any:
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            self.log("loss", self.optimizers().step(closure))

    for module in (Manual(), ByClosure()):
        quiet(max_epochs=1, limit_train_batches=1, callbacks=Records()).fit(module, loader())
        assert calls == ["before_backward", "after_backward", "before_step"]
        calls.clear()


@pytest.mark.parametrize(
    "settings", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}, {"global_batch_size": 6}]
)
def test_what_manual_optimization_does_itself_is_refused(settings: dict[str, Any]):
    with pytest.raises(UsageError, match="manual optimization"):
        quiet(max_epochs=1, **settings).fit(Manual(), loader())


def test_manual_backward_is_refused_in_automatic_optimization():
    module = Toy()
    module.training_step = lambda batch, batch_idx: module.manual_backward(module.loss(batch))
    with pytest.raises(UsageError, match="manual_backward"):
        quiet(max_epochs=1).fit(module, loader())


def test_a_forgotten_return_is_told():
    class Forgets(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)

    with (
        pytest.warns(UserWarning, match="return loss"),
        pytest.raises(HookError, match=r"Forgets.training_step returned None for every batch so far \(4\)"),
    ):
        quiet(max_epochs=3).fit(Forgets(), loader())


class NoLoss(Toy):
    """Returns a loss from a given batch of the run on."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.start = start

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if len(self.seen) > self.start else None


@pytest.mark.filterwarnings("ignore:training_step returned None")
@pytest.mark.parametrize("settings", [{"max_epochs": 2}, {"max_steps": 3}, {"accumulate_grad_batches": 3}])
def test_a_run_without_a_single_loss_ends_with_an_error_and_no_checkpoint(settings: dict[str, Any], tmp_path: Path):
    trainer = quiet(**{"max_epochs": 1, **settings}, enable_checkpointing=True, default_root_dir=tmp_path)
    with pytest.raises(HookError, match="nothing was trained"):
        trainer.fit(NoLoss(math.inf), loader(), loader(3))
    [status] = tmp_path.rglob("status.json")
    assert json.loads(status.read_text())["status"] == "failed"
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.filterwarnings("ignore:training_step returned None")
def test_a_run_with_one_loss_is_trained_and_may_skip_whole_epochs():
    trainer = quiet(max_epochs=3)
    module = NoLoss(3)  # the fourth batch, the last of the first epoch, is the first with a loss
    trainer.fit(module, loader())
    assert trainer.global_step == 12
    module.start = math.inf
    with pytest.raises(HookError, match="nothing was trained"):  # a fit of its own
        quiet(max_epochs=1).fit(module, loader())

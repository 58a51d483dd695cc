from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR

from instep.errors import HookError, SettingError
from instep.trainer.optimizers import LRSchedulerConfig, TrainOptimizer, configure, step_schedulers


class Model(nn.Module):
    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.automatic_optimization = automatic


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def opt(model: Model) -> Optimizer:
    return SGD(model.parameters(), lr=1.0)


# ---- configure_optimizers


def test_configure_optimizers_accepts_one_optimizer_in_every_form(model, opt):
    sched = ExponentialLR(opt, 0.5)
    forms: list[tuple[Any, list[Any]]] = [
        (opt, []),
        ([opt], []),
        ((opt,), []),
        (([opt], [sched]), [sched]),
        ([[opt], [sched]], [sched]),
        (([opt], sched), [sched]),
        (([opt], []), []),
        (([opt], [{"scheduler": sched}]), [sched]),
        ({"optimizer": opt}, []),
        ({"optimizer": opt, "lr_scheduler": None}, []),
        ({"optimizer": opt, "lr_scheduler": sched}, [sched]),
        ({"optimizer": opt, "lr_scheduler": {"scheduler": sched}}, [sched]),
        ([{"optimizer": opt, "lr_scheduler": sched}], [sched]),
    ]
    for form, schedulers in forms:
        setup = configure(form, model)
        assert setup.optimizers == [opt]
        assert [config.scheduler for config in setup.schedulers] == schedulers
        assert all(config == LRSchedulerConfig(config.scheduler) for config in setup.schedulers)


def test_several_optimizers_in_manual_optimization():
    model = Model(automatic=False)
    first, second = SGD(model.parameters(), lr=1.0), Adam(model.parameters())
    decay = ExponentialLR(second, 0.5)
    for form in (
        [first, second],
        (first, second),
        ([first, second], [decay]),
        [{"optimizer": first}, {"optimizer": second, "lr_scheduler": decay}],
    ):
        assert configure(form, model).optimizers == [first, second]


def test_configure_optimizers_of_none_trains_nothing_and_warns(model):
    with pytest.warns(UserWarning, match="trains nothing"):
        assert configure(None, model) == ([], [])


def test_every_scheduler_option(model, opt):
    plateau = ReduceLROnPlateau(opt)
    options = {
        "scheduler": plateau,
        "name": "lr/plateau",
        "interval": "step",
        "frequency": 5,
        "monitor": "val_loss",
        "strict": False,
    }
    (config,) = configure({"optimizer": opt, "lr_scheduler": options}, model).schedulers
    assert config == LRSchedulerConfig(**options, reduce_on_plateau=True)


def test_the_monitor_may_stand_beside_the_scheduler(model, opt):
    plateau = ReduceLROnPlateau(opt)
    for form in (
        {"optimizer": opt, "lr_scheduler": plateau, "monitor": "val_loss"},
        {"optimizer": opt, "lr_scheduler": {"scheduler": plateau}, "monitor": "val_loss"},
        {"optimizer": opt, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}, "monitor": "other"},
        [{"optimizer": opt, "lr_scheduler": plateau, "monitor": "val_loss"}],
    ):
        assert configure(form, model).schedulers[0].monitor == "val_loss"


def bad_forms() -> dict[str, Any]:
    def with_scheduler(**options: Any) -> Any:
        return lambda opt: {"optimizer": opt, "lr_scheduler": {"scheduler": ExponentialLR(opt, 0.5), **options}}

    return {
        "returned float. Return an optimizer": lambda opt: 0.1,
        "returned the class SGD": lambda opt: SGD,
        "a tuple of SGD, ExponentialLR": lambda opt: (opt, ExponentialLR(opt, 0.5)),
        "a list of SGD, dict": lambda opt: [opt, {"optimizer": opt}],
        "returned no optimizer": lambda opt: [],
        "returned no optimizer. ": lambda opt: ([], []),
        "must have the key \"optimizer\". Its keys are 'lr_scheduler'": lambda opt: {
            "lr_scheduler": ExponentialLR(opt, 0.5)
        },
        "unknown keys 'scheduler'": lambda opt: {"optimizer": opt, "scheduler": ExponentialLR(opt, 0.5)},
        "'optimizer' is the class SGD": lambda opt: {"optimizer": SGD},
        "unknown keys 'inteval'. Known are scheduler, name, interval": with_scheduler(inteval="step"),
        'The lr scheduler dict must have the key "scheduler"': lambda opt: {
            "optimizer": opt,
            "lr_scheduler": {"interval": "step"},
        },
        'must be "step" or "epoch" but is \'batch\', of ExponentialLR': with_scheduler(interval="batch"),
        "frequency=0": with_scheduler(frequency=0),
        "frequency=True": with_scheduler(frequency=True),
        "must include a monitor when a `ReduceLROnPlateau`": lambda opt: {
            "optimizer": opt,
            "lr_scheduler": ReduceLROnPlateau(opt),
        },
        "must include a monitor when a `ExponentialLR`": with_scheduler(reduce_on_plateau=True),
        "the scheduler int has no step, state_dict": lambda opt: {"optimizer": opt, "lr_scheduler": 3},
        "is in two optimizers that step together": lambda opt: [opt, opt],
        "ExponentialLR is attached with an optimizer that wasn't returned": lambda opt: (
            [opt],
            [ExponentialLR(SGD([nn.Parameter(torch.ones(1))], lr=0.1), 0.5)],
        ),
    }


@pytest.mark.parametrize("said, form", bad_forms().items())
def test_configure_optimizers_refuses_other_forms(model, opt, said, form):
    with pytest.raises(HookError) as caught:
        configure(form(opt), model)
    assert said in str(caught.value)


def test_a_setting_that_has_no_effect_warns(model, opt):
    with pytest.warns(UserWarning, match="monitor='val_loss' is not used"):
        configure({"optimizer": opt, "lr_scheduler": ExponentialLR(opt, 0.5), "monitor": "val_loss"}, model)
    with pytest.warns(UserWarning, match="OneCycleLR with interval='epoch'"):
        configure(([opt], [OneCycleLR(opt, 1.0, total_steps=10)]), model)


def test_parameters_that_are_not_in_the_module_warn(model):
    with pytest.warns(UserWarning, match="1 parameters of SGD are not in the module"):
        configure(SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1), model)
    with pytest.warns(UserWarning, match="has parameters on meta .* on cpu: were they made before"):
        configure(SGD([nn.Parameter(torch.ones(1, device="meta"))], lr=0.1), model)


# ---- schedulers


class Steps:
    """A scheduler that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def step(self, *args: Any) -> None:
        self.calls.append(args)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def test_interval_and_frequency():
    every, third, epoch = (Steps() for _ in range(3))
    configs = [
        LRSchedulerConfig(every, interval="step"),
        LRSchedulerConfig(third, interval="step", frequency=3),
        LRSchedulerConfig(epoch),
    ]
    for count in range(1, 8):
        step_schedulers(configs, "step", count, {})
    assert (len(every.calls), len(third.calls), len(epoch.calls)) == (7, 2, 0)
    step_schedulers(configs, "epoch", 1, {})
    assert (len(every.calls), len(third.calls), len(epoch.calls)) == (7, 2, 1)


def test_a_schedule_follows_optimizer_steps(model, opt):
    setup = configure({"optimizer": opt, "lr_scheduler": {"scheduler": StepLR(opt, 2, 0.1), "interval": "step"}}, model)
    rates = []
    for count in range(1, 5):
        opt.step()
        step_schedulers(setup.schedulers, "step", count, {})
        rates.append(opt.param_groups[0]["lr"])
    assert rates == pytest.approx([1.0, 0.1, 0.1, 0.01])


def test_plateau_gets_its_metric_zero_too():
    steps = Steps()
    config = LRSchedulerConfig(steps, monitor="loss", reduce_on_plateau=True)
    step_schedulers([config], "epoch", 1, {"loss": 0.0})
    step_schedulers([config], "epoch", 2, {"loss": torch.tensor(2.0)})
    assert steps.calls == [(0.0,), (torch.tensor(2.0),)]


def test_a_plateau_schedule_without_its_metric_names_those_there_are():
    steps = Steps()
    config = LRSchedulerConfig(steps, monitor="val_loss", reduce_on_plateau=True)
    with pytest.raises(SettingError, match=r"'val_loss', which is not available\. Available metrics are: acc, loss"):
        step_schedulers([config], "epoch", 1, {"loss": 1.0, "acc": 0.5})
    config.strict = False
    with pytest.warns(RuntimeWarning, match="not stepped"):
        step_schedulers([config], "epoch", 1, {})
    assert steps.calls == []


def test_the_modules_hook_steps_instead():
    steps, plateau, seen = Steps(), Steps(), []
    configs = [LRSchedulerConfig(steps), LRSchedulerConfig(plateau, monitor="loss", reduce_on_plateau=True)]
    step_schedulers(configs, "epoch", 1, {"loss": 3.0}, lambda scheduler, metric: seen.append((scheduler, metric)))
    assert seen == [(steps, None), (plateau, 3.0)]
    assert steps.calls == plateau.calls == []


# ---- manual optimization


def test_a_plateau_scheduler_needs_no_metric_and_what_the_dict_says_is_warned_of(model, opt):
    model.automatic_optimization = False
    plateau = ReduceLROnPlateau(opt)
    assert configure(([opt], [plateau]), model).schedulers[0].scheduler is plateau
    with pytest.warns(RuntimeWarning, match=r"\['frequency', 'monitor'\], but the keys will be ignored: in manual"):
        setup = configure(([opt], [{"scheduler": plateau, "monitor": "x", "frequency": 2, "interval": "step"}]), model)
    assert setup.schedulers[0].interval == "step"


def test_train_optimizer_is_the_optimizer_but_for_step(model, opt):
    calls: list[Any] = []
    wrapped = TrainOptimizer(opt, model, on_step=lambda *args, **kwargs: calls.append((*args, kwargs)) or "stepped")
    assert isinstance(wrapped, Optimizer)
    assert isinstance(wrapped, SGD)
    assert type(wrapped) is TrainOptimizer
    assert wrapped.param_groups is opt.param_groups
    assert wrapped.state_dict() == opt.state_dict()
    assert wrapped.step() == "stepped"
    closure = lambda: None  # noqa: E731
    wrapped.step(closure, extra=1)
    assert calls == [(opt, None, {}), (opt, closure, {"extra": 1})]
    model.layer(torch.ones(1, 2)).sum().backward()
    wrapped.zero_grad()
    assert model.layer.weight.grad is None
    assert repr(wrapped).startswith("TrainOptimizer(SGD")
    with pytest.raises(AttributeError):
        _ = wrapped.no_such_thing


def test_train_optimizer_steps_by_itself_without_a_trainer(model, opt):
    before = model.layer.bias.detach().clone()
    model.layer(torch.ones(1, 2)).sum().backward()
    TrainOptimizer(opt, model).step()
    assert not torch.equal(model.layer.bias, before)


class Toggling(Model):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def toggle_optimizer(self, optimizer: Any) -> None:
        self.events.append("toggle")

    def untoggle_optimizer(self, optimizer: Any) -> None:
        self.events.append("untoggle")


def test_toggle_model_freezes_the_parameters_of_other_optimizers(opt):
    module = Toggling()

    @contextmanager
    def no_sync():
        module.events.append("no_sync")
        yield

    wrapped = TrainOptimizer(opt, module, no_sync=no_sync)
    with wrapped.toggle_model():
        module.events.append("in")
    with wrapped.toggle_model(sync_grad=False):
        module.events.append("in")
    assert module.events == ["toggle", "in", "untoggle", "toggle", "no_sync", "in", "untoggle"]
    with pytest.raises(RuntimeError, match="in the step"), wrapped.toggle_model():
        raise RuntimeError("in the step")
    assert module.events[-1] == "untoggle"

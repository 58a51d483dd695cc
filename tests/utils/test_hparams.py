from __future__ import annotations

import copy
import functools
import inspect
import pickle
from argparse import Namespace
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from instep.errors import UsageError
from instep.utils.hparams import AttributeDict, HyperParameters, plain_values, with_attributes
from instep.utils.named import Named, loaded


class Base(HyperParameters, nn.Module):
    def __init__(self, width: int = 8, *, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()


class Child(Base):
    def __init__(self, lr: float, *layers: int, name: str = "child", **extra: object) -> None:
        super().__init__(width=16, lr=lr / 2)


def test_all_arguments_defaults_included():
    assert Base(4).hparams == {"width": 4, "lr": 0.1}


def test_arguments_of_subclasses_are_collected_and_the_outermost_counts():
    assert Child(0.4, 1, 2, color="red").hparams == {"width": 16, "lr": 0.4, "name": "child", "color": "red"}


def test_other_objects_under_construction_are_left_alone():
    class Outer(HyperParameters):
        def __init__(self, outer_only: int) -> None:
            self.inner = Base(2)
            self.save_hyperparameters()

    outer = Outer(1)
    assert outer.hparams == {"outer_only": 1}
    assert outer.inner.hparams == {"width": 2, "lr": 0.1}


def test_selected_and_ignored_names():
    class Selected(HyperParameters):
        def __init__(self, a: int, b: int, c: int) -> None:
            self.save_hyperparameters("a", "c")

    class Ignored(HyperParameters):
        def __init__(self, a: int, b: int, c: int, ignore: object) -> None:
            self.save_hyperparameters(ignore=ignore)

    assert Selected(1, 2, 3).hparams == {"a": 1, "c": 3}
    assert Ignored(1, 2, 3, "ignore").hparams == {"a": 1, "b": 2, "c": 3}
    assert Ignored(1, 2, 3, ["b", "ignore"]).hparams == {"a": 1, "c": 3}


@dataclass
class Config:
    lr: float = 0.5
    sizes: list[int] = field(default_factory=lambda: [1, 2])


@pytest.mark.parametrize("config", [{"lr": 0.5, "sizes": [1, 2]}, Namespace(lr=0.5, sizes=[1, 2]), Config()])
def test_a_container_is_kept_by_its_entries(config):
    class Model(HyperParameters):
        def __init__(self, config: object, verbose: bool = False) -> None:
            self.save_hyperparameters(config)

    model = Model(config)
    assert model.hparams == {"lr": 0.5, "sizes": [1, 2]}
    assert model._hparams_name == "config"
    assert model.hparams.lr == 0.5


def test_hyperparameters_become_plain_values_and_back():
    values = {"config": Config(), "space": Namespace(a=AttributeDict(b=(1, Config(lr=2)))), "kept": torch.relu, 3: {1}}
    assert plain_values(values) == {
        "config": {"lr": 0.5, "sizes": [1, 2]},
        "space": {"a": {"b": (1, {"lr": 2, "sizes": [1, 2]})}},
        "kept": Named("torch.relu"),
        3: {1},
    }
    assert with_attributes(plain_values(values)).space.a.b[1].lr == 2


def test_a_name_is_that_of_the_very_object_or_of_none():
    @functools.wraps(torch.relu)
    def other(x):
        return x

    named = plain_values([nn.ReLU, nn.functional.gelu, functools.partial(Base, 4, lr=[nn.ReLU]), other, lambda x: x])
    assert [repr(one) for one in named[:3]] == [
        "torch.nn.modules.activation.ReLU",
        "torch.nn.functional.gelu",
        "partial(tests.utils.test_hparams.Base, 4, lr=[torch.nn.modules.activation.ReLU])",
    ]
    assert [loaded(one.path) for one in named] == [nn.ReLU, nn.functional.gelu, Base, None, None]
    assert all(one.path.startswith("<") for one in named[3:])


def test_an_empty_dict_keeps_nothing():
    model = Base()
    model.save_hyperparameters({})
    assert model.hparams == {"width": 8, "lr": 0.1}


def test_calls_of_save_hyperparameters_add_up():
    class Model(HyperParameters):
        def __init__(self, a: int, b: int) -> None:
            self.save_hyperparameters("a")
            self.save_hyperparameters("b")
            self.save_hyperparameters({"c": 3})

    assert Model(1, 2).hparams == {"a": 1, "b": 2, "c": 3}


def test_initial_is_a_deep_copy():
    class Model(HyperParameters):
        def __init__(self, sizes: list[int]) -> None:
            self.save_hyperparameters()

    model = Model([1])
    model.hparams.sizes.append(2)
    model.hparams_initial.sizes.append(3)
    assert model.hparams_initial == {"sizes": [1]}
    assert model.hparams == {"sizes": [1, 2]}


def test_without_a_call_both_are_empty():
    class Silent(HyperParameters):
        pass

    assert Silent().hparams == Silent().hparams_initial == {}
    assert Silent()._log_hyperparams is False


def test_save_hyperparameters_can_leave_the_logger_out():
    class Quiet(HyperParameters):
        def __init__(self, a: int) -> None:
            self.save_hyperparameters(logger=False)

    assert Quiet(1)._log_hyperparams is False
    assert Base()._log_hyperparams is True


def test_a_module_value_warns_unless_it_is_ignored():
    class Model(HyperParameters):
        def __init__(self, backbone: nn.Module, ignore: object = None) -> None:
            self.save_hyperparameters(ignore=ignore)

    with pytest.warns(UserWarning, match=r"ignore=\['backbone'\]"):
        Model(nn.Linear(1, 1))
    assert "backbone" not in Model(nn.Linear(1, 1), ["backbone"]).hparams


def test_before_super_init_of_a_module():
    class Early(HyperParameters, nn.Module):
        def __init__(self, width: int) -> None:
            self.save_hyperparameters()
            super().__init__()
            self.layer = nn.Linear(width, width)

    assert Early(3).hparams == {"width": 3}
    assert [name for name, _ in Early(3).named_parameters()] == ["layer.weight", "layer.bias"]


def test_dataclass_post_init():
    @dataclass
    class Model(HyperParameters):
        lr: float = 0.1
        depth: int = 2

        def __post_init__(self) -> None:
            self.save_hyperparameters()

    assert Model(depth=4).hparams == {"lr": 0.1, "depth": 4}


def test_through_a_decorated_init_and_a_helper_with_a_frame():
    def traced(init):
        @functools.wraps(init)
        def wrapper(*args, **kwargs):
            return init(*args, **kwargs)

        return wrapper

    class Model(HyperParameters):
        @traced
        def __init__(self, a: int) -> None:
            self.keep(inspect.currentframe())

        def keep(self, frame) -> None:
            self.save_hyperparameters(frame=frame)

    assert Model(5).hparams == {"a": 5}


def test_a_closure_over_self_is_no_hyperparameter():
    class Model(HyperParameters):
        def __init__(self, a: int) -> None:
            self.later = lambda: (self, a)
            self.save_hyperparameters()

    assert Model(5).hparams == {"a": 5}


def test_mistakes_are_explained():
    model = Base()
    with pytest.raises(UsageError, match="not called from __init__"):
        model.save_hyperparameters()
    with pytest.raises(UsageError, match="'with'"):
        model.save_hyperparameters("with")
    with pytest.raises(UsageError, match="got a float"):
        model.save_hyperparameters(0.1)

    class Misspelt(HyperParameters):
        def __init__(self, lr: float) -> None:
            self.save_hyperparameters("learning_rate")

    with pytest.raises(UsageError, match="it has lr"):
        Misspelt(0.1)


def test_values_are_kept_as_they_are():
    class Model(HyperParameters):
        def __init__(self, dtype: torch.dtype, act: type) -> None:
            self.save_hyperparameters()

    model = Model(torch.bfloat16, nn.ReLU)
    assert model.hparams.dtype is torch.bfloat16
    assert model.hparams.act is nn.ReLU


def test_an_attribute_dict_reads_writes_and_copies():
    hparams = AttributeDict(a=1)
    hparams.b = 2
    del hparams.a
    assert hparams == {"b": 2}
    hparams[0] = 3
    with pytest.raises(AttributeError, match="there are: b, 0"):
        _ = hparams.a
    for copied in (copy.deepcopy(hparams), copy.copy(hparams), pickle.loads(pickle.dumps(hparams))):
        assert type(copied) is AttributeDict
        assert copied.b == 2

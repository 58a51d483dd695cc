"""Where `prepare` puts things, and preparing one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instep.errors import SettingError, UsageError
from tests.accelerator.loops import Net, decay, sgd


def on_meta() -> nn.Module:
    """A model that gets values where it is placed."""
    return nn.Linear(2, 2, device="meta")


def test_without_device_placement_a_model_stays_where_it_is(make: Any) -> None:
    model = make(device_placement=False).prepare(on_meta())
    assert model.weight.is_meta
    assert not make().prepare(on_meta()).weight.is_meta


def test_placement_is_chosen_for_each_object(make: Any) -> None:
    accelerator = make()
    stays, comes = accelerator.prepare(on_meta(), Net(), device_placement=[False, None])
    assert stays.weight.is_meta
    assert comes.layers[0].weight.device == accelerator.device
    placed = make(device_placement=False).prepare(Net(), on_meta(), device_placement=[None, True])[1]
    assert not placed.weight.is_meta
    with pytest.raises(SettingError, match="1 entries for 2 objects"):
        make().prepare(Net(), on_meta(), device_placement=[False])


def test_optimizers_and_schedulers_are_prepared_one_at_a_time(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model = accelerator.prepare_model(Net())
    plain = sgd(model)
    optimizer = accelerator.prepare_optimizer(plain)
    assert accelerator.prepare_optimizer(plain) is accelerator.prepare_optimizer(optimizer) is optimizer
    schedule = decay(plain)
    scheduler = accelerator.prepare_scheduler(schedule)
    assert accelerator.prepare_scheduler(schedule) is accelerator.prepare_scheduler(scheduler) is scheduler
    rates = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 4)).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(plain.param_groups[0]["lr"])
    assert rates == pytest.approx([0.05, 0.045, 0.045, 0.0405])
    assert accelerator.step == 2


def test_each_prepared_model_has_a_strategy_of_its_own(make: Any) -> None:
    accelerator = make()
    one, two = Net(), nn.Linear(2, 2)
    accelerator.prepare(one, two)
    assert accelerator.strategy_of(one).module is one
    assert accelerator.strategy_of(two).module is two
    with pytest.raises(UsageError, match="this Net was not prepared"):
        accelerator.strategy_of(Net())

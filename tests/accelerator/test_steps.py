"""Steps of more than one model, optimizer or loader, and models that are copied, compiled or call themselves."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator
from instep.accelerator import DataLoaderConfiguration, GradientAccumulationPlugin
from instep.errors import SettingError, UsageError
from tests.helpers.spawn import run_ranks


def numbers(length: int = 10, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(length).float()), batch_size)


def linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A model whose gradient is its mean input, and whose weight therefore is minus the sum of the steps."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def pair(accelerator: Accelerator) -> tuple[Any, Any, Any, Any]:
    (d, d_sgd), (g, g_sgd) = linear(), linear()
    return accelerator.prepare(d=d, d_sgd=d_sgd, g=g, g_sgd=g_sgd)


def loss(model: nn.Module, x: float = 1.0) -> torch.Tensor:
    return model(torch.tensor([[x]])).mean()


@pytest.fixture
def scaled(make: Any, monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """An Accelerator whose losses are scaled, by the scaler of a CPU: the arithmetic is that of every device."""
    accelerator = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    monkeypatch.setattr(accelerator.precision, "scaler", scaler)
    return accelerator


# ---- scaled gradients


def test_clipping_one_optimizer_leaves_the_other_scaled(scaled: Accelerator) -> None:
    d, d_sgd, g, g_sgd = pair(scaled)
    for step in (1, 2):
        for model, optimizer in ((d, d_sgd), (g, g_sgd)):
            optimizer.zero_grad()
            scaled.backward(loss(model))
            norm = scaled.clip_grad_norm_(model.parameters(), 100.0)
            assert norm is not None
            assert norm.item() == 1.0
            optimizer.step()
            assert model.weight.item() == -step


def test_two_optimizers_of_one_backward_are_unscaled_once_each(scaled: Accelerator) -> None:
    d, d_sgd, g, g_sgd = pair(scaled)
    for step in (1, 2):
        scaled.backward(loss(d) + loss(g))
        scaled.clip_grad_norm_([*d.parameters(), *g.parameters()], 100.0)
        for optimizer in (d_sgd, g_sgd):
            optimizer.step()
            optimizer.zero_grad()
        assert (d.weight.item(), g.weight.item()) == (-step, -step)


def test_a_step_that_the_user_skips_leaves_the_next_one_right(scaled: Accelerator) -> None:
    model, optimizer = scaled.prepare(*linear())
    scaled.backward(loss(model))
    scaled.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.zero_grad()
    scaled.backward(loss(model))
    scaled.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    assert model.weight.item() == -1.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_that_is_not_finite_skips_step_and_schedule(scaled: Accelerator, fused: bool) -> None:
    model, _ = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    schedule, model = scaled.prepare(schedule, model)
    optimizer = scaled.prepare(optimizer)  # after its schedule, in a call of its own
    for x, skipped in ((float("inf"), True), (1.0, False)):
        scaled.backward(loss(model, x))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert scaled.optimizer_step_was_skipped == skipped
    assert model.weight.item() == -1.0
    assert schedule.get_last_lr() == [0.5]
    scaled._prepared.plain.gradients.update_scaler()
    assert scaled.precision.state_dict()["scale"] == 512.0


def test_a_skipped_step_keeps_back_the_schedule_of_its_own_optimizer_alone(scaled: Accelerator) -> None:
    d, d_sgd, g, g_sgd = pair(scaled)
    schedules = [torch.optim.lr_scheduler.StepLR(each.optimizer, 1, 0.5) for each in (d_sgd, g_sgd)]
    prepared = [scaled.prepare(schedule) for schedule in schedules]
    scaled.backward(loss(d, float("inf")) + loss(g))
    for optimizer, schedule in zip((d_sgd, g_sgd), prepared, strict=True):
        optimizer.step()
        schedule.step()
    assert [(d_sgd.step_was_skipped, d.weight.item()), (g_sgd.step_was_skipped, g.weight.item())] == [
        (True, 0.0),
        (False, -1.0),
    ]
    assert [schedule.get_last_lr() for schedule in schedules] == [[1.0], [0.5]]


# ---- windows


def test_both_halves_of_a_gan_are_in_one_micro_batch(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    d, d_sgd, g, g_sgd = pair(accelerator)
    steps: dict[str, list[float]] = {"d": [], "g": []}
    d_sgd.optimizer.register_step_pre_hook(lambda *_: steps["d"].append(d.weight.grad.item()))
    g_sgd.optimizer.register_step_pre_hook(lambda *_: steps["g"].append(g.weight.grad.item()))
    for (x,) in accelerator.prepare(numbers(16)):
        for model, optimizer in ((d, d_sgd), (g, g_sgd)):
            with accelerator.accumulate(model):
                accelerator.backward(model(x[:, None]).mean())
                optimizer.step()
                optimizer.zero_grad()
    assert steps == {"d": [3.5, 11.5], "g": [3.5, 11.5]}


def test_gradients_may_be_zeroed_before_each_forward_of_several_models(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    d, d_sgd, g, g_sgd = pair(accelerator)
    steps: dict[str, list[float]] = {"d": [], "g": []}
    d_sgd.optimizer.register_step_pre_hook(lambda *_: steps["d"].append(d.weight.grad.item()))
    g_sgd.optimizer.register_step_pre_hook(lambda *_: steps["g"].append(g.weight.grad.item()))
    for (x,) in accelerator.prepare(numbers(24)):
        with accelerator.accumulate(d, g):
            for model, optimizer in ((d, d_sgd), (g, g_sgd)):
                optimizer.zero_grad()
                accelerator.backward(model(x[:, None]).mean())
                optimizer.step()
    assert steps == {"d": [3.5, 11.5, 19.5], "g": [3.5, 11.5, 19.5]}


def test_two_models_accumulate_with_num_items_and_clipping(make: Any) -> None:
    accelerator = make()
    d, d_sgd, g, g_sgd = pair(accelerator)
    for (x,) in accelerator.prepare(numbers(4)):
        with accelerator.accumulate(d, g):
            for model, optimizer in ((d, d_sgd), (g, g_sgd)):
                accelerator.backward(model(x[:, None]).mean(), num_items=4)
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
    assert (d.weight.item(), g.weight.item()) == (-1.5, -1.5)


@pytest.mark.parametrize("num_items", [None, 1])
@pytest.mark.parametrize(("prepares", "end"), [(True, -7.0), (False, -3.0)])
def test_a_block_within_a_block_is_in_the_same_micro_batch(
    make: Any, prepares: bool, end: float, num_items: int | None
) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    d, d_sgd, g, g_sgd = pair(accelerator)
    for (x,) in accelerator.prepare(numbers(5, 1)) if prepares else numbers(5, 1):
        with accelerator.accumulate(g):
            with accelerator.accumulate(d):
                accelerator.backward(d(x[:, None]).mean(), num_items)
                d_sgd.step()
                d_sgd.zero_grad()
            accelerator.backward(g(x[:, None]).mean(), num_items)
            g_sgd.step()
            g_sgd.zero_grad()
    assert (d.weight.item(), g.weight.item()) == (end, end)


def test_losses_behind_an_inner_block_belong_to_the_batch_of_the_outer_one(make: Any) -> None:
    accelerator = make()
    d, _, g, _ = pair(accelerator)
    loader = accelerator.prepare_data_loader(numbers(8))
    batches = iter(loader)
    (x,), ahead = next(batches), next(batches)
    with accelerator.accumulate(g):
        with accelerator.accumulate(d):
            accelerator.backward(d(x[:, None]).mean())
        for _ in range(2):
            accelerator.backward(g(x[:, None]).mean())
    assert loader.state_dict()["batches"] == 1
    del ahead  # until here the script has held it, and has not trained on it


@pytest.mark.parametrize("num_items", [None, 1])
@pytest.mark.parametrize("first", ["by hand", "accumulate"])
def test_loops_that_count_by_hand_and_by_accumulate_follow_each_other(
    make: Any, first: str, num_items: int | None
) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*linear(), numbers(5, 1))
    steps: list[float] = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: steps.append(model.weight.grad.item()))

    def train(by_hand: bool) -> list[float]:
        steps.clear()
        for index, (x,) in enumerate(loader):
            with nullcontext() if by_hand else accelerator.accumulate(model):
                accelerator.backward(model(x[:, None]).mean(), None if by_hand else num_items)
                if not by_hand or index % 2 or index == 4:
                    optimizer.step()
                    optimizer.zero_grad()
        return steps.copy()

    loops = (True, False, True) if first == "by hand" else (False, True, False)
    with pytest.warns(UserWarning, match="outside of"):
        seen = list(map(train, loops))
    assert seen == [[0.5, 2.5, 2.0] if by_hand else [0.5, 2.5, 4.0] for by_hand in loops]


def test_data_pulled_within_the_loop_makes_no_window(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer, train, other = accelerator.prepare(*linear(), numbers(16), numbers(12))
    more = iter(other)
    ends = []
    for (x,) in train:
        next(more, None)
        with accelerator.accumulate(model):
            accelerator.backward(model(x[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()
        ends.append(accelerator.sync_gradients)
    assert ends == [False, True, False, True]
    assert model.weight.item() == -15.0


def test_a_loop_of_loops_has_the_windows_of_the_inner_one(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer, tasks, batches = accelerator.prepare(*linear(), numbers(3, 1), numbers(12))
    ends = []
    for _ in tasks:
        for (x,) in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(x[:, None]).mean())
                optimizer.step()
                optimizer.zero_grad()
            ends.append(accelerator.sync_gradients)
    assert ends == [False, True, True] * 3


def test_a_closure_is_for_windows_of_one(make: Any) -> None:
    accelerator = make()
    model, _ = linear()
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = (model(torch.ones(1, 1)) - 1).square().mean()
        accelerator.backward(value)
        return value

    optimizer.step(closure)
    assert model.weight.item() > 0
    model, _ = linear()
    windows = make(gradient_accumulation_steps=2)
    _, optimizer = windows.prepare(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UsageError, match="gradient_accumulation_steps=1"):
        optimizer.step(closure)


# ---- loaders


def test_an_older_pass_over_the_same_loader_is_refused(make: Any) -> None:
    loader = make().prepare(numbers())
    older = iter(loader)
    next(older)
    assert len(list(loader)) == 3
    with pytest.raises(UsageError, match="second loader"):
        next(older)


def test_after_an_inner_loop_the_state_speaks_of_the_outer_one_again(make: Any) -> None:
    accelerator = make()
    outer, inner = accelerator.prepare(numbers(8), numbers(6))
    seen = []
    for _ in outer:
        for _ in inner:
            pass
        state = accelerator.gradient_state
        seen.append((state.active_dataloader is outer, state.end_of_dataloader, state.remainder))
    assert seen == [(True, False, -1), (True, True, 4)]


# ---- positions


def train_on(accelerator: Accelerator, loader: Any, batches: int) -> list[float]:
    model, seen = nn.Linear(1, 1), []
    for (x,) in loader:
        seen += x.tolist()
        accelerator.backward(model(x[:, None]).mean())
        if len(seen) >= 4 * batches:
            break
    return seen


def test_a_state_that_was_loaded_and_not_used_is_saved_again(make: Any) -> None:
    accelerator = make()
    first, second, third = (accelerator.prepare_data_loader(numbers(12), name=name) for name in "abc")
    assert train_on(accelerator, first, 1) == [0, 1, 2, 3]
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())
    assert train_on(accelerator, third, 3) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_a_state_of_a_beginning_takes_the_place_of_one_within(make: Any) -> None:
    accelerator = make()
    first, second = (accelerator.prepare_data_loader(numbers(12), name=name) for name in "ab")
    start = first.state_dict()
    train_on(accelerator, first, 1)
    second.load_state_dict(first.state_dict())
    second.load_state_dict(start)
    assert len(list(second)) == 3


def test_an_evaluation_that_was_left_has_no_place_to_go_back_to(make: Any) -> None:
    accelerator = make()
    first, second = (accelerator.prepare_data_loader(numbers(12), name=name) for name in "ab")
    for _ in first:
        break
    second.load_state_dict(first.state_dict())
    assert len(list(second)) == 3


def test_gradients_that_a_step_has_left_make_an_evaluation_no_training(make: Any, tmp_path: Path) -> None:
    accelerator = make()
    model, optimizer, train, val = accelerator.prepare(*linear(), numbers(8), numbers(12))
    for (x,) in train:
        accelerator.backward(model(x[:, None]).mean())
        optimizer.step()
    for _ in val:
        accelerator.save_state(tmp_path / "state")
        break
    accelerator.load_state(tmp_path / "state")
    assert len(list(val)) == 2, "the batch in hand was evaluated"


def test_a_batch_in_hand_that_was_not_trained_on_comes_again(make: Any) -> None:
    accelerator = make()
    first, second = (accelerator.prepare_data_loader(numbers(12), name=name) for name in "ab")
    model = nn.Linear(1, 1)
    for index, (x,) in enumerate(first):
        if index == 1:
            second.load_state_dict(first.state_dict())  # at the top of the body
            break
        accelerator.backward(model(x[:, None]).mean())
    assert train_on(accelerator, second, 3) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_a_state_of_an_epochs_last_batch_goes_on_with_the_next_epoch(make: Any) -> None:
    accelerator = make()
    first, second = (accelerator.prepare_data_loader(numbers(12), name=name) for name in "ab")
    assert len(train_on(accelerator, first, 3)) == 12
    second.load_state_dict(first.state_dict())
    assert second.next_epoch == 1
    assert len(list(second)) == 3


# ---- models


def test_a_copy_computes_with_its_own_weights_in_the_same_precision(make: Any) -> None:
    model = make(mixed_precision="bf16").prepare(linear()[0])
    other = copy.deepcopy(model)
    nn.init.ones_(other.weight)
    assert (loss(model).item(), loss(other).item()) == (0.0, 1.0)
    assert loss(other).dtype == torch.float32


def test_precision_ends_with_the_accelerator(make: Any) -> None:
    seen: list[torch.dtype] = []
    model = nn.Sequential(linear()[0])
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    first = make(mixed_precision="bf16")
    loss(first.prepare(model))
    first.free_memory()
    loss(make().prepare(model))
    assert seen == [torch.bfloat16, torch.float32]


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return self(self.layer(x), depth - 1) if depth else x


def test_a_model_that_calls_itself_leaves_no_precision_on(make: Any) -> None:
    make(mixed_precision="bf16").prepare(Recursive())(torch.ones(1, 2))
    assert not torch.is_autocast_enabled("cpu")


def test_compiled_models_are_known_by_what_is_in_them(make: Any) -> None:
    accelerator = make()
    model = linear()[0]
    compiled = torch.compile(model, backend="eager")
    prepared = accelerator.prepare(compiled)
    assert list(accelerator._prepared.models) == ["Linear"]
    assert accelerator.unwrap_model(prepared) is compiled
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    other = accelerator.prepare_model(linear()[0], name="other")
    later = torch.compile(other, backend="eager")
    with accelerator.accumulate(later):
        assert accelerator.unwrap_model(later) is later
        assert accelerator.unwrap_model(later, keep_torch_compile=False) is other


def test_what_was_prepared_before_is_prepared_again_from_its_inside(make: Any) -> None:
    accelerator = make()
    first = accelerator.prepare(*linear(), numbers())
    accelerator.free_memory()
    second = accelerator.prepare(*first)
    assert second[0] is first[0]
    assert type(second[1].optimizer) is torch.optim.SGD
    assert second[2].source.loader is first[2].source.loader


def test_names_that_a_checkpoint_could_not_tell_apart_are_refused(make: Any) -> None:
    accelerator = make()
    accelerator.prepare_model(linear()[0], name="a")
    for name in ("a", "a.b"):
        with pytest.raises(SettingError, match=f"{name!r}"):
            accelerator.prepare_model(linear()[0], name=name)
    accelerator.prepare_data_loader(numbers(), name="train")
    with pytest.raises(SettingError, match="two loaders"):
        accelerator.prepare_data_loader(numbers(), name="train")


# ---- several processes


def weights_for_evaluation() -> float:
    accelerator = Accelerator(cpu=True)
    trained, optimizer = linear()
    accelerator.prepare(trained=trained, optimizer=optimizer)  # from here on ranks draw different numbers
    model = accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True, name="teacher")
    weight = model.weight.item()
    accelerator.free_memory()
    return weight


@pytest.mark.dist
def test_a_model_for_evaluation_is_the_same_on_all_ranks() -> None:
    one, other = run_ranks(weights_for_evaluation, 2)
    assert one == other


def windows_that_end_apart() -> tuple[int, float]:
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    model, optimizer, loader = accelerator.prepare(*linear(), numbers(9, 2))
    batches = 0
    with accelerator.join_uneven_inputs([model]):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x[:, None]).mean())
                optimizer.step()
                optimizer.zero_grad()
            batches += 1
    weight = accelerator.unwrap_model(model).weight.item()
    accelerator.end_training()
    return batches, weight


def items_of_ranks_that_end_apart() -> str:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model, _, loader = accelerator.prepare(*linear(), numbers(1, 2))
    with accelerator.join_uneven_inputs([model]):
        for (x,) in loader:
            with accelerator.accumulate(model), pytest.raises(UsageError, match="adds up the items") as error:
                accelerator.backward(torch.ones(1, requires_grad=True).sum(), num_items=len(x))
            return str(error.value)
    return ""


@pytest.mark.dist
def test_items_are_not_counted_where_ranks_end_apart() -> None:
    told, nothing = run_ranks(items_of_ranks_that_end_apart, 2)
    assert "Leave num_items out" in told
    assert nothing == ""


@pytest.mark.dist
def test_windows_of_ranks_that_end_apart_do_not_hang() -> None:
    (one, weight), (other, same) = run_ranks(windows_that_end_apart, 2)
    assert (one, other) == (3, 2)
    assert weight == same


def test_looking_at_gradients_that_are_not_there_does_no_harm(scaled: Accelerator) -> None:
    model, optimizer = scaled.prepare(*linear())
    scaled.unscale_gradients()
    optimizer.zero_grad()
    scaled.backward(loss(model))
    optimizer.step()
    assert model.weight.item() == -1.0


def test_a_saved_state_knows_what_the_last_step_did_to_the_scale(scaled: Accelerator) -> None:
    model, optimizer = scaled.prepare(*linear())
    scaled.backward(loss(model, float("inf")))
    optimizer.step()
    assert scaled._prepared.precision_state()["scale"] == 512.0


def test_a_model_that_was_not_prepared_is_told(make: Any) -> None:
    accelerator = make()
    model, optimizer = linear()
    accelerator.prepare(optimizer)
    with pytest.warns(UserWarning, match="1 of the 1 parameters of SGD are in no prepared model"):
        accelerator.backward(loss(model))
    accelerator.backward(loss(model))  # once is enough
    with pytest.raises(SettingError, match="class Linear"):
        accelerator.prepare(nn.Linear)


# ---- windows that are left, or begin late


def train_in_windows(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    batches: Any,
    left_out: tuple[float, ...] = (),
    last: float | None = None,
    scheduler: Any = None,
) -> None:
    """Train as scripts do, until the last batch; of those that are left out no step is taken, and gradients stay."""
    for (x,) in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x[:, None]).mean())
            if x.item() not in left_out:
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
        if x.item() == last:
            return


def test_gradients_of_a_window_without_a_step_stay_until_the_next_one(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*linear(), numbers(6, 1))
    train_in_windows(accelerator, model, optimizer, loader, left_out=(2.0, 3.0))
    assert model.weight.item() == -(0.5 + 2.5 + 4.5)


def test_a_window_begins_anew_where_batches_were_skipped(make: Any) -> None:
    accelerator = make(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, adjust_scheduler=True))
    model, optimizer = linear()
    steps = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, numbers(4, 1), steps)
    train_in_windows(accelerator, model, optimizer, loader, last=2.0, scheduler=scheduler)
    assert model.weight.item() == -0.5
    skipping = accelerator.skip_first_batches(loader, 1)
    train_in_windows(accelerator, model, optimizer, skipping, scheduler=scheduler)
    assert model.weight.item() == -(0.5 + 1.0 + 2.5), "the open window was left, and the first one has one batch"
    assert steps.last_epoch == 2 + 3, "a scheduler counts the batches of its windows"

"""The Accelerator in one process: prepare, windows, schedulers, skipping, and whose state is read."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from instep import Accelerator, AcceleratorState, GradientState
from instep.accelerator import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    skip_first_batches,
)
from instep.accelerator.loader import gather_samples
from instep.errors import DataError, SettingError, UsageError
from instep.strategies import Precision, Strategy
from tests.accelerator.loops import Case, Net, data, decay, sgd
from tests.trainer.toys import Toy, loader, quiet


def numbers(length: int = 10, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(length).float()), batch_size, **options)


def linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


# ---- prepare


def test_prepare_takes_any_order_and_passes_the_rest_through(make: Any) -> None:
    accelerator = make()
    model = Net()
    optimizer = sgd(model)
    scheduler = decay(optimizer)
    other = object()
    out = accelerator.prepare(scheduler, data(Case()), other, optimizer, model)
    assert out[4] is model
    assert out[2] is other
    assert isinstance(out[3], torch.optim.AdamW)
    assert isinstance(out[0].scheduler, torch.optim.lr_scheduler.ExponentialLR)
    assert len(out[1]) == 6
    assert accelerator.prepare(*out) == out, "a second time changes nothing"


def test_two_models_of_one_class_need_names(make: Any) -> None:
    accelerator = make()
    with pytest.raises(SettingError, match=r"two models are called 'Net'.*prepare_model"):
        accelerator.prepare(Net(), Net())
    accelerator.prepare(one=Net(), two=Net())
    assert list(accelerator._prepared.models) == ["Net", "one", "two"]


def test_a_scheduler_made_of_the_prepared_optimizer_steps_it(make: Any) -> None:
    accelerator = make()
    model, optimizer = linear()
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"mixed_precision": "fp32"}, "mixed_precision='fp32' is not known"),
        ({"mixed_precision": "fp16"}, "Use 'bf16' or 'no'"),
        ({"even_batches": True}, "DataLoaderConfiguration"),
        ({"mixed_precison": "no"}, "mixed_precision"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0: expected"),
        ({"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(3)}, "one of"),
        ({"log_with": "tensorbord"}, "Did you mean 'tensorboard'"),
        ({"kwargs_handlers": [GradientAccumulationPlugin()]}, "gradient_accumulation_plugin"),
        ({"strategy": "ddpp"}, "Did you mean 'ddp'"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_and_leave_no_run_behind(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Accelerator(cpu=True, **settings)
    assert not AcceleratorState().initialized


def test_handlers_without_effect_warn(make: Any) -> None:
    with pytest.warns(UserWarning, match="gradient scaler options"):
        make(kwargs_handlers=[GradScalerKwargs(init_scale=2.0)])
    make(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])


def test_mixed_precision_computes_in_bfloat16_and_gives_float32(make: Any) -> None:
    accelerator = make(mixed_precision="bf16")
    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    prepared = accelerator.prepare(model)
    assert prepared(torch.ones(2, 4)).dtype == torch.float32
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)(torch.ones(2, 4)).dtype == torch.float32
    with accelerator.autocast():
        assert model(torch.ones(2, 4)).dtype == torch.bfloat16
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16]


# ---- windows


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("length", [8, 10, 16, 17])
def test_a_window_is_the_mean_over_its_samples(make: Any, length: int, zero_first: bool) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer = linear()
    model, optimizer, batches = accelerator.prepare(model, optimizer, numbers(length))
    gradients: list[float] = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: gradients.append(model.weight.grad.item()))
    for (x,) in batches:
        with accelerator.accumulate(model):
            if zero_first:
                optimizer.zero_grad()
            accelerator.backward(model(x[:, None]).mean())
            optimizer.step()
            if not zero_first:
                optimizer.zero_grad()
    windows = [torch.arange(length).float()[start : start + 8].mean().item() for start in range(0, length, 8)]
    assert gradients == pytest.approx(windows)
    assert accelerator.step == len(windows)


def test_items_weigh_as_in_one_big_batch(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=3)
    model, optimizer = linear()
    model, optimizer, batches = accelerator.prepare(model, optimizer, numbers(16))
    gradients: list[float] = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: gradients.append(model.weight.grad.item()))
    for (x,) in batches:
        kept = x[x % 3 > 0]  # another number of tokens in each
        with accelerator.accumulate(model):
            accelerator.backward(model(kept[:, None]).mean(), num_items=torch.tensor(len(kept)))
            norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
            assert (norm is not None) == accelerator.sync_gradients
            optimizer.step()
            optimizer.zero_grad()
    kept = [[x for x in range(start, stop) if x % 3] for start, stop in ((0, 12), (12, 16))]
    assert gradients == pytest.approx([sum(part) / len(part) for part in kept])


def test_items_for_some_losses_of_a_window_are_refused(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, _ = linear()
    with pytest.raises(UsageError, match=r"accelerator\.accumulate"):
        accelerator.backward(model(torch.ones(1, 1)).mean(), num_items=2)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).mean(), num_items=2)
        with pytest.raises(UsageError, match="two different numbers"):
            accelerator.backward(model(torch.ones(1, 1)).mean(), num_items=3)
    with accelerator.accumulate(model), pytest.raises(UsageError, match="for some losses"):
        accelerator.backward(model(torch.ones(1, 1)).mean())


def test_behind_its_blocks_a_loop_counts_its_own_windows(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer, batches = accelerator.prepare(*linear(), numbers(10))
    for (x,) in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()

    def by_hand() -> list[float]:
        gradients: list[float] = []
        for (x,) in batches:
            accelerator.backward(model(x[:, None]).mean())
            gradients.append(model.weight.grad.item())
            model.weight.grad = None
        return gradients

    with pytest.warns(UserWarning, match="outside of .* divides each loss by gradient_accumulation_steps=2") as told:
        gradients = by_hand()
    assert gradients == pytest.approx([1.5 / 2, 5.5 / 2, 8.5 / 2]), "the last one too, whatever its window was before"
    assert len(told) == 1
    with pytest.raises(UsageError, match="say where its micro-batches"):
        accelerator.backward(model(torch.ones(1, 1)).mean(), num_items=2)


def test_leaving_an_evaluation_early_moves_no_window(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer = linear()
    model, optimizer, train, val = accelerator.prepare(model, optimizer, numbers(24), numbers(9))
    ends = []
    kept = []
    for (x,) in train:
        with accelerator.accumulate(model):
            accelerator.backward(model(x[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()
        ends.append(accelerator.sync_gradients)
        passing = iter(val)
        next(passing)
        kept.append(passing)  # an iterator that nobody closes
    assert ends == [False, True] * 3
    assert accelerator.step == 3


def test_behind_a_loop_within_the_loop_the_outer_batch_is_trained_on(make: Any) -> None:
    accelerator = make()
    model, optimizer, outer, inner = accelerator.prepare(*linear(), numbers(12), numbers(8))
    gradients: list[float] = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: gradients.append(model.weight.grad.item()))

    def train(x: torch.Tensor) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(x[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()

    for (x,) in outer:
        for (y,) in inner:
            train(y)
        train(x)
        assert outer.batches_done == outer.batch_idx + 1
    assert gradients == [1.5, 5.5, 1.5, 1.5, 5.5, 5.5, 1.5, 5.5, 9.5]


def test_without_sync_with_dataloader_windows_run_on_over_epochs(make: Any) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = make(gradient_accumulation_plugin=plugin)
    model, optimizer = linear()
    model, optimizer, batches = accelerator.prepare(model, optimizer, numbers(12))
    ends = []
    for _ in range(2):
        for (x,) in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(x[:, None]).mean())
                optimizer.step()
                optimizer.zero_grad()
            ends.append(accelerator.sync_gradients)
    assert ends == [False, True] * 3


@pytest.mark.parametrize("adjust, expected", [(False, 3), (True, 5)])
def test_schedulers_step_once_per_optimizer_step_or_once_per_batch_of_it(
    make: Any, adjust: bool, expected: int
) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=adjust)
    accelerator = make(gradient_accumulation_plugin=plugin)
    model, optimizer = linear()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1.0 / (count + 1))
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, numbers(20), scheduler)
    for (x,) in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x[:, None]).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.last_epoch == expected


def test_a_scheduler_may_be_left_to_the_user(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=4, step_scheduler_with_optimizer=False)
    model, optimizer = linear()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, numbers(), scheduler)
    optimizer.step()
    for _ in batches:
        with accelerator.accumulate(model):
            scheduler.step()
    assert scheduler.last_epoch == 3


def test_gradients_that_were_not_stepped_with_stay_out_of_the_next_window(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer = linear()
    model, optimizer, batches = accelerator.prepare(model, optimizer, numbers(16))
    gradients: list[float] = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: gradients.append(model.weight.grad.item()))
    for index, (x,) in enumerate(batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(x[:, None]).mean())
            if index != 1:  # as a loop does that skips a step
                optimizer.step()
            optimizer.zero_grad()
    assert gradients == [11.5]


def test_a_loop_by_hand_may_drop_gradients_before_and_after_a_step(make: Any) -> None:
    accelerator = make()
    model, optimizer = accelerator.prepare(*linear())
    taken: list[float] = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: taken.append(model.weight.grad.item()))
    for value in (1.0, 2.0):
        for dropped in (5.0, 6.0):
            optimizer.zero_grad()
            accelerator.backward(model(torch.tensor([[dropped]])).mean())
        optimizer.zero_grad()
        accelerator.backward(model(torch.tensor([[value]])).mean())
        optimizer.step()
    assert taken == [1.0, 2.0]
    optimizer.zero_grad()
    assert model.weight.grad is None


# ---- loaders


def test_a_pass_is_an_epoch_of_its_own_order(make: Any) -> None:
    batches = make().prepare(numbers(shuffle=True))
    assert (batches.epoch, batches.batch_idx) == (-1, -1)
    passes = [torch.cat([x for (x,) in batches]).tolist() for _ in range(3)]
    assert all(sorted(order) == list(range(10)) for order in passes)
    assert passes[0] != passes[1] != passes[2]
    batches.set_epoch(1)
    assert torch.cat([x for (x,) in batches]).tolist() == passes[1]


def test_skipping_counts_from_the_epochs_beginning_and_keeps_what_counts(make: Any) -> None:
    accelerator = make()
    batches = accelerator.prepare(numbers())
    skipped = skip_first_batches(batches, 2)
    assert len(skipped) == 1
    assert [x.tolist() for (x,) in skipped] == [[8, 9]]
    first = batches.epoch
    assert [accelerator.gather_for_metrics(x).tolist() for (x,) in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches.epoch == first + 1
    assert [x.tolist() for (x,) in accelerator.skip_first_batches(batches, 1)] == [[4, 5, 6, 7], [8, 9]]
    for more in (3, 4):
        nothing = skip_first_batches(batches, more)
        assert (len(nothing), list(nothing)) == (0, []), "all of an epoch may be left out"


@pytest.mark.parametrize("source", ["loader", "list"])
def test_batches_of_what_was_not_prepared_are_skipped(make: Any, source: str) -> None:
    plain: Any = numbers() if source == "loader" else list(numbers())
    skipped = skip_first_batches(plain, 1)
    assert (len(skipped), len(skip_first_batches(plain))) == (2, 3)
    for _ in range(2):
        assert [x.tolist() for (x,) in copy.copy(skipped)] == [[4, 5, 6, 7], [8, 9]]
    if source == "loader":
        assert [x.tolist() for (x,) in make().prepare(skipped)] == [[4, 5, 6, 7], [8, 9]]


def test_the_gradient_state_knows_the_loader_in_hand(make: Any) -> None:
    accelerator = make()
    outer, inner = accelerator.prepare(numbers(8), numbers(6))
    state = GradientState()
    seen = []
    for _ in outer:
        seen.append((state.active_dataloader is outer, state.end_of_dataloader, state.remainder))
        for _ in inner:
            assert state.active_dataloader is inner
            assert state.dataloader_references == [outer, inner]
    assert seen == [(True, False, -1), (True, True, 4)]
    assert not state.in_dataloader
    assert (state.active_dataloader, state.end_of_dataloader, state.remainder) == (None, False, -1)


def test_rows_that_are_not_samples_need_to_be_named(make: Any) -> None:
    accelerator = make()
    for (x,) in accelerator.prepare(numbers(6)):
        assert accelerator.gather_for_metrics({"x": x, "loss": x.mean()})["loss"].shape == (1,)
        three = x.repeat_interleave(3)
        with pytest.raises(DataError, match="per_sample=False"):
            accelerator.gather_for_metrics(three)
        assert torch.equal(accelerator.gather_for_metrics(three, per_sample=False), three)
        assert accelerator.gather_for_metrics(x.tolist(), use_gather_object=True) == x.tolist()
        with pytest.raises(DataError, match="list of objects with an entry per sample"):
            accelerator.gather_for_metrics("abc", use_gather_object=True)


# ---- the run


def test_a_trainer_beside_an_accelerator_disturbs_nothing(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=4, mixed_precision="bf16")
    assert (AcceleratorState().mixed_precision, GradientState().num_steps) == ("bf16", 4)
    seen: list[Any] = []

    class Watching(Toy):
        def on_train_start(self) -> None:
            seen.append((AcceleratorState().mixed_precision, GradientState().num_steps))

    quiet(max_epochs=1, accumulate_grad_batches=2).fit(Watching(), loader())
    assert seen == [("no", 2)]
    assert (accelerator.mixed_precision, GradientState().num_steps) == ("bf16", 4)


def test_two_accelerators_keep_their_own_windows(make: Any) -> None:
    one = make(gradient_accumulation_steps=4)
    two = make()
    assert (one.gradient_accumulation_steps, two.gradient_accumulation_steps) == (4, 1)
    two.free_memory()
    assert GradientState().num_steps == 4


def test_strategies_connect_when_a_run_begins_not_when_it_ends(make: Any) -> None:
    connected: list[None] = []

    class Meeting(Strategy):
        name = "meeting"

        def connect(self, device: torch.device, precision: Precision) -> None:
            super().connect(device, precision)
            connected.append(None)  # all ranks make a mesh here, and free_memory() may be one rank's

    accelerator = make(strategy=Meeting())
    accelerator.prepare(nn.Linear(1, 1))
    before = len(connected)
    accelerator.free_memory()
    assert len(connected) == before
    accelerator.prepare(nn.Linear(1, 1))
    assert len(connected) > before


def test_free_memory_ends_the_run_and_prepare_begins_one(make: Any) -> None:
    accelerator = make()
    model, optimizer = linear()
    model, optimizer = accelerator.prepare(model, optimizer)
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert (model, optimizer) == (None, None)
    assert not AcceleratorState().initialized
    model, optimizer = accelerator.prepare(*linear())
    assert AcceleratorState().initialized
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert accelerator.step == 1


def test_folders_are_known_as_text(make: Any, tmp_path: Path) -> None:
    assert make().project_dir is None
    accelerator = make(project_dir=tmp_path)
    assert (accelerator.project_dir, accelerator.logging_dir) == (str(tmp_path), str(tmp_path))
    folders = ProjectConfiguration(project_dir=tmp_path / "states", logging_dir=tmp_path / "logs")
    accelerator = make(project_config=folders)
    assert (accelerator.project_dir, accelerator.logging_dir) == (str(tmp_path / "states"), str(tmp_path / "logs"))


def test_triggers_are_set_checked_and_reset(make: Any) -> None:
    accelerator = make()
    assert not accelerator.check_trigger()
    accelerator.set_trigger("mine", "enough")
    assert not accelerator.check_trigger("other")
    assert accelerator.check_trigger("mine")
    assert not accelerator.check_trigger()


def test_profiling_writes_a_trace(make: Any, tmp_path: Any) -> None:
    from instep.accelerator import ProfileKwargs

    accelerator = make(kwargs_handlers=[ProfileKwargs(output_trace_dir=tmp_path)])
    with accelerator.profile():
        torch.ones(3).sum()
    assert list(tmp_path.iterdir())


# ---- what users of Accelerate read and set


def test_a_new_number_of_micro_batches_holds_from_the_next_window_on(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    (model, optimizer), data = linear(), numbers(18, 1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, data)
    steps, gradients = [], []
    optimizer.optimizer.register_step_pre_hook(lambda *_: gradients.append(model.weight.grad.item()))
    for index, (x,) in enumerate(batches):
        if index == 3:
            accelerator.gradient_accumulation_steps = 3  # within a window
        with accelerator.accumulate(model):
            accelerator.backward(model(x[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps.append(index)
    assert steps == [1, 3, 5, 8, 11, 14, 17], "windows of three begin at a multiple of three"
    assert gradients == pytest.approx([0.5, 2.5, 4.5, 7.0, 10.0, 13.0, 16.0])
    accelerator.gradient_accumulation_steps = 4
    assert GradientState().num_steps == 4
    with pytest.raises(SettingError, match="gradient_accumulation_steps=0"):
        accelerator.gradient_accumulation_steps = 0


@pytest.mark.filterwarnings(r"ignore:accelerator\.backward\(\) outside")
def test_a_new_number_of_micro_batches_waits_for_the_end_of_a_window_by_hand(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, _, batches = accelerator.prepare(*linear(), numbers(8, 1))
    numbers_used = []
    for index, (x,) in enumerate(batches):
        if index == 3:
            accelerator.gradient_accumulation_steps = 3  # batch 3 is the second of a window of two
        accelerator.backward(model(x[:, None]).mean())
        numbers_used.append(accelerator.gradient_accumulation_steps)
    assert numbers_used == [2, 2, 2, 2, 2, 2, 3, 3]


def test_backward_outside_of_accumulate_divides_by_the_steps_and_is_warned_of_once(make: Any) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer, batches = accelerator.prepare(*linear(), numbers(6, 2))
    fetched = list(batches)  # as scripts do that weigh losses over tokens: the batch in hand is the last one
    with pytest.warns(UserWarning, match=r"accelerator\.accumulate\(model\)"):
        accelerator.backward(model(fetched[0][0][:, None]).mean())
    for (x,) in fetched[1:]:
        accelerator.backward(model(x[:, None]).mean())  # a second warning would be an error
    assert model.weight.grad.item() == pytest.approx((0.5 + 2.5 + 4.5) / 2)
    accelerator = make()
    model = accelerator.prepare(linear()[0])
    accelerator.backward(model(torch.ones(1, 1)).mean())  # windows of one need no accumulate


class Longer(torch.optim.lr_scheduler.LambdaLR):
    """A schedule that goes on after the steps that it has a number of."""

    total_steps = 1


def test_a_one_cycle_that_is_over_is_warned_of_once(make: Any) -> None:
    accelerator = make()
    (model, optimizer), (other, second) = linear(), linear()
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=3)
    longer = Longer(second, lambda step: 1.0 + step)
    prepared = accelerator.prepare(first=model, second=other)
    optimizers, schedulers = accelerator.prepare(optimizer, second), accelerator.prepare(cycle, longer)
    assert prepared
    for step in range(1, 6):
        for each in optimizers:
            each.step()
        with pytest.warns(UserWarning, match="has taken its 3 steps") if step == 4 else nullcontext():
            for each in schedulers:
                each.step()
    assert (cycle.last_epoch, longer.last_epoch) == (2, 5)


def test_rows_of_a_whole_batch_are_cut_in_the_last_one(make: Any) -> None:
    accelerator = make()
    batches = accelerator.prepare(numbers(10, 4))
    rows: list[float] = []
    for (x,) in batches:
        rows += accelerator.gather_for_metrics(x.mean().repeat(4)).tolist()
        with pytest.raises(DataError, match="5 rows for a batch of"):
            accelerator.gather_for_metrics(torch.ones(5))
    assert len(rows) == 10
    with pytest.raises(DataError, match="2 rows for a batch of 4"):
        gather_samples(torch.ones(2), 4, 2, False, True)  # fewer rows than samples are never taken


def test_facts_that_scripts_of_accelerate_ask_for(make: Any, tmp_path: Path) -> None:
    config = ProjectConfiguration(automatic_checkpoint_naming=True)
    accelerator = make(project_dir=tmp_path, project_config=config, split_batches=True)
    assert accelerator.project_dir == accelerator.logging_dir == str(tmp_path)
    facts = ("split_batches", "dispatch_batches", "even_batches", "non_blocking", "use_distributed", "multi_device")
    assert [getattr(accelerator, name) for name in facts] == [True, None, True, False, False, False]
    assert (accelerator.scaler, accelerator.trackers) == (None, [])
    accelerator.sync_gradients = False
    assert not GradientState().sync_gradients
    own = ProjectConfiguration(project_dir=tmp_path / "own")
    assert make(project_dir=tmp_path, project_config=own).project_dir == str(tmp_path / "own")


def test_prepared_loaders_and_optimizers_pass_for_the_users_own(make: Any) -> None:
    accelerator = make()
    model, optimizer, batches = accelerator.prepare(*linear(), numbers())
    assert isinstance(batches, DataLoader)
    copies = pickle.loads(pickle.dumps((optimizer, batches)))
    assert type(copies[0]) is torch.optim.SGD
    assert type(copies[1]) is DataLoader
    assert [len(x) for (x,) in copies[1]] == [4, 4, 2]


def test_a_copy_of_a_prepared_schedule_has_its_own_place(make: Any) -> None:
    model, optimizer = linear()
    schedule = make().prepare(decay(optimizer))
    for copied in (copy.copy(schedule), copy.deepcopy(schedule)):
        assert copied.state_dict() == schedule.state_dict()
        with pytest.raises(AttributeError, match="nothing_of_the_kind"):
            copied.nothing_of_the_kind  # noqa: B018


def test_a_schedule_that_is_over_stays_where_it_is(make: Any) -> None:
    accelerator = make()
    model, optimizer = linear()
    schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        rates += schedule.get_last_lr()
        schedule.step()
    last = schedule.get_last_lr()
    assert last == rates[-1:]
    with pytest.warns(UserWarning, match="OneCycleLR has taken its 2 steps"):
        schedule.step()
    schedule.step()  # a second warning would be an error
    assert schedule.get_last_lr() == last


def test_set_epoch_is_told_at_once_to_what_wants_to_know(make: Any) -> None:
    class Batches(BatchSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    sampler = Batches(range(8), 2, False)
    batches = make().prepare(DataLoader(TensorDataset(torch.arange(8)), batch_sampler=sampler))
    batches.set_epoch(3)
    assert sampler.epoch == 3
    assert len(list(batches)) == 4
    assert (sampler.epoch, batches.epoch) == (3, 3)

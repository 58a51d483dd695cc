"""What `save_state` keeps and how `load_state` finds it again: by name, never by order.

What is alike with a Trainer: checkpoint/test_saver.py and checkpoint/test_run_state.py.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from instep import Accelerator, Resume
from instep.accelerator import ProjectConfiguration
from instep.checkpoint import load_weights
from instep.checkpoint.manifest import read_manifest
from instep.data import DataLoaderConfiguration
from instep.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SettingError,
    UnsavableStateError,
    UsageError,
)
from instep.state import PartialState
from instep.utils import atomic
from tests.accelerator.loops import Net, sgd
from tests.helpers.spawn import RanksFailed, run_command, run_ranks
from tests.helpers.warm import warm_python


class Other(Net):
    """Another class with the same parameters."""


class Counter:
    """Something with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any, x: float = 1.0) -> None:
    accelerator.backward(model(torch.full((2, 4), x)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_models_and_optimizers_prepared_in_another_order_get_their_own(make: Any, tmp_path: Path) -> None:
    first = make()
    one, two = Net(), Other()
    pairs = [(one, sgd(one)), (two, sgd(two))]
    (one, a, two, b) = first.prepare(*pairs[0], *pairs[1])
    step(first, one, a)
    step(first, two, b, 3.0)
    first.save_state(tmp_path / "state")

    second = make()
    new_one, new_two = Net(), Other()
    optimizers = sgd(new_one), sgd(new_two)
    new_two, new_b, new_a, new_one = second.prepare(new_two, optimizers[1], optimizers[0], new_one)
    second.load_state(tmp_path / "state")
    for old, new in ((one, new_one), (two, new_two)):
        assert all(torch.equal(p, q) for p, q in zip(old.parameters(), new.parameters(), strict=True))
    for old, new, net, new_net in ((a, new_a, one, new_one), (b, new_b, two, new_two)):
        for p, q in zip(net.parameters(), new_net.parameters(), strict=True):
            assert torch.equal(old.state[p]["exp_avg"], new.state[q]["exp_avg"])
    assert second.step == 1


def test_another_set_of_models_is_refused(make: Any, tmp_path: Path) -> None:
    first = make()
    first.prepare(Net(), Other())
    first.save_state(tmp_path / "state")
    second = make()
    second.prepare(Net(), third=Other())
    with pytest.raises(CheckpointError, match="models Net, Other, and this program has Net, third"):
        second.load_state(tmp_path / "state")
    third = make()
    third.prepare(nn.Linear(3, 3))
    with pytest.raises(CheckpointError):
        third.load_state(tmp_path / "state")


def test_an_optimizer_of_other_parameters_is_refused(make: Any, tmp_path: Path) -> None:
    first = make()
    net = Net()
    first.prepare(net, sgd(net))
    first.save_state(tmp_path / "state")
    second = make()
    net = Net()
    second.prepare(net, torch.optim.AdamW([net.layers[0].weight]))
    with pytest.raises(CheckpointError, match="an optimizer of the 1 parameters"):
        second.load_state(tmp_path / "state")


def test_an_optimizer_of_another_kind_is_left_out_where_that_was_asked_for(make: Any, tmp_path: Path) -> None:
    first = make()
    net = Net()
    momentum = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    prepared = first.prepare(net, momentum, torch.optim.lr_scheduler.ExponentialLR(momentum, 0.5))
    step(first, *prepared[:2])
    path = first.save_state(tmp_path / "state")
    second = make()
    net = Net()
    _, optimizer = second.prepare(net, sgd(net))
    with pytest.raises(CheckpointError, match="SGD"):
        second.load_state(path, Resume(position=False, callbacks=False))
    second.load_state(path, Resume(position=False, callbacks=False, strict=False))
    report = second.resume_report
    assert report is not None
    assert report.left_out == ["the state of SGD, since this run has AdamW", "ExponentialLR of optimizer 0"]
    assert not optimizer.optimizer.state


def test_registered_objects_come_back_by_name_as_they_were(make: Any, tmp_path: Path) -> None:
    first = make()
    saved = Counter(3)
    first.register_for_checkpointing(saved, other=Counter(4))
    assert first.save_state(tmp_path / "state", background=True) is None
    saved.count = 99
    assert first.wait_for_saves() == tmp_path / "state-1"
    assert first.wait_for_saves() is None
    first._states.close()
    second = make()
    plain, other = Counter(), Counter()
    second.register_for_checkpointing(other=other)
    with pytest.raises(CheckpointError, match="Counter, other, and this program has other"):
        second.load_state(tmp_path / "state")
    second.register_for_checkpointing(plain)
    second.load_state(tmp_path / "state")
    assert (plain.count, other.count) == (3, 4)
    with pytest.raises(SettingError, match="no state_dict"):
        second.register_for_checkpointing(object())


def test_one_call_refuses_two_objects_of_one_name(make: Any, tmp_path: Path) -> None:
    accelerator, one = make(), Counter()
    for objects, named in (((one, Counter()), {}), ((one,), {"Counter": Counter()})):
        with pytest.raises(SettingError, match=r"two objects are registered as 'Counter'\. Name them"):
            accelerator.register_for_checkpointing(*objects, **named)
    accelerator.register_for_checkpointing(one, one, other=one)  # one object is no second one
    with pytest.raises(SettingError, match="Name them"):
        accelerator.register_for_checkpointing(Counter())
    accelerator.save_state(tmp_path / "state")


def test_hooks_see_and_change_what_is_saved_until_they_are_removed(make: Any, tmp_path: Path) -> None:
    accelerator = make()
    model = accelerator.prepare(Net())
    seen: list[Any] = []

    def leave_out(models: list[nn.Module], weights: list[dict[str, Any]], folder: Path) -> None:
        seen.append(models)
        del weights[0]["layers.0.bias"]
        (folder / "config").mkdir()
        (folder / "config" / "notes.txt").write_text("mine")

    saving = accelerator.register_save_state_pre_hook(leave_out)
    with pytest.raises(UsageError, match="writes files itself"):
        accelerator.save_state(background=True)
    path = accelerator.save_state(tmp_path / "state")
    assert seen == [[model]]
    assert "layers.0.bias" not in load_weights(path)
    notes = path / "config" / "notes.txt"
    assert notes.read_text() == "mine"
    notes.write_text("damaged")
    with pytest.raises(CorruptCheckpointError, match=r"notes.txt has 7 bytes instead of 4"):
        accelerator.load_state(path)
    saving()  # as its `remove`
    path = accelerator.save_state(tmp_path / "state")
    assert path.name == "state-2"
    assert "layers.0.bias" in load_weights(path)
    loading = accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(folder))
    accelerator.load_state(tmp_path / "state")
    loading.remove()
    saving.remove()  # a second time does nothing
    accelerator.load_state(tmp_path / "state")
    assert seen == [[model], path]


@pytest.mark.parametrize("popped", [[0], [1], [1, 0]])
def test_what_a_hook_takes_out_of_the_list_is_neither_written_nor_loaded(
    make: Any, tmp_path: Path, popped: list[int]
) -> None:
    first = make()
    models = first.prepare(Net(), Other())
    names = [f"model.{type(model).__name__}.pt" for model in models]

    def take_out(here: list[nn.Module], weights: list[dict[str, Any]], folder: Path) -> None:
        for index in popped:
            torch.save(weights.pop(index), folder / names[index])

    first.register_save_state_pre_hook(take_out)
    path = first.save_state(tmp_path / "state")
    left = [model for index, model in enumerate(models) if index not in popped]
    assert (path / "model.safetensors").exists() is bool(left)
    if left:
        assert torch.equal(load_weights(path)["layers.0.bias"], left[0].layers[0].bias)

    second = make()
    new = second.prepare(Net(), Other())
    with pytest.raises(CheckpointError, match="has the models"):
        second.load_state(path)

    def put_in(here: list[nn.Module], folder: Path) -> None:
        for index in popped:
            here.pop(index).load_state_dict(torch.load(folder / names[index]))

    second.register_load_state_pre_hook(put_in)
    second.load_state(path)
    for p, q in zip(nn.ModuleList(models).parameters(), nn.ModuleList(new).parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_model_that_a_load_hook_takes_stays_as_it_is(make: Any, tmp_path: Path) -> None:
    accelerator = make()
    model = accelerator.prepare(Net())
    path = accelerator.save_state(tmp_path / "state")
    nn.init.zeros_(model.layers[0].weight)
    accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    accelerator.load_state(path)
    assert not model.layers[0].weight.any()


def test_state_dicts_that_hooks_replace_and_take_out_at_once_are_refused(make: Any, tmp_path: Path) -> None:
    accelerator = make()
    accelerator.prepare(Net(), Other())
    remove = accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.append({}))
    with pytest.raises(UsageError, match="left 3 state dicts of 2"):
        accelerator.save_state(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []
    remove()

    def replace(models: list[nn.Module], weights: list[dict[str, Any]], folder: Path) -> None:
        weights[1] = {"it": torch.ones(1)}

    accelerator.register_save_state_pre_hook(replace)
    weights = load_weights(accelerator.save_state(tmp_path / "state"))
    assert torch.equal(weights["Other.it"], torch.ones(1))
    assert not any(name.startswith("Other.layers") for name in weights)


def numbers(length: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(length).float()), 2)


def twins(what: str) -> list[Any]:
    """Two things that a checkpoint could tell apart by their order only."""
    if what == "loaders":
        return [numbers(6), numbers(6)]
    free = [torch.optim.SGD([nn.Parameter(torch.zeros(2))]) for _ in range(2)]
    if what == "optimizers":
        return free
    return [free[0], *[torch.optim.lr_scheduler.StepLR(free[0], size) for size in (1, 2)]]


@pytest.mark.parametrize("what", ["loaders", "optimizers", "schedulers"])
def test_what_only_its_order_could_tell_apart_is_refused(make: Any, tmp_path: Path, what: str) -> None:
    first = make()
    *rest, second_twin = twins(what)
    first.prepare(*rest)
    path = first.save_state(tmp_path / "state")
    first.prepare(second_twin)
    with pytest.raises(SettingError, match=f"two {what} apart"):
        first.save_state(tmp_path / "state")
    with pytest.raises(SettingError, match=f"two {what} apart"):
        first.load_state(path)


def test_loaders_alike_are_told_apart_by_name(make: Any, tmp_path: Path) -> None:
    first = make()
    train, val = first.prepare(train=numbers(6), val=numbers(6))
    train.set_epoch(3)
    path = first.save_state(tmp_path / "state")
    second = make()
    val, train = second.prepare(val=numbers(6), train=numbers(6))
    second.load_state(path)
    assert (train.state_dict()["epoch"], val.state_dict()["epoch"]) == (3, 0)


def test_a_scheduler_that_is_not_prepared_any_more_is_missed(make: Any, tmp_path: Path) -> None:
    first = make()
    net = Net()
    optimizer = sgd(net)
    first.prepare(net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    path = first.save_state(tmp_path / "state")
    second = make()
    net = Net()
    second.prepare(net, sgd(net))
    with pytest.raises(CheckpointError, match="schedulers StepLR of optimizer 0, and this program has"):
        second.load_state(path)


def test_any_name_serves_a_model(make: Any, tmp_path: Path) -> None:
    first = make()
    keys, train = Net(), Net()
    first.prepare(sgd(keys), sgd(train), keys=keys, train=train)
    path = first.save_state(tmp_path / "state")
    assert "keys.layers.0.bias" in load_weights(path)
    first.load_state(path)


def test_names_and_limits_of_a_project(make: Any, tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = make(project_config=project)
    model = Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    with pytest.raises(CheckpointNotFoundError):
        accelerator.load_state()
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "checkpoints" / "notes.txt").write_text("a stray file")
    for _ in range(4):
        step(accelerator, model, optimizer)
        accelerator.save_state()
    there = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert there == ["step-00000003-1", "step-00000004-1"]

    again = make(project_config=project)
    model = Net()
    again.prepare(model, sgd(model))
    assert again.load_state().name == "step-00000004-1"
    assert again.step == 4
    assert again.save_state().name == "step-00000004-2", "a new process goes on counting"

    newest = tmp_path / "checkpoints" / "step-00000004-2" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="passed over"):
        assert again.load_state().name == "step-00000004-1"
    with pytest.raises(CorruptCheckpointError):
        again.load_state(newest.parent)


def test_without_a_place_saving_says_what_to_give(make: Any) -> None:
    with pytest.raises(CheckpointError, match="automatic_checkpoint_naming"):
        make().save_state()


def test_a_window_that_is_saved_within_begins_again(make: Any, tmp_path: Path) -> None:
    def run(resume: bool) -> list[list[float]]:
        accelerator = make(gradient_accumulation_steps=3)
        model = Net()
        model, optimizer, loader = accelerator.prepare(
            model, sgd(model), DataLoader(TensorDataset(torch.arange(10).float()), 1)
        )
        if resume:
            accelerator.load_state(tmp_path / "state")
        seen = []
        for (x,) in loader:
            seen.append(x.tolist())
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 4)).mean())
                optimizer.step()
                optimizer.zero_grad()
            if not resume and len(seen) == 5:
                with pytest.warns(UserWarning, match="begins the window again"):
                    accelerator.save_state(tmp_path / "state")
                break
        return seen

    run(resume=False)
    assert run(resume=True) == [[float(i)] for i in range(3, 10)]


def test_weights_and_objects_alone(make: Any, tmp_path: Path) -> None:
    accelerator = make()
    model = accelerator.prepare(Net())
    file = accelerator.save_model(model, tmp_path / "weights")
    assert load_weights(file).keys() == model.state_dict().keys()
    accelerator.save({"a": torch.ones(2)}, tmp_path / "object.pt")
    assert torch.equal(torch.load(tmp_path / "object.pt")["a"], torch.ones(2))
    for unsavable in (lambda: None, Lock()):
        with pytest.raises(UnsavableStateError, match=f"a {type(unsavable).__name__} could not be saved"):
            accelerator.save(unsavable, tmp_path / "object.pt")
    assert torch.equal(torch.load(tmp_path / "object.pt")["a"], torch.ones(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["object.pt", "weights"]


class Lock:
    """Pickles as something that cannot be found again."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("a lock")


def test_the_folder_of_a_file_is_synced_once_the_file_is_there(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, list[str]]] = []
    see = lambda path: synced.append((path, sorted(file.name for file in tmp_path.iterdir())))  # noqa: E731
    monkeypatch.setattr(atomic, "sync_path", see)
    make().save({}, tmp_path / "object.pt")
    assert synced[-1] == (tmp_path, ["object.pt"])
    assert len(synced) == 2  # the file before


def save_on_main_only(folder: Path, method: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    if accelerator.is_main_process:
        if method == "save_state":
            accelerator.save_state(folder / "state")
        else:
            accelerator.save_model(model, folder / "weights")
    accelerator.wait_for_everyone()


@pytest.mark.dist
@pytest.mark.parametrize("method", ["save_state", "save_model"])
def test_saving_on_one_rank_says_so_at_once(tmp_path: Path, method: str) -> None:
    with pytest.raises(RanksFailed, match=method):
        run_ranks(save_on_main_only, 2, tmp_path, method)
    assert list(tmp_path.iterdir()) == []


class Lines(IterableDataset[Tensor]):
    """A stream."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(8).float())


def stream(folder: Path, save: bool) -> list[Any]:
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata with a new torch
    config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=False, streams="as_is")
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = Net()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(Lines(), 2))
    if save:
        accelerator.register_save_state_pre_hook(write_own_file)
        for _ in loader:
            step(accelerator, model, optimizer)
            accelerator.save_state(folder / "state")
        loader.set_epoch(7)
        accelerator.save_state(folder / "between")
        return sorted(it.name for it in (folder / "state-1").glob("mine-*"))
    accelerator.load_state(folder / "between")
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder / "state-1")
    accelerator.free_memory()
    return [str(caught.value), loader.state_dict()["epoch"]]


def write_own_file(models: list[nn.Module], weights: list[dict[str, Any]], folder: Path) -> None:
    (folder / f"mine-{PartialState().process_index}").write_text("x")


@pytest.mark.dist
def test_a_place_per_process_does_not_fit_another_number_of_them(tmp_path: Path) -> None:
    assert run_ranks(stream, 2, tmp_path, True) == [["mine-0", "mine-1"]] * 2
    assert {"mine-0", "mine-1"} <= read_manifest(tmp_path / "state-1").files.keys()
    text, epoch = stream(tmp_path, False)
    assert epoch == 7
    assert "saved by 2 processes and is loaded by 1" in text
    assert "Resume with 2 processes" in text


def test_a_second_run_in_one_folder_saves_and_loads_its_own_states(make: Any, tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=1)

    def begin() -> tuple[Accelerator, Any, Any]:
        accelerator, model = make(project_config=project), Net()
        return accelerator, *accelerator.prepare(model, sgd(model))

    first, model, optimizer = begin()
    for _ in range(2):
        step(first, model, optimizer)
    kept = first.save_state()
    first.free_memory()
    second, model, optimizer = begin()
    step(second, model, optimizer)
    saved = [second.save_state()]
    step(second, model, optimizer)
    saved.append(second.save_state())
    assert kept.is_dir(), "what another run left is not this one's to delete"
    assert [path.is_dir() for path in saved] == [False, True]
    assert second.load_state() == saved[1], "not the other run's, which is of the same step"
    second.free_memory()
    third, model, optimizer = begin()
    with pytest.warns(UserWarning, match="holds the checkpoints of 2 runs"):
        assert third.load_state() == saved[1]
    step(third, model, optimizer)
    assert third.save_state().is_dir()
    assert not saved[1].exists(), "the same run goes on, with one state to keep"


def test_automatic_states_are_found_by_their_number(make: Any, tmp_path: Path) -> None:
    config = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, iteration=3)
    accelerator = make(project_config=config)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for counter.count in (3, 4):
        accelerator.save_state()
    assert accelerator.save_iteration == 5
    for number in (3, 4):
        accelerator.load_state(tmp_path / "checkpoints" / f"checkpoint_{number}")
        assert counter.count == number
    with pytest.raises(CheckpointNotFoundError, match="checkpoint_9"):
        accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_9")
    accelerator.load_state()
    accelerator.end_training()
    again = make(project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True))
    again.register_for_checkpointing(counter)
    again.load_state()
    assert again.save_iteration == 5, "a resumed run gives no number twice"


@pytest.mark.parametrize("end", [Accelerator.end_training, Accelerator.free_memory])
def test_no_empty_state_hides_the_last_one_after_the_end(make: Any, tmp_path: Path, end: Any) -> None:
    accelerator = make(project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True))
    accelerator.prepare(Net())
    saved = accelerator.save_state()
    end(accelerator)
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(UsageError, match=r"comes after end_training\(\) or free_memory"):
            call()
    accelerator.prepare(Net())
    assert accelerator.load_state() == saved


@pytest.mark.parametrize("steps", [1, 2])
def test_a_state_loaded_within_a_window_begins_a_new_one_without_gradients(
    make: Any, tmp_path: Path, steps: int
) -> None:
    ends = []
    for spoilt in (False, True):
        accelerator = make(gradient_accumulation_steps=steps)
        torch.manual_seed(0)
        model = Net(dropout=0.0)
        model, optimizer = accelerator.prepare(model, sgd(model))
        saved = accelerator.save_state(tmp_path / f"{spoilt}")
        if spoilt:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((2, 4), 9.0)).square().mean())
            accelerator.load_state(saved)
        for x in range(steps):
            with accelerator.accumulate(model):
                step(accelerator, model, optimizer, float(x))
        ends.append([parameter.tolist() for parameter in model.parameters()])
        assert accelerator.step == 1
    assert ends[0] == ends[1]


ENDS = """
import sys, torch
from instep import Accelerator
from instep.accelerator import ProjectConfiguration
project = ProjectConfiguration(project_dir=sys.argv[1], automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
accelerator.prepare(torch.nn.Linear(1, 1))
accelerator.save_state()
"""


def released(folder: Path) -> list[bool]:
    return [json.loads(path.read_text())["released"] for path in (folder / "checkpoints").glob(".lease-*")]


def test_a_program_that_ends_gives_the_folder_back(tmp_path: Path) -> None:
    done = run_command([warm_python(), "-c", ENDS, str(tmp_path)], cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("checkpoints/step-*"))) == 1
    assert released(tmp_path) == [True]


def test_the_folder_is_given_back_and_taken_again(make: Any, tmp_path: Path) -> None:
    accelerator = make(project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True))
    accelerator.prepare(Net())
    accelerator.save_state()
    accelerator.save_state(background=True)
    accelerator.free_memory()
    assert released(tmp_path) == [False], "what is under way owns it"
    accelerator.wait_for_saves()
    accelerator.free_memory()
    assert released(tmp_path) == [True]
    accelerator.prepare(Net())
    accelerator.save_state()
    assert released(tmp_path) == [False]
    accelerator._states.close()

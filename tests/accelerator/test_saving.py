"""What `save_state` keeps and how `load_state` finds it again: by name, never by order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator
from instep.accelerator import ProjectConfiguration
from instep.checkpoint import load_weights
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, SettingError
from tests.accelerator.loops import Net, sgd
from tests.helpers.spawn import RanksFailed, run_ranks


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Accelerator] = []

    def make(**settings: Any) -> Accelerator:
        made.append(Accelerator(cpu=True, **settings))
        return made[-1]

    yield make
    for accelerator in made:
        accelerator.free_memory()


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


def test_registered_objects_come_back_by_name(make: Any, tmp_path: Path) -> None:
    first = make()
    first.register_for_checkpointing(Counter(3), other=Counter(4))
    first.save_state(tmp_path / "state")
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
    with pytest.raises(SettingError, match="Name them"):
        second.register_for_checkpointing(Counter())


def test_hooks_see_and_change_what_is_saved(make: Any, tmp_path: Path) -> None:
    accelerator = make()
    model = accelerator.prepare(Net())
    seen: list[Any] = []

    def leave_out(models: list[nn.Module], weights: list[dict[str, Any]], folder: Path) -> None:
        seen.append((models, folder))
        del weights[0]["layers.0.bias"]

    remove = accelerator.register_save_state_pre_hook(leave_out)
    path = accelerator.save_state(tmp_path / "state")
    assert seen == [([model], tmp_path / "state")]
    assert "layers.0.bias" not in load_weights(path)
    remove()
    path = accelerator.save_state(tmp_path / "state")
    assert path.name == "state-2"
    assert "layers.0.bias" in load_weights(path)
    accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(folder))
    accelerator.load_state(tmp_path / "state")
    assert seen[-1] == path


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["object.pt", "weights"]


def save_on_main_only(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Net())
    if accelerator.is_main_process:
        accelerator.save_state(folder / "state")
    accelerator.wait_for_everyone()


@pytest.mark.dist
def test_saving_on_one_rank_says_so_at_once(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="save_state"):
        run_ranks(save_on_main_only, 2, tmp_path, timeout_s=60)


def resume_at(folder: Path, save: bool) -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = Net(0.0)
    loader = DataLoader(TensorDataset(torch.arange(24).float()), 12 // accelerator.num_processes // 2, shuffle=True)
    torch.manual_seed(1)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    if not save:
        accelerator.load_state(folder / "state")
    seen: list[float] = []
    for (x,) in loader:
        step(accelerator, model, optimizer)
        seen += accelerator.gather_for_metrics(x).tolist()
        if save and len(seen) == 12:
            accelerator.save_state(folder / "state")
            break
    accelerator.free_memory()
    return seen


@pytest.mark.dist
def test_another_number_of_processes_goes_on_in_the_same_data(tmp_path: Path) -> None:
    [first, _] = run_ranks(resume_at, 2, tmp_path, True)
    rest = resume_at(tmp_path, False)
    assert sorted(first + rest) == [float(i) for i in range(24)]
    assert run_ranks(resume_at, 2, tmp_path, False)[0] == rest

"""Where a loop stands in its loader, also where `accelerator.backward` does not say so."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from instep import Accelerator
from instep.accelerator import DataLoaderConfiguration
from tests.accelerator.loops import Net, sgd
from tests.helpers.spawn import run_ranks

SAMPLES = 22  # no multiple of the batch, nor of the window
LOOPS = ("nothing", "foreign", "plain", "by hand", "accumulate", "backward", "backward by window")
EVERY = bool(os.environ.get("INSTEP_LOADER_EVERY"))


def one_pass(folder: Path, loop: str, workers: int, stop: int | None, top: bool = False) -> list[float]:
    """The samples whose batch had its effect in this pass: it was used, and stepped on where the loop trains.

    Args:
        folder: where the state is saved, or loaded from where `stop` is None.
        loop: what it does with a batch.
        workers: of the loader.
        stop: save the state and leave with the batch of this number in hand.
        top: save at the top of the loop's body, before that batch is used.
    """
    torch.manual_seed(1)
    windows = loop in ("accumulate", "backward by window")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3 if windows else 1)
    model = Net(0.0)
    optimizer = sgd(model)
    loader = DataLoader(TensorDataset(torch.arange(float(SAMPLES))), 2, shuffle=True, num_workers=workers)
    if loop in ("nothing", "foreign"):
        loader = accelerator.prepare(loader)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if stop is None:
        accelerator.load_state(folder / "state")
    done: list[float] = []
    open_window: list[float] = []
    for index, (x,) in enumerate(loader, 0 if stop is not None else -1000):
        if top and index == stop:
            accelerator.save_state(folder / "state")
            break
        seen = accelerator.gather_for_metrics(x).tolist()
        loss = model(x[:, None].expand(-1, 4)).square().mean()
        open_window += seen
        if windows:
            with accelerator.accumulate(model):
                loss.backward() if loop == "accumulate" else accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            ends = accelerator.sync_gradients
        else:
            if loop == "backward":
                accelerator.backward(loss)
            elif loop != "nothing":
                loss.backward()
            ends = loop != "by hand" or loader.batch_idx % 3 == 2 or loader.is_last
            if ends:
                optimizer.step()
                optimizer.zero_grad()
        if ends:
            done += open_window
            open_window = []
        if index == stop:
            accelerator.save_state(folder / "state")
            break
    accelerator.free_memory()
    return done


def both_parts(folder: Path, loop: str, workers: int, stop: int, top: bool) -> list[float]:
    return sorted(one_pass(folder, loop, workers, stop, top) + one_pass(folder, loop, workers, None))


CASES = [
    (loop, workers, stop, top)
    for loop in LOOPS
    for workers in (0, 2)
    for stop in (0, 1, 2, 4, 5)
    for top in (False, True)
    if not (top and loop in ("nothing", "foreign"))  # a batch in hand is taken for used there
    if not (top and stop == 0)  # nothing tells yet that the loop trains
]
FEW = [case for case in CASES if case[1:] in ((0, 4, False), (0, 4, True), (0, 1, False))] + [("plain", 2, 4, False)]


@pytest.mark.filterwarnings("ignore:this state is saved in the middle of an accumulation window")
@pytest.mark.parametrize(("loop", "workers", "stop", "top"), CASES if EVERY else FEW)
def test_every_sample_counts_once_over_an_interrupted_pass(
    tmp_path: Path, loop: str, workers: int, stop: int, top: bool
) -> None:
    assert both_parts(tmp_path, loop, workers, stop, top) == [float(i) for i in range(SAMPLES)]


def some_cases(folder: Path, cases: list[Any]) -> list[list[float]]:
    return [both_parts(folder / f"case-{number}", *case) for number, case in enumerate(cases)]


@pytest.mark.dist
def test_every_sample_counts_once_over_ranks_too(tmp_path: Path) -> None:
    few = [(loop, 0, 4, False) for loop in ("nothing", "plain", "by hand")] + [("plain", 2, 1, False)]
    cases = [case for case in CASES if case[2] < 5] if EVERY else few  # a rank has 6 batches
    for found in run_ranks(some_cases, 2, tmp_path, cases, timeout_s=580.0 if EVERY else 240.0):
        assert found == [[float(i) for i in range(SAMPLES)]] * len(cases)


def test_a_pass_that_trains_nothing_and_was_left_begins_anew(make: Any) -> None:
    accelerator = make()
    model, optimizer, train, val = accelerator.prepare(
        Net(0.0), torch.optim.SGD(Net(0.0).parameters(), lr=0.1), *(DataLoader(torch.arange(6.0)) for _ in range(2))
    )
    for _ in train:
        for _ in val:  # an evaluation of a few batches
            break
        optimizer.step()
        assert val.state_dict()["source"] is None
    batches = iter(val)
    next(batches), next(batches)
    assert val.state_dict()["source"]["batches"] == 2


def test_a_pass_without_gradients_may_be_empty(make: Any) -> None:
    accelerator = make()
    model = torch.nn.Linear(1, 1)
    _, _, empty = accelerator.prepare(model, torch.optim.SGD(model.parameters()), DataLoader([]))
    with torch.no_grad():
        assert list(empty) == []
    with pytest.warns(UserWarning, match="had no batch"):
        assert list(empty) == []


class Told(Sampler[int]):
    """Order of three samples; keeps the epochs that it was told of."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


def test_a_sampler_is_told_of_an_epoch_when_the_script_sets_it(make: Any) -> None:
    sampler = Told()
    loader = make().prepare(DataLoader(torch.arange(3), sampler=sampler))
    loader.set_epoch(5)
    assert sampler.epochs[-1] == 5
    list(loader)
    assert (sampler.epochs[-1], loader.next_epoch) == (5, 6)


class Words(IterableDataset[str]):
    """A stream whose batches, lists of words, do not say how many samples they hold."""

    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b", "c"])


@pytest.mark.parametrize("non_blocking", [True, False])
def test_the_host_waits_for_copies_only_where_it_is_told_so(make: Any, non_blocking: bool) -> None:
    class Batch:
        def to(self, device: torch.device, non_blocking: bool) -> tuple[str, bool]:
            return device.type, non_blocking

    accelerator = make(dataloader_config=DataLoaderConfiguration(non_blocking=non_blocking))
    loader = accelerator.prepare_data_loader([Batch()])
    loader._device = torch.device("meta")
    assert list(loader) == [("meta", non_blocking)]


def test_no_number_of_samples_is_left_over_where_none_is_known(make: Any) -> None:
    accelerator = make()
    loader = accelerator.prepare(DataLoader(Words(), batch_size=2, collate_fn=Counter))
    ends = [(accelerator.gradient_state.end_of_dataloader, accelerator.gradient_state.remainder) for _ in loader]
    assert ends == [(False, -1), (True, -1)]


def test_batches_that_other_ranks_had_done_count_in_the_epoch_that_is_resumed_alone(make: Any) -> None:
    loader = make().prepare(DataLoader(torch.arange(12), batch_size=2))
    passing = iter(loader)
    for _ in range(4):
        next(passing)
    state = loader.state_dict() | {"batches": 2, "trains": True}  # as two ranks save it after four batches
    passing.close()
    accelerator = make()
    model, resumed = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.arange(12), batch_size=2))
    resumed.load_state_dict(state)
    seen = []
    for batch in chain(resumed, islice(resumed, 1)):
        accelerator.backward(model(batch[:, None].float()).mean())
        seen += batch.tolist()
    assert seen == [8, 9, 10, 11, 0, 1]
    assert resumed.state_dict()["batches"] == 1


def test_a_script_may_pass_over_what_a_state_that_names_its_place_alone_has_done(make: Any) -> None:
    state: dict[str, Any] = {}
    seen = []
    for start in (1, 2):
        accelerator = make()
        model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.arange(6.0), batch_size=2))
        if start == 2:
            loader.load_state_dict(state)
        for index, batch in enumerate(loader):
            if start == 2 and index == 0:
                continue
            seen.append(batch.tolist())
            accelerator.backward(model(batch[:, None]).mean())
            if start == 1:
                saved = loader.state_dict()
                state = {name: saved[name] for name in ("epoch", "source", "batches")}  # as earlier versions saved it
                break
    assert seen == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]

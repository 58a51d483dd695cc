"""Where a loop goes on after `load_state`, in however a script skips what is done, and what it does before."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from instep import Accelerator
from instep.accelerator import DataLoaderConfiguration
from instep.errors import SettingError, UsageError
from tests.helpers.spawn import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*read again and thrown away")  # the stream knows no place
EPOCHS, BATCHES, SIZE = 3, 8, 3
SAMPLES = BATCHES * SIZE


@pytest.fixture(autouse=True)
def _without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.accelerator.accelerator.clear_device_cache", lambda **_: None)  # it takes 0.2 s


class Stream(IterableDataset[torch.Tensor]):
    """Samples in an order of each epoch's own."""

    def __init__(self, shuffle: bool) -> None:
        self.shuffle, self.epoch = shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        for i in order if self.shuffle else range(SAMPLES):
            yield torch.tensor([float(i)])


class Script:
    """A handwritten training: `steps` records the samples of each batch that reached a backward.

    Args:
        stream: iterable data instead of map-style.
        shuffle: draw each epoch anew.
        accumulate: micro-batches of a window.
        config: what the loaders are prepared with.
    """

    def __init__(self, stream: bool = False, shuffle: bool = True, accumulate: int = 1, **config: Any) -> None:
        torch.manual_seed(7)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=DataLoaderConfiguration(**config)
        )
        module = nn.Linear(1, 1)
        data = DataLoader(Stream(shuffle), SIZE) if stream else loader(shuffle)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(module, optimizer, data)
        self.steps: list[list[int]] = []
        self.stop, self.path = -1, Path()

    def step(self, batch: torch.Tensor, raw: bool = False) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.model(batch).mean()
            loss.backward() if raw else self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps.append(ids(batch))
        if len(self.steps) == self.stop:
            self.accelerator.save_state(self.path)
            raise StopIteration

    def run(self, loop: Callable[[Script], None]) -> list[list[int]]:
        try:
            loop(self)
        except StopIteration:
            pass
        finally:
            self.accelerator.free_memory()
        return self.steps


def loader(shuffle: bool) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(SAMPLES))[:, None], SIZE, shuffle=shuffle)


def ids(batch: torch.Tensor) -> list[int]:
    return [int(i) for i in batch.flatten().tolist()]


def plainly(script: Script) -> None:
    for _ in range(script.loader.next_epoch, EPOCHS):
        for batch in script.loader:
            script.step(batch)


def saved(folder: Path, stop: int, **how: Any) -> tuple[Path, list[list[int]]]:
    """Save a training at a stop; return where, and what a run that never stopped does from there."""
    script = Script(**how)
    script.stop, script.path = stop, folder / f"at-{stop}"
    script.run(plainly)
    return script.path, Script(**how).run(plainly)[stop:]


def resumed(path: Path, **how: Any) -> Script:
    script = Script(**how)
    script.accelerator.load_state(path)
    return script


def way(name: str, done: int) -> Callable[[Script], None]:
    """Return the loop of a script that goes on after so many batches in one of the usual ways."""
    first, skip = divmod(done, BATCHES)

    def loop(script: Script) -> None:
        for epoch in range(script.loader.next_epoch if name == "nothing" else first, EPOCHS):
            batches: Any = script.loader
            if epoch == first and name == "skip_first_batches":
                batches = script.accelerator.skip_first_batches(batches, skip)
            if epoch == first and name == "islice":
                batches = itertools.islice(batches, skip, None)
            for index, batch in enumerate(batches):
                if name == "continue" and epoch == first and index < skip:
                    continue
                script.step(batch)

    return loop


WAYS = ("continue", "skip_first_batches", "islice", "range", "nothing")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("shuffle", "accumulate"), [(True, 1), (False, 2)])
def test_each_remaining_batch_is_trained_on_once_however_a_script_skips(
    stream: bool, shuffle: bool, accumulate: int, tmp_path: Path
):
    how: dict[str, Any] = {"stream": stream, "shuffle": shuffle, "accumulate": accumulate}
    for stop in (2, 8, 22):
        path, rest = saved(tmp_path, stop, **how)
        for name in WAYS:
            assert resumed(path, **how).run(way(name, stop)) == rest, f"{name} after {stop}"


def test_a_second_stop_in_the_same_epoch_is_gone_on_from_too(tmp_path: Path):
    path, rest = saved(tmp_path, 2)
    for name in WAYS:
        script = resumed(path)
        script.stop, script.path = 3, tmp_path / name
        assert script.run(way(name, 2)) == rest[:3]
        assert resumed(script.path).run(way(name, 5)) == rest[3:], name


@pytest.mark.dist
@pytest.mark.parametrize("name", ["continue", "islice", "plain"])
def test_two_processes_go_on_alike(name: str, tmp_path: Path):
    for done, rest in run_ranks(_two_ranks, 2, tmp_path, name):
        assert done == rest


def _two_ranks(folder: Path, name: str) -> tuple[list[list[int]], list[list[int]]]:
    path, rest = saved(folder, 2)

    def loop(script: Script) -> None:
        for epoch in range(EPOCHS):
            batches: Any = itertools.islice(script.loader, 2, None) if not epoch and name == "islice" else script.loader
            for index, batch in enumerate(batches):
                if not (name == "continue" and not epoch and index < 2):
                    script.step(batch)

    return resumed(path).run(plainly if name == "plain" else loop), rest


def test_a_pass_with_nothing_left_goes_on_with_the_next_epoch(tmp_path: Path):
    for stream in (False, True):
        path, rest = saved(tmp_path / str(stream), BATCHES, stream=stream)

        def loop(script: Script) -> None:
            for _ in range(1, EPOCHS):
                for batch in script.loader:
                    script.step(batch)

        assert resumed(path, stream=stream).run(loop) == rest


# ---- what a script does before it trains


def peek(script: Script) -> None:
    next(iter(script.loader))


def test_a_look_costs_nothing_where_a_stream_has_become_so_short_that_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, _ = saved(tmp_path, 5, stream=True)
    monkeypatch.setattr(f"{__name__}.SAMPLES", 5 * SIZE)
    whole = Script(stream=True).run(plainly)
    script = resumed(path, stream=True)
    peek(script)
    assert script.run(plainly) == whole[5:]


def evaluate(script: Script) -> None:
    seen: list[int] = []
    with torch.no_grad():
        for batch in script.loader:
            script.model(batch)
            seen += ids(batch)
    assert sorted(seen) == list(range(SAMPLES)), "an evaluation sees every batch once"


def save_again(script: Script) -> None:
    path = script.accelerator.save_state(script.path / "again")
    script.accelerator.load_state(path)


@pytest.mark.parametrize(
    "before", [peek, evaluate, save_again, lambda script: (peek(script), evaluate(script), peek(script))]
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["continue", "nothing"])
def test_a_look_at_the_data_costs_nothing(before: Any, stream: bool, name: str, tmp_path: Path):
    path, rest = saved(tmp_path, 5, stream=stream)
    script = resumed(path, stream=stream)
    script.path = tmp_path
    before(script)
    assert script.run(way(name, 5)) == rest


# ---- batches that are left out for another reason


def without(script: Script, bad: set[int]) -> None:
    for _ in range(script.loader.next_epoch, EPOCHS):
        for batch in script.loader:
            if not bad & set(ids(batch)):
                script.step(batch)


def test_bad_batches_are_left_out_and_no_other(tmp_path: Path):
    path, rest = saved(tmp_path, 5)
    bad = {rest[0][0], rest[6][1]}
    with pytest.warns(UserWarning, match="passed over 1 batches.*5 batches.*skip_first_batches"):
        steps = resumed(path).run(lambda script: without(script, bad))
    assert steps == [batch for batch in rest if not bad & set(batch)]


def test_a_script_that_skips_fewer_than_are_done_is_warned(tmp_path: Path):
    path, rest = saved(tmp_path, 5)

    def loop(script: Script) -> None:
        for epoch in range(EPOCHS):
            for index, batch in enumerate(script.loader):
                if epoch or index >= 3:
                    script.step(batch)

    with pytest.warns(UserWarning, match="passed over 3 batches.*5 batches.*skip_first_batches"):
        steps = resumed(path).run(loop)
    visits = [sample for batch in steps for sample in batch]
    assert len(visits) == len(set(itertools.chain.from_iterable(steps[: len(steps) - 16]))) + 2 * SAMPLES, "none twice"


def test_a_pass_of_which_nothing_is_used_is_warned_of_and_begins_there_again(tmp_path: Path):
    path, rest = saved(tmp_path, 5)
    script = resumed(path)
    with pytest.warns(UserWarning, match=f"passed over all {BATCHES} batches of a pass, and 5"):
        assert len([ids(batch) for batch in script.loader]) == BATCHES
    assert script.run(plainly) == rest


@pytest.mark.parametrize("name", ["continue", "islice"])
def test_a_skip_by_hand_of_more_than_was_done_is_warned_of(name: str, tmp_path: Path):
    path, rest = saved(tmp_path, 2)
    with pytest.warns(UserWarning, match="passed over 4 batches.*, and 2 batches of the epoch were done"):
        assert resumed(path).run(way(name, 4)) == rest[2:]


@pytest.mark.parametrize("skip", [0, 2, BATCHES])
def test_a_skip_of_another_number_than_was_done_is_warned_of(skip: int, tmp_path: Path):
    path, _ = saved(tmp_path, 5)
    script = resumed(path)
    with pytest.warns(UserWarning, match=rf"skip_first_batches\(loader, {skip}\) .*: 5 batches of the epoch were done"):
        assert len(list(script.accelerator.skip_first_batches(script.loader, skip))) == BATCHES - skip


def test_a_skip_by_the_count_of_the_whole_run_is_right_or_warned_of(tmp_path: Path):
    path, rest = saved(tmp_path, 11)

    def loop(script: Script) -> None:
        done = 0
        for _ in range(EPOCHS):
            for batch in script.loader:
                done += 1
                if done > 11:
                    script.step(batch)

    with pytest.warns(UserWarning, match="skip_first_batches"):
        steps = resumed(path).run(loop)
    assert steps[: len(rest)] == rest[: len(steps)] or steps != rest


def test_a_loss_of_nan_that_is_left_out_after_its_forward_counts_as_used(tmp_path: Path):
    path, rest = saved(tmp_path, 5)

    def loop(script: Script) -> None:
        first = True
        for _ in range(script.loader.next_epoch, EPOCHS):
            for batch in script.loader:
                loss = script.model(batch).mean() * (math.nan if first else 1.0)
                first = False
                if not loss.isnan():
                    script.step(batch)

    assert resumed(path).run(loop) == rest[1:]


@pytest.mark.parametrize("accumulate", [2, 3])
def test_a_window_that_is_drawn_before_its_first_use_is_trained_on_once(accumulate: int, tmp_path: Path):
    path, rest = saved(tmp_path, 2 * accumulate, accumulate=accumulate)

    def loop(script: Script) -> None:
        for _ in range(script.loader.next_epoch, EPOCHS):
            batches = iter(script.loader)
            while window := list(itertools.islice(batches, accumulate)):
                for batch in window:
                    script.step(batch)

    steps = resumed(path, accumulate=accumulate).run(loop)
    assert steps == rest


def test_one_batch_read_ahead_of_its_use_is_not_lost(tmp_path: Path):
    def ahead(script: Script) -> None:
        for _ in range(script.loader.next_epoch, EPOCHS):
            batches = iter(script.loader)
            batch = next(batches, None)
            while batch is not None:
                following = next(batches, None)
                script.step(batch)
                batch = following

    whole = Script().run(ahead)
    for stop in (3, 4, 7):
        script = Script()
        script.stop, script.path = stop, tmp_path / str(stop)
        script.run(ahead)
        assert resumed(script.path).run(ahead) == whole[stop:]


def test_batches_that_are_given_twice_and_held_are_an_error_before_the_backward(tmp_path: Path):
    path, _ = saved(tmp_path, 5)
    script = resumed(path)
    held: list[Any] = []
    passed = 0

    def loop() -> None:
        nonlocal passed
        for batch in script.loader:
            passed += 1
            if passed in (1, 6):
                held.append(batch)
            if passed > 5:
                script.step(batch)

    with pytest.raises(UsageError, match="they were given again"):
        loop()
    assert not script.steps
    script.accelerator.free_memory()


def test_a_model_that_is_not_prepared_trains_on_each_batch_once(tmp_path: Path):
    path, rest = saved(tmp_path, 5)
    script = resumed(path)
    other, steps = nn.Linear(1, 1), []
    optimizer = script.accelerator.prepare(torch.optim.SGD(other.parameters(), lr=1e-3))
    for _ in range(script.loader.next_epoch, EPOCHS):
        for batch in script.loader:
            other(batch).mean().backward()
            optimizer.optimizer.step()
            steps.append(ids(batch))
    assert steps == rest
    script.accelerator.free_memory()


# ---- the switch


def test_the_place_can_be_kept_or_left_to_the_script(tmp_path: Path):
    path, rest = saved(tmp_path, 5)
    assert resumed(path, restore_position=True).run(plainly) == rest
    assert resumed(path, restore_position=True).run(way("continue", 5)) == rest[:11], "from batch 5 once more"
    assert resumed(path, restore_position=False).run(way("continue", 5)) == rest
    with pytest.raises(SettingError, match="restore_position"):
        DataLoaderConfiguration(restore_position="never")  # type: ignore[arg-type]


@pytest.mark.parametrize(("kept", "then"), [(True, "nothing"), (False, "continue")])
def test_an_evaluation_sees_every_batch_once_where_the_place_is_kept_or_left(kept: bool, then: str, tmp_path: Path):
    path, rest = saved(tmp_path, 5)
    script = resumed(path, restore_position=kept)
    evaluate(script)
    assert script.run(way(then, 5)) == rest


class Pairs:
    """A training on two prepared loaders, with an optimizer for each of two models, as a GAN's."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.accelerator = Accelerator(cpu=True)
        models = [nn.Linear(1, 1), nn.Bilinear(1, 1, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-6) for model in models]
        others = DataLoader(list(torch.arange(100.0, 100.0 + SAMPLES)[:, None]), SIZE, shuffle=True)
        *self.parts, self.real, self.other = self.accelerator.prepare(*models, *optimizers, loader(True), others)
        self.steps: list[list[list[int]]] = []

    def step(self, real: torch.Tensor, other: torch.Tensor) -> None:
        first, second, *optimizers = self.parts
        for optimizer in optimizers:
            self.accelerator.backward(second(first(real), other).mean())
            optimizer.step()
            optimizer.zero_grad()
        self.steps.append([ids(real), ids(other)])

    def run(self, zipped: bool, skip: int, stop: int = -1, path: Path = Path()) -> list[list[list[int]]]:
        for epoch in range(skip // BATCHES, 2):
            others = iter(self.other)
            pairs = zip(self.real, self.other, strict=False) if zipped else ((real, next(others)) for real in self.real)
            for number, (real, other) in enumerate(pairs):
                if epoch * BATCHES + number < skip:
                    continue
                self.step(real, other)
                if len(self.steps) == stop:
                    self.accelerator.save_state(path)
                    return self.steps
        return self.steps


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("stop", [1, 2, 3, 5, 7, 9])
def test_a_script_that_skips_in_two_loaders_at_once_goes_on_in_both(stop: int, zipped: bool, tmp_path: Path):
    Pairs().run(zipped, 0, stop, tmp_path / "saved")
    resumed = Pairs()
    resumed.accelerator.load_state(tmp_path / "saved")
    assert resumed.run(zipped, stop) == Pairs().run(zipped, 0)[stop:]


def test_a_window_of_pairs_that_is_drawn_ahead_is_refused_where_a_batch_would_come_again(tmp_path: Path):
    Pairs().run(True, 0, 1, tmp_path / "saved")
    resumed = Pairs()
    resumed.accelerator.load_state(tmp_path / "saved")
    pairs = zip(resumed.real, resumed.other, strict=False)
    window = list(itertools.islice(pairs, 2))
    with pytest.raises(UsageError, match="it holds some of the first ones still"):
        resumed.step(*window[0])

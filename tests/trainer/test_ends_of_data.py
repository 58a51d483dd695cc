"""Data that is empty, used up, or ends at different batches on the ranks: an error or a warning, no sample left out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from instep import Accelerator, DataModule, TrainModule
from instep.accelerator import DataLoaderConfiguration
from instep.data import CombinedLoader, prepare_loader
from instep.errors import DataError
from instep.state import PartialState
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import quiet


class Numbers(IterableDataset[Any]):
    """Numbers without a length: as many on each rank as `sizes` says, from 100 times the rank on."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return (torch.tensor([100.0 * rank + number]) for number in range(self.sizes[rank]))


class Once(IterableDataset[Any]):
    """Keeps one generator, which is used up after the first pass."""

    def __init__(self, size: int) -> None:
        self.numbers = iter(torch.ones(size, 1))

    def __iter__(self) -> Iterator[Any]:
        return self.numbers


class Summing(TrainModule):
    """Logs means, and keeps the numbers that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch["a"] if isinstance(batch, dict) else batch
        self.seen += batch.flatten().tolist()
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("mean", batch.mean())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Taking(Summing):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.layer(next(dataloader_iter)[0]).sum()


class Reloading(DataModule):
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return stream(0 if self.trainer.current_epoch else 4)


class NoBatches:
    def __iter__(self) -> Iterator[list[int]]:
        return iter(())


def stream(*sizes: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(*sizes), **{"batch_size": 2, **options})


FULL: Any = DataLoader(torch.ones(8, 1), batch_size=2)


# ---- training


@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 50}], ids=["epochs", "steps"])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: stream(0), "epoch 0 had no batch: .*DataLoader of a Numbers"),
        (lambda: stream(3, batch_size=4, drop_last=True), "epoch 0 had no batch"),
        (lambda: stream(0, num_workers=1), "epoch 0 had no batch"),
        (lambda: (batch for batch in []), "epoch 0 had no batch: .*generator"),
        (lambda: DataLoader(torch.ones(8, 1), batch_sampler=NoBatches()), "epoch 0 had no batch"),
        (lambda: DataLoader(torch.ones(0, 1)), "gives no batch .DataLoader of a Tensor"),
        (lambda: DataLoader(torch.ones(3, 1), batch_size=4, drop_last=True), "gives no batch"),
        (lambda: (batch for batch in FULL), "generator gave its batches in an earlier pass and has no more"),
        (lambda: DataLoader(Once(4), batch_size=2), "DataLoader of a Once gave its batches in an earlier pass"),
        (lambda: CombinedLoader({"a": FULL, "b": stream(0)}), r"epoch 0 had no batch: .*\['b'\], DataLoader of a Num"),
        (lambda: CombinedLoader({"a": FULL, "b": stream(0)}, "max_size_cycle"), r"loader \['b'\] gives no batch"),
        (lambda: CombinedLoader({"a": FULL, "b": DataLoader(Once(4))}, "max_size"), "Once gave its batches in an ear"),
    ],
)
def test_training_data_that_is_empty_or_used_up_is_an_error(data: Any, said: str, limits: Any) -> None:
    trainer = quiet(**limits)
    with pytest.raises(DataError, match=said):
        trainer.fit(Summing(), data())
    assert trainer.current_epoch < 2


def test_every_way_of_reading_finds_an_epoch_without_a_batch() -> None:
    with pytest.raises(DataError, match="epoch 0 had no batch"):
        quiet(max_steps=5).fit(Taking(), stream(0))
    with pytest.raises(DataError, match="epoch 1 had no batch"):
        quiet(max_steps=50, reload_dataloaders_every_n_epochs=1).fit(Summing(), datamodule=Reloading())
    for settings in ({"overfit_batches": 2}, {"limit_train_batches": 2}, {"fast_dev_run": True}):
        with pytest.raises(DataError, match="epoch 0 had no batch"):
            quiet(**{"max_steps": 5, **settings}).fit(Summing(), stream(0))


def test_a_part_without_a_batch_that_is_filled_up_with_none_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"no batch \(loader \['b'\], DataLoader of a Numbers\): None stands"):
        quiet(max_epochs=1).fit(Summing(), CombinedLoader({"a": FULL, "b": stream(0)}, "max_size"))


def test_epochs_of_which_nothing_is_left_or_wanted_are_none_without_a_batch(tmp_path: Any, capsys: Any) -> None:
    class Leaving(Summing):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
            return -1

    quiet(max_epochs=2).fit(Leaving(), stream(4))
    capsys.readouterr()
    quiet(max_epochs=2, limit_train_batches=0).fit(Summing(), stream(0))
    assert capsys.readouterr().out == "fit ended at step 0: limit_train_batches=0.\n"
    trainer = quiet(max_epochs=2)
    module = Summing()
    module.on_train_batch_end = lambda *_: trainer.save_checkpoint(tmp_path / "at")  # type: ignore[method-assign]
    trainer.fit(module, stream(2))
    resumed = quiet(max_epochs=3)
    resumed.fit(Summing(), stream(2), ckpt_path=tmp_path / "at")  # saved after the only batch of an epoch
    assert resumed.current_epoch == 3


class Endless(IterableDataset[Any]):
    """Goes on in each epoch where the one before it was left."""

    def __init__(self) -> None:
        self.state = {"place": 0}
        self.state_dict, self.load_state_dict = self.state.copy, self.state.update

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.state["place"] += 1
            yield torch.tensor([float(self.state["place"])])


def test_data_that_goes_on_from_epoch_to_epoch_does_so_in_a_run_that_resumes_between_two(tmp_path: Any) -> None:
    first, second = Summing(), Summing()
    trainer = quiet(max_epochs=1, limit_train_batches=2)
    trainer.fit(first, DataLoader(Endless()))
    path = trainer.save_checkpoint(tmp_path / "at")
    quiet(max_epochs=2, limit_train_batches=2).fit(second, DataLoader(Endless()), ckpt_path=path)
    assert (first.seen, second.seen) == ([1.0, 2.0], [3.0, 4.0])


# ---- evaluation


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: DataLoader(torch.ones(0, 1)), "DataLoader of a Tensor, gives no batch"),
        (lambda: stream(0), "loader 1 of the .* data .DataLoader of a Numbers. gave no batch"),
    ],
)
def test_an_empty_evaluation_loader_is_warned_of(data: Any, said: str) -> None:
    for fn in ("validate", "test"):
        with pytest.warns(UserWarning, match=said):
            results = getattr(quiet(), fn)(Summing(), [FULL, data()], verbose=False)
        assert results == [{"mean/dataloader_idx_0": 1.0}, {}]
    with pytest.warns(UserWarning, match=said):
        assert len(quiet().predict(Summing(), [FULL, data()])[0]) == 4
    with pytest.warns(UserWarning, match=said):
        quiet(max_epochs=1, num_sanity_val_steps=0).fit(Summing(), FULL, [FULL, data()])


def test_validation_data_that_is_used_up_is_an_error_and_the_sanity_check_uses_none_up() -> None:
    module, trainer = Summing(), quiet(max_epochs=2)
    means: list[float] = []
    module.on_validation_end = lambda: means.append(float(trainer.callback_metrics["mean"]))  # type: ignore[method-assign]
    with (
        pytest.warns(UserWarning, match="an iterator.*the sanity check is left out"),
        pytest.raises(DataError, match="generator gave its batches in an earlier pass"),
    ):
        trainer.fit(module, FULL, (torch.tensor([float(number)]) for number in range(5)))
    assert means == [2.0], "the mean of all five"


# ---- a loop of one's own


def test_a_prepared_loader_says_that_it_is_empty_or_used_up() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    empty, once = accelerator.prepare_data_loader(stream(0)), accelerator.prepare_data_loader(DataLoader(Once(4)))
    with pytest.warns(UserWarning, match="prepared loader .DataLoader of a Numbers. had no batch"):
        assert list(empty) == []
    with torch.no_grad():
        assert list(empty) == [], "an evaluation of nothing is nothing"
    assert len(list(once)) == 4
    with pytest.raises(DataError, match="DataLoader of a Once gave its batches in an earlier pass"):
        list(once)
    accelerator.end_training()


# ---- several ranks


def on_ranks(sizes: tuple[int, ...]) -> dict[str, Any]:
    """What evaluations see of uneven streams, and what training says."""
    settings: dict[str, Any] = {"devices": len(sizes), "strategy": "ddp", "max_epochs": 1}
    found: dict[str, Any] = {}

    def one(result: Any) -> list[float]:
        return [float(value) for metrics in result for value in metrics.values()]

    for batch_size in (1, 2):
        data = stream(*sizes, batch_size=batch_size)
        found[f"validate {batch_size}"] = one(quiet(**settings).validate(Summing(), data, verbose=False))
        found[f"test {batch_size}"] = one(quiet(**settings).test(Summing(), [data, data], verbose=False))
        trainer = quiet(**settings)
        trainer.fit(Summing(), [torch.ones(1, 1)], data)
        found[f"fit {batch_size}"] = one([trainer.callback_metrics])
        outputs = quiet(**settings).predict(Summing(), data)
        found[f"predicted {batch_size}"] = sorted(number for output in outputs for number in output.flatten().tolist())
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
        prepared = accelerator.prepare(data)
        gathered = [number for batch in prepared for number in accelerator.gather_for_metrics(batch).flatten().tolist()]
        found[f"predicted by hand {batch_size}"] = sorted(gathered)
        accelerator.end_training()
    for uneven in ("stop", "join"):
        module = Summing()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                quiet(uneven=uneven, **settings).fit(module, stream(*sizes, batch_size=1))
            except DataError as error:
                found[f"{uneven} raised"] = str(error)
        found[uneven] = module.seen
        found[f"{uneven} said"] = [str(one.message) for one in caught]
    return found


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [(5, 2), (0, 3), (4, 0, 1)])
def test_no_evaluation_leaves_a_sample_out_and_training_says_what_it_does(sizes: tuple[int, ...]) -> None:
    everything = [100.0 * rank + number for rank, size in enumerate(sizes) for number in range(size)]
    ranks = run_ranks(on_ranks, len(sizes), sizes)
    for found in ranks:
        for name, values in found.items():
            if name.startswith("predicted"):
                assert values == everything, name
            elif name.startswith(("validate", "test", "fit")):
                assert values == pytest.approx([sum(everything) / len(everything)] * len(values)), name
    assert sorted({number for found in ranks for number in found["join"]}) == everything
    steps, left = min(sizes), sum(sizes) - len(sizes) * min(sizes)
    assert [len(found["stop"]) for found in ranks] == [steps] * len(sizes)
    (said,) = ranks[0]["stop said"]
    assert f"after {steps} batches, and leaves out {left} batches ({left} samples): " in said
    assert f"{sizes[0] - steps} on rank 0" in said or sizes[0] == steps
    assert [found["join said"] for found in ranks] == [[]] * len(sizes)
    for found in ranks:
        assert ("stop raised" in found) == (steps == 0)
        assert steps or "Trainer(uneven='join')" in found["stop raised"]


def rest(data: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source = prepare_loader(data, rank=dist.get_rank(), world_size=2, **options)
        for epoch in range(2):
            source.set_epoch(epoch)
            list(source)
    return [str(one.message) for one in caught]


def rests() -> list[list[str]]:
    PartialState(cpu=True)
    endless = stream(3, 10**9)
    lists = [torch.ones(1)] * (2 + 3 * dist.get_rank())
    return [rest(endless), rest(stream(9, 7), limit=3), rest(lists), rest(lists, stage="val"), rest(stream(4, 4))]


@pytest.mark.dist
def test_what_a_stop_leaves_out_is_counted_once_as_far_as_it_can_be() -> None:
    endless, limited, lists, evaluated, even = run_ranks(rests, 2)[0]
    assert len(endless) == len(lists) == 1
    found = re.search("leaves out at least ([0-9,]+) batches", endless[0])
    assert found is not None, endless[0]
    assert 0 < int(found[1].replace(",", "")) <= 10_000  # it is counted for two seconds at most
    assert "on rank 1" in endless[0]
    assert "(rank 0: 2, rank 1: 5) in their list. " in lists[0]
    assert "each epoch ends after 2, and leaves out 3" in lists[0]
    assert limited == evaluated == even == []


def another_kind() -> str:
    data = stream(2, 2) if PartialState(cpu=True).process_index else DataLoader(torch.ones(4, 1))
    try:
        quiet(devices=2, strategy="ddp").validate(Summing(), data, verbose=False)
    except DataError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
def test_loaders_of_different_kinds_on_the_ranks_are_an_error_on_each() -> None:
    said = run_ranks(another_kind, 2)
    assert all("rank 0: data with a length, rank 1: an iterable of batches" in text for text in said)


class Placed(Numbers):
    """Knows where it stands."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.sizes[dist.get_rank()]:
            self.place += 1
            yield torch.tensor([100.0 * dist.get_rank() + self.place - 1])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def resumed(kind: Any) -> list[list[float]]:
    PartialState(cpu=True)

    def source() -> Any:
        data = DataLoader(kind(0, 4), batch_size=1)
        return prepare_loader(data, rank=dist.get_rank(), world_size=2, uneven="join")

    whole = [batch.item() for batch in source()]
    parts = []
    for stop in (1, 2, 3, 4):
        first = source()
        taken = [batch.item() for batch, _ in zip(first, range(stop), strict=False)]
        state = first.state_dict(stop)
        second = source()
        second.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what cannot say where it stands is read again
            given = []
            for number, batch in enumerate(second, second.first_batch):
                assert second.share.mine == (0 if dist.get_rank() == 0 else 1)
                if number == stop:
                    again = second.state_dict(number + 1)  # a save after the resume
                    assert dist.get_rank() == 1 or again.get("state") == state.get("state")
                given.append(batch.item())
        parts.append(taken + given)
    return [whole, *parts]


@pytest.mark.dist
@pytest.mark.parametrize("kind", [Numbers, Placed])
def test_a_rank_without_data_of_its_own_resumes(kind: Any) -> None:
    first, second = run_ranks(resumed, 2, kind)
    assert [len(one) for one in first] == [4] * 5, "borrowed batches, which do not count"
    assert second == [[100.0, 101.0, 102.0, 103.0]] * 5

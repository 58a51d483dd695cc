from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, IterableDataset

from instep.callbacks import BasePredictionWriter, PredictionWriter
from instep.errors import DataError, SettingError
from tests.trainer.toys import Toy, loader, quiet, samples


class Seen(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx) -> None:  # type: ignore[no-untyped-def]
        self.batches.append((batch_indices, batch_idx, dataloader_idx, len(prediction)))

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices) -> None:  # type: ignore[no-untyped-def]
        self.epochs.append((predictions, batch_indices))


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_the_hooks_by_interval(interval: str) -> None:
    writer = Seen(interval)
    expected = quiet(callbacks=writer).predict(Toy(), [loader(5), loader(2)])
    assert expected is not None
    batches = [([0, 1, 2], 0, 0, 3), ([3, 4], 1, 0, 2), ([0, 1], 0, 1, 2)]
    assert writer.batches == ([] if interval == "epoch" else batches)
    assert len(writer.epochs) == (interval != "batch")
    for predictions, indices in writer.epochs:
        assert indices == [[[0, 1, 2], [3, 4]], [[0, 1]]]
        assert all(torch.equal(a, b) for a, b in zip(chain(*predictions), chain(*expected), strict=True))
        assert writer._predictions == []


def test_what_a_writer_must_have() -> None:
    with pytest.raises(SettingError, match=r"`write_interval` should be one of \['batch', 'epoch'"):
        BasePredictionWriter("often")  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="it needs write_on_batch_end"):
        quiet(callbacks=BasePredictionWriter()).predict(Toy(), loader())
    with pytest.raises(NotImplementedError, match="it needs write_on_epoch_end"):
        quiet(callbacks=BasePredictionWriter("epoch")).predict(Toy(), loader())


class Outputs(Toy):
    """Outputs of several kinds; `id` is the sample's number in the data."""

    def __init__(self, width: int = 2, texts: bool = False) -> None:
        super().__init__()
        self.width, self.texts = width, texts

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        number = (batch[0][:, 0] * 11).round()
        scores = number[:, None].repeat(1, self.width if self.width else batch_idx + 1)
        found = {"id": number.to(torch.int16), "nested": (scores.to(torch.bfloat16), number > 4)}
        return found | {"text": [f"é {int(one)}" for one in number]} if self.texts else found


def test_one_file_in_the_datas_order_and_none_of_an_earlier_run(tmp_path: Path) -> None:
    longer = DataLoader(samples(11), 2, shuffle=True)
    quiet(callbacks=PredictionWriter(tmp_path, "batch")).predict(Outputs(), longer)
    assert len(list((tmp_path / "predictions").iterdir())) == 6
    others = tmp_path / "predictions-of-mine" / "notes.jsonl"
    others.parent.mkdir()
    others.write_text("mine")
    shuffled = DataLoader(samples(11), 3, shuffle=True)
    quiet(callbacks=PredictionWriter(tmp_path, "batch_and_epoch")).predict(Outputs(), shuffled)
    parts = sorted((tmp_path / "predictions").iterdir())
    assert [part.name for part in parts] == [f"{batch:08d}-00000.safetensors" for batch in range(4)]
    assert others.read_text() == "mine"
    found = load_file(tmp_path / "predictions.safetensors")
    assert found["index"].tolist() == found["id"].tolist() == list(range(11))
    assert found["nested/0"].tolist() == [[float(i)] * 2 for i in range(11)]
    assert (found["nested/0"].dtype, found["nested/1"].dtype) == (torch.bfloat16, torch.bool)
    assert found["nested/1"].tolist() == [i > 4 for i in range(11)]


def test_lines_of_several_loaders_and_widths(tmp_path: Path) -> None:
    data = [DataLoader(samples(11), 3, shuffle=True), loader(2)]
    quiet(callbacks=PredictionWriter(tmp_path, file_format="jsonl")).predict(Outputs(width=0, texts=True), data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions-0.jsonl", "predictions-1.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "predictions-0.jsonl").read_text("utf-8").splitlines()]
    assert [(one["index"], one["id"], one["text"]) for one in lines] == [(i, i, f"é {i}") for i in range(11)]
    assert {len(one["nested/0"]) for one in lines} == {1, 2, 3, 4}


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (samples(11)[i] for i in reversed(range(11)))


def test_without_indices_the_order_is_that_of_the_batches(tmp_path: Path) -> None:
    quiet(callbacks=PredictionWriter(tmp_path)).predict(Outputs(), DataLoader(Endless(), 3))
    found = load_file(tmp_path / "predictions.safetensors")
    assert "index" not in found
    assert found["id"].tolist() == list(reversed(range(11)))


def test_what_cannot_be_written(tmp_path: Path) -> None:
    class Mean(Toy):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"mean": batch[0].mean()}

    for module, text in (
        (Mean(), r"'mean' of what predict_step returned is a Tensor of shape \(\), where the batch has 3 samples"),
        (Outputs(texts=True), "safetensors hold tensors only, and 'text' .* a list: use PredictionWriter"),
        (Outputs(width=0), r"'nested/0' has rows of bfloat16 \[1\] in .* and of bfloat16 \[2\] in"),
    ):
        with pytest.raises(DataError, match=text):
            quiet(callbacks=PredictionWriter(tmp_path)).predict(module, loader())
    assert not (tmp_path / "predictions.safetensors").exists()

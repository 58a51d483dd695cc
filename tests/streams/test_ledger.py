"""`instep runs samples`: what it says of each step is what the ranks trained on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from instep import Callback
from instep.callbacks import ModelCheckpoint
from instep.cli.main import main
from instep.data import StreamDataset, StreamMixture, prepare_loader
from instep.errors import DataError, NonFiniteError
from instep.runs.entries import read_entries
from instep.streams import ledger
from instep.streams.ledger import samples_of
from instep.utils.untrusted_files import parse_object
from tests.helpers.spawn import run_ranks
from tests.streams.files import write_shards
from tests.trainer.toys import Toy, quiet


def sample(record: Any) -> Any:
    return torch.full((4,), float(record["n"])), torch.zeros(())


class Ranked(Toy):
    """Keeps what each rank saw in each optimizer step."""

    def on_train_start(self) -> None:
        self.steps: dict[int, list[list[float]]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mine = self.trainer._run.source.share.mine
        self.steps.setdefault(self.trainer.global_step + 1, []).append(batch[0][:mine, 0].tolist())
        return self.loss(batch)


def train(root: str, steps: int, batch_size: int, accumulate: int, mixture: bool = False, **fit: Any) -> Any:
    folder = Path(root)
    bucket: dict[str, Any] = {"bucket": fit.pop("bucket"), "length": "text"} if "bucket" in fit else {}
    stream: Any = StreamDataset(folder / "*.jsonl", sample, window=9, cache=folder, **bucket)
    if mixture:
        stream = StreamMixture([stream, StreamDataset(folder / "*.parquet", sample, cache=folder)], [2, 1], size=40)
    module = Ranked(lr=1e-6)
    trainer = quiet(
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        default_root_dir=root,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)],
        devices="auto",
        **fit.pop("trainer", {}),
    )
    trainer.fit(module, DataLoader(stream, batch_size, shuffle=True), ckpt_path="auto")
    return module.steps, str(trainer.run_folder.path)


def said(folder: str, step: int, ranks: int, cache: Path | None = None) -> list[list[list[float]]]:
    batches = samples_of(Path(folder), step, cache)["batches"]
    return [[list(map(float, each["samples"])) for each in batches if each["rank"] == rank] for rank in range(ranks)]


@pytest.mark.dist
def test_each_step_has_the_samples_that_its_ranks_trained_on(tmp_path: Path) -> None:
    write_shards(tmp_path, "jsonl")
    torch.manual_seed(5)
    first, folder = train(str(tmp_path), 11, 4, 3)  # an epoch has 13 batches, and 5 steps with a short one
    rest = run_ranks(train, 2, str(tmp_path), 19, 5, 1)  # on other ranks, from the middle of an epoch
    for step in range(1, 12):
        assert said(folder, step, 1) == [first[step]]
    assert len({where for _, where in rest} | {folder}) == 1
    for step in range(12, 20):
        assert said(folder, step, 2) == [seen[step] for seen, _ in rest]
    assert len((Path(folder) / "samples.jsonl").read_text().splitlines()) <= 3, "nothing is written per step"


def test_a_line_is_added_without_reading_or_writing_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ends(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None  # so no epoch begins at the step that the line before implies

    parsed: list[bytes] = []
    monkeypatch.setattr(ledger, "parse_object", lambda line: parsed.append(line) or parse_object(line))
    trainer = quiet(max_epochs=30, default_root_dir=tmp_path, enable_checkpointing=True, callbacks=[Ends()])
    module = Ranked(lr=1e-6)
    data = TensorDataset(torch.arange(8.0)[:, None].repeat(1, 4), torch.zeros(8))
    trainer.fit(module, DataLoader(data, 2, shuffle=True))
    folder = str(trainer.run_folder.path)
    lines = Path(folder, "samples.jsonl").read_bytes().splitlines()
    assert len(lines) == 30
    assert parsed == lines[:-1]
    for step in (1, 2, 31, 60):
        assert said(folder, step, 1) == [module.steps[step]]


def test_the_command_names_file_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards(tmp_path, "jsonl")
    write_shards(tmp_path, "parquet")
    seen, folder = train(str(tmp_path), 3, 4, 1, mixture=True)
    capsys.readouterr()
    assert main(["runs", "samples", str(tmp_path), "--step", "2", "--json"]) == 0
    (batch,) = json.loads(capsys.readouterr().out)["batches"]
    ends = {0: 0, 1: 13, 2: 20, 3: 50}
    for (_, own), place, number in zip(batch["samples"], batch["places"], seen[2][0], strict=True):
        file, _, record = place.partition(", record ")
        assert ends[int(Path(file).stem)] + int(record) == own == number
    assert {Path(place.partition(",")[0]).suffix for place in batch["places"]} <= {".jsonl", ".parquet"}
    assert main(["runs", "samples", folder, "--step", "99", "--rank", "4"]) == 1
    with pytest.raises(DataError, match=r"does not say which samples step 0"):
        samples_of(Path(folder), 0)
    (Path(folder) / "samples.jsonl").write_text('{"step": 0, "accumulate": 1, "epoch": []}\n')
    with pytest.raises(DataError, match=r"samples.jsonl is damaged"):
        samples_of(Path(folder), 1)


def test_a_stream_with_buckets_has_its_samples_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards(tmp_path, "jsonl")
    seen, folder = train(str(tmp_path), 15, 4, 1, bucket=4)  # an epoch has 13 steps
    for step in range(1, 16):
        assert said(folder, step, 1, tmp_path) == [seen[step]]
    assert main(["runs", "samples", folder, "--step", "3", "--cache", str(tmp_path)]) == 0
    for path in (tmp_path / "index").glob("*-*.npy"):
        path.unlink()
    assert main(["runs", "samples", folder, "--step", "3", "--cache", str(tmp_path)]) == 1
    assert "read its `lengths` once, and try again" in capsys.readouterr().err
    _ = StreamDataset(tmp_path / "*.jsonl", length="text", cache=tmp_path).lengths
    assert said(folder, 3, 1, tmp_path) == [seen[3]]


def test_a_run_folder_leads_to_no_file_outside_of_it_and_the_cache(tmp_path: Path) -> None:
    write_shards(tmp_path, "jsonl", [12])
    _, folder = train(str(tmp_path), 3, 4, 1, bucket=4)
    (order,) = Path(folder).glob("samples-*.json")
    spec, lines = order.read_text(), Path(folder) / "samples.jsonl"
    assert json.loads(spec)["lengths"] == [path.name for path in (tmp_path / "index").glob("*-*.npy")]
    (lengths,) = (tmp_path / "index").glob("*-*.npy")
    lengths.rename(tmp_path / lengths.name)
    for name in (str(tmp_path / lengths.name), f"../{lengths.name}", 3):
        order.write_text(json.dumps({**json.loads(spec), "lengths": [name]}))
        with pytest.raises(DataError, match=r"samples.jsonl is damaged"):
            samples_of(Path(folder), 2, tmp_path)
    (tmp_path / lengths.name).rename(lengths)
    order.rename(tmp_path / order.name).write_text(spec)
    for name in (str(tmp_path / order.name), f"../../{order.name}"):
        text = lines.read_text()
        lines.write_text(text.replace(order.name, name))
        with pytest.raises(DataError, match=r"is no name of a file with an order"):
            samples_of(Path(folder), 2, tmp_path)
        lines.write_text(text)
    order.write_text(spec)
    assert len(said(folder, 2, 1, tmp_path)[0]) == 1
    for damaged in ({"files": [[]], "window": -1}, {"files": [["a", 2**70]], "window": 2**70}, {"sources": [1]}):
        order.write_text(json.dumps(damaged))
        with pytest.raises(DataError, match=r"samples.jsonl is damaged"):
            samples_of(Path(folder), 2, tmp_path)


def test_a_pipe_in_a_run_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "samples.jsonl")
    ledger.note(tmp_path, prepare_loader([1, 2]), 0, 0, 0, 1)
    with pytest.raises(DataError, match=r"samples.jsonl is damaged \(OSError: .* a pipe"):
        samples_of(tmp_path, 1)


def test_an_older_run_is_not_taken_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards(tmp_path, "jsonl", [12])
    _, folder = train(str(tmp_path), 3, 4, 1)
    newer = Path(folder).with_name("version_9")
    newer.mkdir()
    (newer / "metrics.csv").write_text("step\n0\n")
    assert main(["runs", "samples", str(newer), "--step", "2"]) == 1
    assert f"{newer}. Name a run in which a fit has begun" in capsys.readouterr().err
    assert main(["runs", "samples", str(newer.parent), "--step", "2"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{newer} has no samples.jsonl: skipped"
    assert second.startswith(f"{folder}: step 2")
    assert main(["runs", "samples", folder, "--step", "2", "--rank", "4"]) == 1
    assert "step 2 had no rank 4: expected one of 0 to 0" in capsys.readouterr().err
    assert main(["runs", "samples", folder, "--step", "999"]) == 1
    assert "has ended at step 3: there was no step 999" in capsys.readouterr().err
    with (Path(folder) / "samples.jsonl").open("a") as file:
        file.write('{"step": 2, "epo')  # as a disk that was full left it
    train(str(tmp_path), 4, 4, 1)
    first, damaged, last = (Path(folder) / "samples.jsonl").read_text().splitlines()
    assert (json.loads(first)["step"], damaged, json.loads(last)["step"]) == (0, '{"step": 2, "epo', 3)
    assert main(["runs", "samples", folder, "--step", "2"]) == 1
    assert "samples.jsonl is damaged (JSONDecodeError" in capsys.readouterr().err


def test_a_run_is_named_as_in_the_other_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, "jsonl", [12])
    train(str(tmp_path), 3, 4, 1)
    monkeypatch.chdir(tmp_path)
    (name,) = [entry.name for entry in read_entries(".")]
    assert not Path(name).exists()
    assert main(["runs", "samples", name, "--step", "2"]) == 0
    assert "step 2 is in epoch 1\nrank 0, batch 1:\n" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_names_file_and_record(tmp_path: Path) -> None:
    path = write_shards(tmp_path, "jsonl", [8])[0]
    path.write_text(path.read_text().replace('"n": 5,', '"n": NaN,'))
    with pytest.raises(NonFiniteError, match=r"5 \(.*000.jsonl, record 5 at byte \d+\)"):
        train(str(tmp_path), 2, 4, 1, trainer={"nonfinite": "stop"})

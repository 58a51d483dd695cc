"""The monitors together: over a resume, and on two ranks, in one pair of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from instep.callbacks import (
    DeviceStatsMonitor,
    GradientMonitor,
    PredictionWriter,
    SpikeDetection,
    ThroughputMonitor,
)
from instep.errors import TrainingSpikeError
from instep.state import PartialState
from instep.strategies import MeshStrategy
from tests.callbacks.fakes import RecordingLogger
from tests.helpers.spawn import run_ranks
from tests.strategies.tiny_gpt import TinyGPT
from tests.strategies.tiny_gpt import loader as gpt_loader
from tests.trainer.toys import DeepToy, Toy, loader, quiet


def _whole_or_resumed(folder: Path, parts: list[int]) -> tuple[Tensor, dict[str, dict[int, float]]]:
    """Train to each step of `parts` in turn, resumed each time; return the weights and what was logged."""
    torch.manual_seed(2)
    rows: dict[str, dict[int, float]] = {}
    module, path = DeepToy(), None
    for number, steps in enumerate(parts):
        logger, module = RecordingLogger(), DeepToy()
        callbacks = [
            DeviceStatsMonitor(),
            ThroughputMonitor(length_fn=lambda batch: batch[0].numel(), window_size=2),
            GradientMonitor(histograms=True),
            SpikeDetection(rtol=50.0, exclude_batches_path=folder),
        ]
        settings = {"max_steps": steps, "log_every_n_steps": 2, "accumulate_grad_batches": 2}
        trainer = quiet(logger=logger, callbacks=callbacks, **settings)
        with pytest.warns(UserWarning, match="RecordingLogger has no place for histogram"):
            trainer.fit(module, loader(17, shuffle=True), loader(3), ckpt_path=path)
        path = folder / f"{len(parts)}-{number}"
        trainer.save_checkpoint(path)
        for step, values in logger.rows:
            for name, value in values.items():
                assert rows.setdefault(name, {}).setdefault(step, value) == value  # nothing comes twice
    exact = ("grad", "samples", "tokens", "train/batches", "train/lengths")
    return module.layer[0].weight, {name: of for name, of in rows.items() if name.startswith(exact)}


def test_a_resumed_run_logs_and_trains_the_same(tmp_path: Path) -> None:
    weight, rows = _whole_or_resumed(tmp_path, [7])
    again, pieces = _whole_or_resumed(tmp_path, [2, 5, 7])
    assert torch.equal(weight, again)
    assert rows == pieces
    assert rows["samples"] == {2: 12, 4: 23, 6: 34}  # three windows an epoch: two batches of three; the last has five


class Spiking(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * 0 + 1.0 + 9 * (self.global_rank == 1 and self.global_step == 4)


class Numbered(Toy):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return batch[0][:, :1] * 13


def _fit(callback: Any, module: Toy | None = None, ckpt_path: Any = None, **settings: Any) -> tuple[Any, Any]:
    logger = RecordingLogger()
    options = {"devices": 2, "max_steps": 3, "log_every_n_steps": 1, **settings}
    trainer = quiet(logger=logger, callbacks=callback, **options)
    trainer.fit(module or DeepToy(), loader(13), ckpt_path=ckpt_path)
    return trainer, logger


def _throughput(folder: Path) -> dict[str, Any]:
    def monitor() -> ThroughputMonitor:
        return ThroughputMonitor(length_fn=lambda batch: batch[0].numel(), window_size=2, available_flops=1.0)

    trainer, logger = _fit(monitor())
    trainer.save_checkpoint(folder / "three")
    _, resumed = _fit(monitor(), ckpt_path=folder / "three", max_steps=5)
    last = logger.rows[-1][1] if logger.rows else {}
    return {"samples": logger.of("samples"), "tokens": logger.of("tokens"), "last": last, "more": resumed.of("samples")}


def _spike(folder: Path) -> tuple[Any, ...]:
    try:
        _fit(SpikeDetection(exclude_batches_path=folder), Spiking(), max_steps=20, log_every_n_steps=2)
    except TrainingSpikeError as error:
        return error.global_step, error.ranks, error.sample_indices, str(error)
    return ()


def _gpt(**settings: Any) -> tuple[float | None, dict[str, dict[int, float]]]:
    torch.manual_seed(1)
    monitor, logger = ThroughputMonitor(), RecordingLogger()
    callbacks = [monitor, GradientMonitor(depth=1)]
    trainer = quiet(logger=logger, callbacks=callbacks, max_steps=1, log_every_n_steps=1, **settings)
    trainer.fit(TinyGPT(layers=1), gpt_loader())
    return monitor._flops_per_sample, {name: logger.of(name) for name in ("samples", "grad_2.0_norm_total")}


def _ranks(folder: Path) -> dict[str, Any]:
    PartialState(cpu=True)
    found: dict[str, Any] = {"throughput": _throughput(folder), "spike": _spike(folder)}
    found["tp"] = _gpt(devices=2, strategy=MeshStrategy(tp=2))
    for strategy in ("ddp", "fsdp"):
        _, logger = _fit(GradientMonitor(), strategy=strategy, accumulate_grad_batches=2)
        found[strategy] = logger.rows
        _, logger = _fit(GradientMonitor("inf", depth=0), strategy=strategy)
        found[f"{strategy} inf"] = logger.rows
    for format in ("safetensors", "jsonl"):
        writer = PredictionWriter(folder / "out", "batch_and_epoch", file_format=format)  # type: ignore[arg-type]
        quiet(devices=2, callbacks=writer).predict(Numbered(), loader(13))
    return found


@pytest.mark.dist
def test_monitors_on_two_ranks_log_what_both_did(tmp_path: Path) -> None:
    main, other = run_ranks(_ranks, 2, tmp_path)
    throughput = main["throughput"]
    assert throughput["samples"] == {1: 6, 2: 12, 3: 13}  # three batches of three on each, and the last sample on one
    assert throughput["tokens"] == {1: 24, 2: 48, 3: 52}
    assert throughput["more"] == {4: 19, 5: 25}
    last = throughput["last"]
    assert last["train/samples_per_sec"] == pytest.approx(last["train/device/samples_per_sec"])  # the other replays
    assert last["train/batches_per_sec"] == pytest.approx(2 * last["train/device/batches_per_sec"])
    assert other["throughput"]["samples"] == {}

    step, ranks, samples, text = main["spike"]
    assert (step, ranks) == (5, [1])
    assert samples == [{0: [0, 1, 2], 1: [6, 7, 8]}, {0: [3, 4, 5], 1: [9, 10, 11]}]
    assert "(epoch 1, batch_idx 1): the loss is 10 on rank 1, where the mean of the last 4 batches is 1 " in text
    assert "Samples of batch_idx 0 and 1: rank 1: [3, 4, 5]; [9, 10, 11]; those of all ranks are in" in text
    assert main["spike"] == other["spike"]

    for name in ("", " inf"):
        ddp, fsdp = main[f"ddp{name}"], main[f"fsdp{name}"]
        assert [step for step, _ in ddp] == [step for step, _ in fsdp] == [1, 2, 3]
        for (_, plain), (_, sharded) in zip(ddp, fsdp, strict=True):
            assert sharded == pytest.approx(plain, rel=1e-5)
            assert len(plain) == (1 if name else 5)

    flops, values = _gpt()
    assert flops
    assert main["tp"] == (flops / 2, {name: pytest.approx(of, rel=1e-5) for name, of in values.items()})

    found = load_file(tmp_path / "out" / "predictions.safetensors")
    assert found["index"].tolist() == list(range(13))
    assert found["predictions"].round().flatten().tolist() == list(range(13))
    lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    assert [line.startswith(f'{{"index": {i}, ') for i, line in enumerate(lines)] == [True] * 13
    parts = sorted(path.name for path in (tmp_path / "out" / "predictions").iterdir())
    five = [f"{batch:08d}-{rank:05d}.jsonl" for batch in range(3) for rank in range(2)][:5]
    assert parts == five, "the other rank's last batch is a replay"

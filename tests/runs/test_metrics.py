"""Curves are the same from each logger's files, keep their spikes, and are read on from where the reading ended."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from instep.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger
from instep.runs import MetricsReader
from instep.runs.metrics import _Buckets

STEPS = 2000


def value(step: int) -> float:
    return 100.0 if step == 1333 else step / 1024


def write_wandb(path: Path, rows: list[dict[str, float]], config: dict[str, float]) -> None:
    """Write what W&B writes: blocks of 32 kB with records that may go over their ends."""
    from wandb.proto import wandb_internal_pb2 as messages

    out = bytearray(b":W&B\0\0\0")

    def put(data: bytes) -> None:
        begins = True
        while True:
            left = 2**15 - len(out) % 2**15
            if left < 7:
                out.extend(bytes(left))
                continue
            piece, data = data[: left - 7], data[left - 7 :]
            kind = (1 if not data else 2) if begins else (4 if not data else 3)
            out.extend(struct.pack("<IHB", 0, len(piece), kind) + piece)
            begins = False
            if not data:
                return

    record = messages.Record()
    for key, content in config.items():
        record.run.config.update.add(key=key, value_json=json.dumps(content))
    put(record.SerializeToString())
    for row in rows:
        record = messages.Record()
        for key, content in row.items():
            record.history.item.add(nested_key=[key], value_json=json.dumps(content))
        put(record.SerializeToString())
    path.write_bytes(bytes(out))


def write(kind: str, folder: Path, steps: range) -> None:
    if kind == "wandb":
        rows = [{"loss": value(step), "trainer/global_step": step} for step in steps]
        write_wandb(folder / "run-1.wandb", rows, {"lr": 0.5})
    else:
        kinds = {"csv": CSVLogger, "jsonl": JSONLinesLogger, "tensorboard": TensorBoardLogger}
        logger: Logger = kinds[kind]()
        logger.delivery.start(folder)
        for step in steps:
            logger.log_metrics({"loss": value(step)}, step)
        logger.finalize()


@pytest.mark.parametrize("kind", ["csv", "jsonl", "tensorboard", "wandb"])
def test_a_long_curve_is_downsampled_and_keeps_its_spike_and_ends(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path, range(STEPS))
    metrics = MetricsReader(tmp_path, max_points=200).read()
    curve = metrics.curves["loss"]
    assert (metrics.source, metrics.problems) == (kind, [])
    assert (curve.count, curve.last, curve.greatest, curve.least) == (STEPS, value(STEPS - 1), 100.0, 0.0)
    assert (curve.steps[0], curve.steps[-1]) == (0, STEPS - 1)
    assert 90 <= len(curve.steps) <= 200
    assert 1333 in curve.steps
    assert all(curve.values[i] == value(int(step)) for i, step in enumerate(curve.steps))


def test_a_short_curve_is_whole(tmp_path: Path) -> None:
    write("csv", tmp_path, range(150))
    curve = MetricsReader(tmp_path, ["loss"], 200).read().curves["loss"]
    assert (curve.steps, curve.values) == ([*range(150)], [value(step) for step in range(150)])


def test_what_is_added_is_read_on_and_a_rewritten_file_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n1,0.5\n2,0.2")  # half a row
    reader = MetricsReader(tmp_path)
    assert reader.read().curves["loss"].steps == [1]
    with path.open("a") as file:
        file.write("5\n3,nan\n4,x\n")
    metrics = reader.read()
    curve = metrics.curves["loss"]
    assert (curve.steps, curve.values, curve.not_finite, curve.first_bad) == ([1, 2], [0.5, 0.25], 1, 3)
    assert metrics.problems == ["metrics.csv: line 5: could not convert string to float: 'x'"]
    (tmp_path / "new").write_text("step,loss,acc\n1,0.5,1\n")
    (tmp_path / "new").replace(path)
    assert {name: line.steps for name, line in reader.read().curves.items()} == {"loss": [1], "acc": [1]}


def test_steps_that_a_resumed_run_wrote_again_count_once(tmp_path: Path) -> None:
    for first, last in ((0, 60), (40, 100)):
        logger = TensorBoardLogger()
        if first:
            logger.load_state_dict({"version": None, "step": first - 1})
        logger.delivery.start(tmp_path)
        for step in range(first, last):
            logger.log_metrics({"loss": float(step)}, step)
        logger.finalize()
    assert MetricsReader(tmp_path).read().curves["loss"].steps == [*range(100)]


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_each_rank_has_curves_of_its_own(tmp_path: Path, kind: str) -> None:
    (tmp_path / "status.json").write_text("{}")
    for number, folder in enumerate((tmp_path, tmp_path / "rank-1")):
        folder.mkdir(exist_ok=True)
        write(kind, folder, range(2 + number))
    curves = MetricsReader(tmp_path).read().curves
    assert {name: line.count for name, line in curves.items()} == {"loss": 2, "rank-1/loss": 3}


def test_a_forgotten_tail_is_dropped_from_buckets() -> None:
    buckets = _Buckets(22)
    for step in range(1000):
        buckets.add((step, float(step), None))
    buckets.forget(500)
    assert max(buckets.curve("x").steps) < 500
    for step in range(500, 1000):
        buckets.add((step, float(step), None))
    steps = buckets.curve("x").steps
    assert steps == sorted(steps)
    assert steps[-1] == 999


def test_a_name_that_the_first_logger_lacks_comes_from_the_next(tmp_path: Path) -> None:
    write("csv", tmp_path, range(3))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "acc": 1, "note": "text", "bad": "nan"}\n{"step": [}\n')
    metrics = MetricsReader(tmp_path, ["loss", "acc"]).read()
    assert (list(metrics.curves), metrics.source) == (["acc", "loss"], "jsonl+csv")
    assert "metrics.jsonl: line 2" in metrics.problems[0]


def test_lines_of_other_kinds_and_too_long_ones_are_passed_over(tmp_path: Path) -> None:
    lines = ('{"step": 1, "loss": 1}', '{"step": 2, "kind": "text", "name": "x", "value": "nan"}')
    long = '{"step": 3, "kind": "table", "value": "' + "x" * 3 * 2**20 + '"}'
    (tmp_path / "metrics.jsonl").write_text("\n".join((*lines, long, '{"step": 4, "loss": 2}', "")))
    metrics = MetricsReader(tmp_path).read()
    assert list(metrics.curves) == ["loss"]
    assert metrics.curves["loss"].steps == [1, 4]
    assert metrics.problems == [f"metrics.jsonl: line 3 of {len(long):,} bytes is passed over"]


def test_records_that_lie_about_their_length_end_the_reading(tmp_path: Path) -> None:
    for length in (2**63, 2**40, 40, 0):
        path = tmp_path / "events.out.tfevents.1"
        path.write_bytes(struct.pack("<Q", length) + b"\xff" * 90)
        MetricsReader(tmp_path).read()
    (tmp_path / "run-1.wandb").write_bytes(b":W&B\0\0\0" + bytes(2**16) + b"\xff" * 30)
    assert MetricsReader(tmp_path).read().curves == {}

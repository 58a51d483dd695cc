"""`instep checkpoint diff`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoint import CheckpointStore, Writer
from tests.cli.checkpoint.conftest import Command, shared, weights, writes
from tests.trainer.resuming import Case, run_once, run_with_stops


def save(root: Path, name: str, write: Callable[[Writer], None], **more: Any) -> Path:
    return CheckpointStore(root).save(1, write, name=name, **more)


def test_saved_twice_is_the_same(tmp_path: Path, instep: Command) -> None:
    a = save(tmp_path, "a", writes(1.0, 5), run_id="one")
    b = save(tmp_path, "b", writes(1.0, 5), run_id="two")
    answer = instep("diff", a, b)
    assert answer.code == 0
    assert "run_id: one | two" in answer.out
    assert answer.out.endswith("9 tensors are equal bit for bit, 0 are not\nthe checkpoints are the same\n")


def test_diff_lists_the_facts_tensors_and_values_that_differ(run_folder: Path, instep: Command) -> None:
    a, b = (run_folder / "checkpoints" / name for name in ("step-00000010-1", "step-00000020-1"))
    answer = instep("diff", a, b, "--json")
    result = answer.json
    assert answer.code == 1
    assert result["facts"]["step"] == {"a": 10, "b": 20}
    [tensor] = result["tensors"]
    assert (tensor["name"], tensor["max_abs"], tensor["count"]) == ("linear.weight", 1.0, 6)
    assert {value["at"] for value in result["values"]} == {
        "callbacks.Counter.batches",
        "global_step",
        "schedulers.0.last_epoch",
    }
    said = instep("diff", a, b).out
    assert "\n1 tensor differs\n  model.safetensors linear.weight: max abs 1, 6 of 6 elements\n" in said
    assert "equal bit for bit, 1 is not\n" in said


def test_diff_passes_over_the_names_of_two_equal_runs(tmp_path: Path, instep: Command) -> None:
    def write(run_id: str) -> Callable[[Writer], None]:
        return lambda writer: writer.state("trainer", {**shared(3), "run_id": run_id, "command": run_id})

    answer = instep("diff", save(tmp_path, "a", write("one")), save(tmp_path, "b", write("two")))
    assert answer.code == 0, "two runs that did the same are the same"
    assert "trainer.json" not in answer.out
    everything = instep("diff", tmp_path / "a", tmp_path / "b", "--all")
    assert "trainer.json run_id: one | two" in everything.out


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"bias": torch.zeros(2), "new": torch.ones(1)}, "new: only in b"),
        ({}, "bias: only in a"),
        ({"bias": torch.zeros(3)}, "bias: float32 [2] and float32 [3]"),
        ({"bias": torch.zeros(2, dtype=torch.float64)}, "bias: float32 [2] and float64 [2]"),
        ({"bias": torch.tensor([0.0, -0.0])}, "bias: max abs 0, 0 of 2 elements"),
        ({"bias": torch.tensor([0.0, float("nan")])}, "bias: max abs nan, 1 of 2 elements"),
        ({"bias": torch.tensor([0.0, float("inf")])}, "bias: max abs inf, 1 of 2 elements"),
    ],
)
def test_diff_says_for_each_tensor_what_differs(
    other: dict[str, torch.Tensor], said: str, tmp_path: Path, instep: Command
) -> None:
    a = save(tmp_path, "a", lambda writer: writer.tensors("model.safetensors", {"bias": torch.zeros(2)}))
    b = save(tmp_path, "b", lambda writer: writer.tensors("model.safetensors", other))
    answer = instep("diff", a, b)
    assert answer.code == 1
    assert f"model.safetensors {said}\n" in answer.out


def test_equal_nans_are_equal(tmp_path: Path, instep: Command) -> None:
    nan = {"x": torch.tensor([float("nan"), 1.0])}
    a, b = (save(tmp_path, n, lambda writer: writer.tensors("model.safetensors", nan)) for n in "ab")
    assert instep("diff", a, b).code == 0


def test_diff_compares_weights_alone_when_asked(tmp_path: Path, instep: Command) -> None:
    def write(step: int) -> Callable[[Writer], None]:
        def both(writer: Writer) -> None:
            writer.tensors("model.safetensors", weights(1.0))
            writer.state("trainer", shared(step))

        return both

    a, b = save(tmp_path, "a", write(1)), save(tmp_path, "b", write(2))
    assert instep("diff", a, b).code == 1
    assert instep("diff", a, b, "--weights").code == 0


def test_diff_names_files_that_only_one_checkpoint_has(tmp_path: Path, instep: Command) -> None:
    a = save(tmp_path, "a", writes(1.0, 1))
    b = save(tmp_path, "b", lambda writer: writer.tensors("model.safetensors", weights(1.0)))
    answer = instep("diff", a, b)
    assert answer.code == 1
    assert "only in a: optimizer.json\n" in answer.out
    assert "only in b" not in answer.out


def test_a_resumed_run_and_one_without_a_stop_are_the_same(tmp_path: Path, instep: Command) -> None:
    case = Case(monitor=True, callbacks=True)
    run_once(case, tmp_path / "whole")
    run_with_stops(case, tmp_path / "stopped", [8])
    answer = instep("diff", tmp_path / "whole", tmp_path / "stopped", "--json")
    assert (answer.code, answer.json["values"]) == (0, [])
    ignored = {value["at"].rpartition(".")[2] for value in answer.json["ignored"]}
    assert {"run_id", "run_folder", "best_model_path", "last_model_path"} <= ignored


def test_a_path_of_another_checkpoint_counts(tmp_path: Path, instep: Command) -> None:
    def write(path: str) -> Callable[[Writer], None]:
        saver = {"best_model_path": path, "saved": [[path, 3, None]]}
        return lambda writer: writer.state("trainer", {**shared(3), "callbacks": {"ModelCheckpoint": saver}})

    paths = {"a": "/one/best-1", "b": "s3://two/best-2", "c": "/one/other-1", "d": ""}
    for name, path in paths.items():
        save(tmp_path, name, write(path))
    assert instep("diff", tmp_path / "a", tmp_path / "b").code == 0
    for other in ("c", "d"):
        answer = instep("diff", tmp_path / "a", tmp_path / other)
        assert answer.code == 1
        assert "2 values differ" in answer.out

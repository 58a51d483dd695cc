"""`instep estimate-memory`: held against peaks of real trainings, and against sums that can be done by hand."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from instep.big_models import compute_module_sizes
from instep.cli.main import main
from instep.cli.memory.estimate import Setup, estimate
from instep.cli.memory.subject import Subject
from instep.errors import SettingError, UsageError
from tests.cli.memory import models
from tests.cli.memory.measured import measure_all
from tests.helpers.spawn import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")

CLOSE = 0.15
PARAMETERS = 3 * (768 * 4 * 768 * 2 + 4 * 768 + 768 + 2 * 768) + 768 * 10 + 10


def subject(**changes: Any) -> Subject:
    def batch() -> Any:
        return torch.empty(models.BATCH, 768), torch.zeros(models.BATCH, dtype=torch.int64)

    return Subject("Net", changes.pop("make", models.Net), changes.pop("batch", batch), None)


def hold(cases: list[tuple[str, str]], devices: int, peaks: list[int]) -> None:
    for (strategy, precision), peak in zip(cases, peaks, strict=True):
        guess = estimate(subject(), Setup(strategy, precision, devices)).peak
        assert guess == pytest.approx(peak, rel=CLOSE), (strategy, precision, guess / peak)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.campaign
def test_peaks_of_one_process() -> None:
    cases = [("single_device", "32-true"), ("single_device", "bf16-mixed"), ("single_device", "bf16-true")]
    [peaks] = run_ranks(measure_all, 1, cases, 1)
    hold(cases, 1, peaks)


@pytest.mark.extras
@pytest.mark.dist
@pytest.mark.slow
def test_peaks_of_two_processes() -> None:
    cases = [("ddp", "32-true"), ("fsdp", "32-true"), ("fsdp", "bf16-mixed")]
    peaks = run_ranks(measure_all, 2, cases, 2)
    hold(cases, 2, peaks[0])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.deepspeed
def test_peaks_of_deepspeed() -> None:
    cases = [("deepspeed_stage_2", "32-true"), ("deepspeed_stage_3", "bf16-mixed")]
    peaks = run_ranks(measure_all, 2, cases, 2, env={"DS_ACCELERATOR": "cpu"})
    hold(cases, 2, peaks[0])


def test_the_estimate_is_the_sum_of_weights_gradients_and_states() -> None:
    one = estimate(subject(), Setup("single_device", "32-true"))
    assert one.weights == 4 * PARAMETERS
    assert one.gradients == pytest.approx(4 * PARAMETERS, rel=1e-5)  # and the loss
    assert one.optimizer == pytest.approx(8 * PARAMETERS, rel=1e-5)  # and a count of steps for each parameter
    assert one.activations is not None
    mixed = estimate(subject(), Setup("single_device", "bf16-mixed"))
    assert mixed.weights == one.weights
    assert mixed.activations is not None
    assert mixed.activations > one.activations + 2 * PARAMETERS * 0.9  # the casts of weights live until the backward
    ddp = estimate(subject(), Setup("ddp", "32-true", 64))
    assert ddp.gradients == pytest.approx(2 * one.gradients, rel=1e-5)
    deep = subject(
        make=lambda: models.Net(64, 12), batch=lambda: (torch.empty(2, 64), torch.zeros(2, dtype=torch.int64))
    )
    alone = estimate(deep, Setup("single_device", "32-true"))
    many = estimate(deep, Setup("fsdp", "32-true", 64, on_gpu=True))
    assert many.weights == pytest.approx(alone.weights / 64, rel=0.1)
    assert many.optimizer == pytest.approx(alone.optimizer / 64, rel=0.1)
    assert (
        many.peak < alone.weights / 2 < estimate(deep, Setup("fsdp", "32-true", 64)).peak / 2
    )  # which builds it whole
    window = estimate(deep, Setup("fsdp", "32-true", 64, accumulate=2, on_gpu=True))
    assert window.peak > many.peak + alone.gradients  # weights and gradients stay whole until the window's end


def test_the_estimate_of_a_file_of_weights_knows_no_activations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {"a.weight": torch.zeros(100, 50), "a.n": torch.zeros(3, dtype=torch.int64), "b": torch.zeros(7)}
    save_file(tensors, tmp_path / "x.safetensors")
    words = ["estimate-memory", str(tmp_path / "x.safetensors"), "--strategy", "single_device", "fsdp"]
    assert main([*words, "--precision", "32-true", "--devices", "4", "--json"]) == 0
    [single, fsdp] = json.loads(capsys.readouterr().out)["rows"]
    assert (single["weights"], single["gradients"], single["activations"]) == (4 * 5007 + 24, 4 * 5007, None)
    assert main([*words[:2], "--inference", "--dtypes", "bfloat16", "int8", "--json"]) == 0
    [bf16, int8] = json.loads(capsys.readouterr().out)["rows"]
    assert bf16 == {"dtype": "bfloat16", "weights": 2 * 5007 + 24, "largest_layer": 2 * 5000 + 24}
    assert int8["weights"] is None  # which of the tensors are linear layers' is not in the file
    assert fsdp["weights"] == pytest.approx(4 * (100 // 4 * 50 + 2) + 24, rel=0.01)
    assert main([*words, "--precision", "bf16-true"]) == 0
    said = capsys.readouterr().out
    assert "10.0 kB" in said
    assert "activations are not counted" in said


def test_a_module_by_its_import_path(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate-memory", "tests.cli.memory.models:Net", "--args", '{"width": 64, "depth": 1}', "--accelerator"]
    words += ["cpu", "--strategy", "single_device", "--precision", "32-true", "--json"]
    assert main([*words, "--input", "8x64", "--input", "8:int64"]) == 0
    [by_input] = json.loads(capsys.readouterr().out)["rows"]
    assert (
        main([*words, "--data", "tests.cli.memory.models:data", "--data-args", '{"width": 64, "batch_size": 8}']) == 0
    )
    [by_data] = json.loads(capsys.readouterr().out)["rows"]
    assert by_input == by_data
    assert by_input["activations"] > 8 * 64 * 4


@pytest.mark.transformers
def test_a_configuration_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers  # late: an optional package

    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    words = ["estimate-memory", str(tmp_path), "--strategy", "single_device", "fsdp", "--precision", "32-true"]
    assert main([*words, "--batch-size", "2", "--sequence-length", "16", "--devices", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    single, fsdp = answer["rows"]
    model = transformers.LlamaForCausalLM(config)
    held = [*model.parameters(), *model.buffers()]
    assert answer["subject"] == "llama"
    assert single["weights"] == sum(it.nbytes for it in held)
    assert single["activations"] > 2 * 16 * 96 * 4  # the logits at least
    assert fsdp["weights"] < 0.6 * single["weights"]

    # The loaded model alone, by its name on the hub: out of the cache, with nobody to ask.
    cached = tmp_path / "hub" / "models--user--model"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    (tmp_path / "config.json").rename(cached / "snapshots" / "abc" / "config.json")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["estimate-memory", "user/model", "--inference", "--json"]) == 0
    rows = {row["dtype"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["float32"]["weights"] == single["weights"]
    sizes = compute_module_sizes(model, "bfloat16")
    assert rows["bfloat16"]["weights"] == sizes[""]
    assert rows["bfloat16"]["largest_layer"] == sizes["model.layers.0"] > sizes["lm_head"]
    linear = sum(sizes[f"model.layers.{n}.{part}"] for n in (0, 1) for part in ("self_attn", "mlp"))
    assert rows["int8"]["weights"] == sizes[""] - linear // 2
    assert rows["nf4"]["weights"] == sizes[""] - linear + linear // 2 * 9 // 16
    assert main(["estimate-memory", "user/other", "--inference"]) == 1
    assert "user/other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["Net", "--input", "8x5", "--input", "8:int64"],
            r"on a batch of \(8x5:float32, 8:int64\): .*models\.py:\d+: ",
        ),
        (["Net", "--input", "8x64"], r"ValueError: .*models\.py:\d+: "),
        (["Net", "--args", '{"no": 1}'], r"making \S+ failed: TypeError: .*'no'"),
    ],
)
def test_what_fails_in_the_users_code_is_one_message(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["estimate-memory", f"tests.cli.memory.models:{words[0]}", *words[1:]]) == 1
    out, err = capsys.readouterr()
    assert re.search(said, err), err
    assert (out, err.count("\n"), caplog.records) == ("", 1, [])


def test_what_cannot_be_estimated_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"Net asks for a tensor's value .*_local_scalar_dense"):
        estimate(subject(make=models.Looks), Setup("single_device", "32-true"))
    with pytest.raises(SettingError, match="strategy='cp' is not estimated"):
        estimate(subject(), Setup("cp", "32-true", 2))
    with pytest.raises(SettingError, match="'deepspeed_stage_2_offload'"):
        estimate(subject(), Setup("deepspeed_stage_2_offload", "32-true", 2))
    with pytest.raises(SettingError, match="fp8"):
        estimate(subject(), Setup("single_device", "fp8"))
    for words, part in (
        (["nothing"], "'nothing' is neither there"),
        ([models.__file__], "models.py:Model"),
        (["tests.cli.memory.models:None_"], "None_"),
        (["tests.cli.memory.models:Net", "--args", "[1]"], "must be a JSON object"),
        (["tests.cli.memory.models:Net", "--input", "8by8"], "'8by8' is no tensor"),
        (["tests.cli.memory.models:Net", "--optimizer", "Adamm"], "Adam"),
    ):
        assert main(["estimate-memory", *words]) != 0
        assert part in capsys.readouterr().err

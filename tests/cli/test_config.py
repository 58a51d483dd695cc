"""`instep config` and its commands, and `instep env`, which shows what they wrote."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from instep.cli.main import main
from instep.config.settings import NAMES
from instep.state import find_device_kind

KIND = find_device_kind("auto").name


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the config file is to lie."""
    for name in [name for name in os.environ if name.startswith("INSTEP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "instep" / "config.yaml"


def instep(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(words) == code
    out, err = capsys.readouterr()
    return out + err


def test_default_update_show_and_validate(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"wrote {file}; `instep launch SCRIPT` uses it" in instep(capsys, "config", "default", "precision=16")
    assert yaml.safe_load(file.read_text())["accelerator"] == KIND
    assert yaml.safe_load(file.read_text())["precision"] == "16"
    assert "--force" in instep(capsys, "config", "default", code=1)
    instep(capsys, "config", "default", "--force", "strategy=ddp", "strategy-options=static_graph=true,bucket_cap_mb=5")
    instep(capsys, "config", "update", "max_restarts=3", "env=A=1,2", "--unset", "devices", "accelerator")
    assert yaml.safe_load(file.read_text()) == {
        "max_restarts": 3, "strategy": "ddp", "strategy_options": {"static_graph": True, "bucket_cap_mb": 5},
        "env": {"A": "1,2"},
    }  # fmt: skip
    assert list(file.parent.iterdir()) == [file], "nothing is left of writing"
    shown = json.loads(instep(capsys, "config", "show", "--json"))
    assert shown["file"] == str(file)
    assert list(shown["settings"]) == list(NAMES)
    assert shown["settings"]["max_restarts"] == {"value": 3, "source": f"{file}:2"}
    assert shown["settings"]["devices"] == {"value": "auto", "source": "default"}
    table = instep(capsys, "config", "show").splitlines()
    assert [line.split()[0] for line in table[2:]] == list(NAMES)
    assert "ok  " in instep(capsys, "config", "validate")
    file.write_text("strategy_options: {a: 1}\n")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("precision: bf61\nmax_restart: 1\n")
    run = tmp_path / "run.yaml"
    run.write_text("trainer: {}\n")
    said = instep(
        capsys, "config", "validate", "fsdp", str(run), str(file), str(wrong), "--config", "none.yaml", code=1
    )
    assert "ok  fsdp, 4 settings" in said
    assert "arguments of a strategy, and none is chosen" in said
    assert f"{wrong}:2: max_restart is no setting; did you mean max_restarts?" in said
    assert f"{wrong}:1: precision='bf61' is not known" in said
    assert "run.yaml is a configuration of `instep fit`" in said
    assert "there is no config file none.yaml" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["default", "precision.x=1"], "precision has no members; rdzv_conf, strategy_options, env have"),
        (["default", "precision"], "'precision': expected NAME=VALUE"),
        (["default", "num_machines=2"], "num_machines is called num_nodes here"),
        (["default", "precision=x"], "precision='x' is not known"),
        (["update", "--unset", "precison"], "did you mean precision?"),
        (["show", "--config", "fsdq"], "Did you mean 'fsdp'"),
        (["templates", "fsdq"], "Did you mean 'fsdp'"),
    ],
)
def test_instep_config_refuses_wrong_words_and_writes_nothing(
    words: list[str], expected: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in instep(capsys, "config", *words, code=2)
    assert not file.exists()


def test_members_are_put_together(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    instep(capsys, "config", "default", "env=NCCL_DEBUG=WARN", "num_processes=2")
    assert "precision='x'" in instep(capsys, "config", "default", "precision=x", code=2), "before the file is there"
    words = ("env=A=1", "env.B=1,2", "strategy=fsdp", "strategy_options.cpu_offload=true")
    instep(capsys, "config", "update", *words)
    assert yaml.safe_load(file.read_text()) == {
        "accelerator": KIND, "num_processes": 2, "strategy": "fsdp", "strategy_options": {"cpu_offload": True},
        "env": {"NCCL_DEBUG": "WARN", "A": "1", "B": "1,2"},
    }  # fmt: skip
    assert "strategy_options is gone" in instep(capsys, "config", "update", "strategy=ddp", "--unset", "env.A")
    assert yaml.safe_load(file.read_text())["env"] == {"NCCL_DEBUG": "WARN", "B": "1,2"}
    with pytest.raises(SystemExit):
        main(["config", "update"])
    assert "nothing to change: give NAME=VALUE" in capsys.readouterr().err
    assert instep(capsys, "config", "show", "--config", "none").splitlines()[0] == "config file: none"


def test_none_is_no_file_to_write(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent.parent)
    monkeypatch.setenv("INSTEP_CONFIG_FILE", "none")
    assert "'none' means no config file" in instep(capsys, "config", "default", code=1)
    assert not list(file.parent.parent.iterdir())


def test_a_launch_names_the_file_that_it_found(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> bool:
        return f"instep: settings of {file} hold" in instep(capsys, "launch", *words, "--dry-run", __file__)

    assert not said()
    instep(capsys, "config", "default", "max_restarts=2")
    assert said()
    others = ("--num-nodes", "2", "--master-addr", "host0", "--master-port", "29500", "--node-rank")
    assert said(*others, "0")
    for words in ((*others, "1"), ("--quiet",), ("--config", str(file)), ("--config", "none")):
        assert not said(*words)


def test_a_file_of_accelerate_is_taken_over(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmp_path / "default_config.yaml"
    theirs.write_text(
        "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\ndynamo_backend: inductor\n"
    )
    said = instep(capsys, "config", "update", "--from", str(theirs), "max_restarts=1")
    assert yaml.safe_load(file.read_text()) == {
        "accelerator": "gpu", "num_processes": 8, "precision": "bf16", "max_restarts": 1,
    }  # fmt: skip
    assert "not taken over: dynamo_backend is another launcher's: set it in the program: Trainer(compile=...)" in said
    theirs.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MEGATRON_LM\nnum_processes: 8\n")
    before = file.read_text()
    said = instep(capsys, "config", "update", "--from", str(theirs), code=2)
    assert "MEGATRON_LM is refused. instep has no Megatron-LM. MeshStrategy has what it is used for" in said
    assert file.read_text() == before
    said = instep(capsys, "launch", "--config", str(theirs), __file__, code=2)
    assert f"is a configuration of Accelerate's: `instep config update --from {theirs}` takes it over" in said


def test_templates_and_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(instep(capsys, "config", "templates", "--json"))
    assert {"cpu", "ddp", "fsdp", "multi_node", "elastic"} <= set(listed)
    assert all(name in instep(capsys, "config", "templates") for name in listed)
    assert yaml.safe_load(instep(capsys, "config", "templates", "cpu")) == {"accelerator": "cpu", "devices": 2}
    schema = json.loads(instep(capsys, "config", "validate", "--schema"))
    assert schema["additionalProperties"] is False
    assert schema["properties"]["rdzv_backend"]["anyOf"][0]["enum"] == ["static", "c10d"]
    assert schema["properties"]["max_restarts"]["minimum"] == 0


def answer(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in answers)))


def test_instep_config_asks_and_writes_the_answers(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, *[""] * 8)
    instep(capsys, "config")
    first: dict[str, Any] = yaml.safe_load(file.read_text())
    assert first.pop("devices") >= 1
    assert first == {
        "accelerator": KIND, "num_nodes": 1, "strategy": "auto", "precision": "32-true", "accumulate_grad_batches": 1,
    }  # fmt: skip
    answer(monkeypatch, "")
    instep(capsys, "config")
    instep(capsys, "config", "update", "precision=bf16", "env.A=1", "strategy=ddp", "strategy_options.bucket_cap_mb=5")
    changed = file.read_text()
    answer(monkeypatch, "y", *[""] * 9)
    instep(capsys, "config")
    assert file.read_text() == changed, "its values are the defaults"
    answer(
        monkeypatch, "cpu", "3", "2", "1", "", "host", "", "5", "fsdq", "fsdp", "meta_init=true", "bf16", "4", "60", "l"
    )
    other = tmp_path / "other.yaml"
    said = instep(capsys, "config", "--config", str(other))
    assert "strategy='fsdq' is not known" in said, "and asked again"
    assert f"`instep launch --config {other} SCRIPT` uses it" in said
    assert yaml.safe_load(other.read_text()) == {
        "accelerator": "cpu", "devices": 3, "num_nodes": 2, "node_rank": 1, "master_addr": "host", "master_port": 29500,
        "max_restarts": 5, "strategy": "fsdp", "strategy_options": {"meta_init": True}, "precision": "bf16",
        "accumulate_grad_batches": 4, "hang_timeout_s": 60.0, "log_dir": "l",
    }  # fmt: skip
    answer(monkeypatch, "cpu", "2", "2:4", "host:5")
    assert "there is nobody to answer: `instep config default" in instep(capsys, "config", "--config", "new", code=1)


def test_instep_env_hides_secrets_and_names_versions(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.parent.mkdir()
    file.write_text("env: {WANDB_API_KEY: abc123, A: b}\n")
    monkeypatch.setenv("INSTEP_PRECISION", "bf16")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("INSTEP_MY_TOKEN", "abc123")
    text = instep(capsys, "env", "--json")
    assert "abc123" not in text
    told = json.loads(text)
    assert {"instep", "python", "system", "torch"} <= told["versions"].keys()
    assert told["devices"][0]["device"] == "cpu"
    assert 0 < told["devices"][0]["free_bytes"] < told["devices"][0]["memory_bytes"]
    assert told["variables"]["NCCL_DEBUG"] == "INFO"
    assert told["settings"]["precision"] == {"value": "bf16", "source": "environment INSTEP_PRECISION"}
    assert told["settings"]["env"] == {"value": {"WANDB_API_KEY": "***", "A": "b"}, "source": f"{file}:1"}
    shown = instep(capsys, "env")
    assert "abc123" not in shown
    assert "environment INSTEP_PRECISION" in shown


_ALIASES = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])


@pytest.mark.parametrize(
    "words",
    [
        ["launch", "--config", "x.yaml", "--dry-run", "train.py"],
        ["config", "show", "--config", "x.yaml"],
        ["config", "validate", "x.yaml"],
        ["config", "update", "--config", "x.yaml", "devices=2"],
        ["config", "update", "--from", "x.yaml"],
        ["fit", "--config", "x.yaml"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
@pytest.mark.parametrize(
    "text, said",
    [
        (f"{_ALIASES}\nenv: *a11\n", "more than 10,000 values"),
        ("\n".join(f"key{i}: 1" for i in range(50_000)), "4,000 in one list or mapping"),
        ("env: " + "[" * 3000, "nested more than 50 deep"),
        ("env: !!python/name:os.system ''", "the tag tag:yaml.org,2002:python/name:os.system is not read"),
        ("devices: !!bool z", "cannot be read"),
        (b"devices: \xff", "is no YAML"),
        ("pipe", "it is a pipe"),
    ],
    ids=["aliases", "keys", "deep", "tag", "value", "bytes", "pipe"],
)
def test_a_strangers_configuration_is_refused_by_every_command(
    words: list[str],
    text: str | bytes,
    said: str,
    tmp_path: Path,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.yaml"
    if text == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code in (1, 2)
    assert said in captured.err + captured.out or (text == "pipe" and "no config file" in captured.err + captured.out)


def test_of_many_unknown_names_the_first_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("\n".join(f"devicez{i}: 1" for i in range(1500)) + "\ndevices: x\n")
    assert main(["config", "validate", str(path)]) == 1
    said = capsys.readouterr().out
    assert "x.yaml:1: devicez0 is no setting; did you mean devices?" in said
    assert "and 1,492 more names that are no settings" in said
    assert "devices='x'" in said
    assert len(said.splitlines()) < 20

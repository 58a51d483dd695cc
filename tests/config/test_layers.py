"""Where settings come from, which source wins, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from instep.config.file import NO_FILE, default_file, find_file, repeated_keys, templates
from instep.config.layers import resolve
from instep.config.settings import NAMES, about, check, choices, schema
from instep.errors import SettingError
from instep.state import DEVICE_KINDS
from instep.strategies import PRECISIONS, strategy_names
from instep.strategies.precision import precision_name
from instep.utils.env import misspelt_variables, variable_of


def test_the_names_are_those_of_the_trainer() -> None:
    assert not misspelt_variables({variable_of(name): "1" for name in (*NAMES, "config_file", "of_my_own")})
    assert set(choices("accelerator")) == {"auto", "gpu", *DEVICE_KINDS}
    assert {precision_name("precision", name) for name in choices("precision")} == set(PRECISIONS)
    assert set(strategy_names()) <= set(schema()["properties"]["strategy"]["examples"])
    assert all(about(name).text for name in NAMES)


@pytest.mark.parametrize("source", ["default", "environment", "file", "command line"])
def test_the_highest_source_wins(source: str, tmp_path: Path) -> None:
    sources = ["default", "environment", "file", "command line"]
    there = sources[: sources.index(source) + 1]
    file = tmp_path / "config.yaml"
    file.write_text("# a comment\nmax_restarts: 2\n" if "file" in there else "")
    launch = resolve(
        {"max_restarts": ("3", "--max-restarts")} if "command line" in there else {},
        str(file),
        {"INSTEP_MAX_RESTARTS": "1"} if "environment" in there else {},
    )
    assert launch.settings.max_restarts == sources.index(source)
    assert launch.sources.get("max_restarts") == {
        "default": None, "environment": "environment INSTEP_MAX_RESTARTS", "file": f"{file}:2",
        "command line": "--max-restarts",
    }[source]  # fmt: skip
    assert launch.given() == ({} if source == "default" else {"max_restarts": sources.index(source)})


def test_torchruns_variables_say_who_this_machine_is() -> None:
    environ = {"NODE_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500", "INSTEP_MASTER_ADDR": "other"}
    launch = resolve(config=NO_FILE, environ=environ)
    settings = launch.settings
    assert (settings.node_rank, settings.master_addr, settings.master_port) == (1, "other", 29500)
    assert launch.sources["master_port"] == "environment MASTER_PORT"


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ({}, {"bucket_cap_mb": 5, "static_graph": True}),
        ({"strategy": "fsdp"}, {}),  # those of the file are another strategy's
        ({"strategy": "ddp", "strategy_options": "bucket_cap_mb=9"}, {"bucket_cap_mb": 9, "static_graph": True}),
        ({"strategy": "fsdp", "strategy_options": '{"cpu_offload": true}'}, {"cpu_offload": True}),
    ],
)
def test_options_belong_to_their_strategy(said: dict[str, str], options: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("strategy: ddp\nstrategy_options: {bucket_cap_mb: 5, static_graph: true}\nenv: {A: 1, B: two}\n")
    launch = resolve({**{name: (text, f"--{name}") for name, text in said.items()}, "env": ("B=3", "--env")}, str(file))
    assert launch.settings.strategy_options == options
    assert launch.settings.env == {"A": "1", "B": "3"}
    assert launch.sources["env"] == f"--env; {file}:3"
    launch.check()


def test_options_without_a_strategy() -> None:
    with pytest.raises(SettingError, match=r"strategy_options \(--strategy-options\) are arguments of a strategy"):
        resolve({"strategy_options": ("a=1", "--strategy-options")}, NO_FILE).check()


def test_num_processes_overrides_devices_of_a_lower_layer(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("devices: 2\n")
    launch = resolve({"num_processes": (4, "--num-processes")}, str(file))
    assert (launch.settings.devices, launch.settings.num_processes) == ("auto", 4)
    with pytest.raises(SettingError, match=r"devices \(--devices\) .* num_processes \(--num-processes\)"):
        resolve({"num_processes": (4, "--num-processes"), "devices": (4, "--devices")}, NO_FILE)


def test_merged_mappings_repeat_no_key() -> None:
    text = "a: &a {x: 1}\nb: &b {y: 2}\nc:\n  <<: *a\n  <<: *b\n  1: number\n  '1': text\n  x: 3\n"
    assert repeated_keys(yaml.compose(text), "f") == []
    assert repeated_keys(yaml.compose(text + "  x: 4"), "f") == ["f:9: c.x stands there twice (also in line 8)"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("precision: bf61", r":1: precision='bf61' is not known\. Use one of: 32-true, .*Did you mean 'bf16'"),
        ("strategy: fsdpp", r":1: strategy='fsdpp' is not known\. Use one of: auto, .*Did you mean 'fsdp'"),
        ("\ndevices: 0", r":2: devices=0: expected at least 1, 'auto', -1 for all, or indices"),
        ("devices: [0, 0]", r"devices=\[0, 0\]: expected"),
        ("devices: yes", r"devices=True: expected"),
        ("max_restarts: -1", r"max_restarts=-1: expected an integer of at least 0"),
        ("max_restarts: yes", r"max_restarts=True: expected an integer of at least 0; YAML reads yes, no"),
        ("num_nodes: '3:2'", r"num_nodes='3:2': expected a number, or MIN:MAX"),
        ("hang_timeout_s: soon", r"hang_timeout_s='soon': expected a number of seconds above 0"),
        ("env: {A: yes}", r"env={'A': True}: expected texts"),
        ("debug: maybe", r"debug='maybe': expected True or False"),
        ("precison: 16", r":1: precison is no setting; did you mean precision\?"),
        ("num_machines: 2", r":1: num_machines is called num_nodes here"),
        ("use_cpu: true", r":1: use_cpu is written accelerator: cpu here"),
        ("fsdp_config: {}", r":1: fsdp_config is another launcher's: use --strategy fsdp"),
        ("devices: 1\ndevices: 2", r":2: devices stands there twice \(also in line 1\)"),
        ("- 1", r"expected settings, one `name: value` on each line"),
        ("a: [", r"is no YAML"),
    ],
)
def test_a_wrong_file_is_told_by_line_key_and_value(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(SettingError, match=expected) as error:
        resolve(config=str(file), environ={})
    assert str(file) in str(error.value)


def test_every_wrong_value_is_told() -> None:
    with pytest.raises(SettingError) as error:
        check({"precision": "x", "devices": 1, "max_restarts": "two"}, {"precision": "here"})
    first, second = str(error.value).splitlines()
    assert first.startswith("here: precision='x'")
    assert second.startswith("max_restarts='two'")
    assert error.value.field == "precision"


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"devices": "0,2"}, (0, 2)), ({"devices": "all"}, -1), ({"devices": "3"}, 3), ({"tee": "none"}, False),
        ({"tee": "1"}, [1]), ({"tee": True}, True), ({"precision": 16}, "16"), ({"precision": False}, "no"),
        ({"num_nodes": "2:4"}, "2:4"), ({"num_nodes": "2"}, 2), ({"debug": "on"}, True),
        ({"env": {"A": 1.5}}, {"A": "1.5"}), ({"rdzv_conf": "a=1,b=2"}, {"a": "1", "b": "2"}),
        ({"strategy_options": "a=1e-5,b=true"}, {"a": 1e-5, "b": True}),
        ({"env": '{"A": "\\ud83d\\ude00"}'}, {"A": "😀"}),
        ({"strategy_options": '{"a": 1e-5}'}, {"a": 1e-5}), ({"strategy_options": "{a: 2E5}"}, {"a": 2e5}),
    ],
)  # fmt: skip
def test_a_setting_is_read_alike_from_text_and_from_yaml(given: dict[str, Any], value: Any) -> None:
    (name,) = given
    assert check(given, {}) == {name: value}


@pytest.mark.parametrize(
    ("name", "text"), [("strategy_options", '{"a": 1'), ("strategy_options", "a=[1"), ("env", "{A")]
)
def test_broken_members_of_an_option_name_the_option(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=rf"{name}=.*: expected .*NAME=VALUE"):
        check({name: text}, {})


def test_numbers_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("strategy: ddp\nstrategy_options: {a: 1e-5, b: 1e, c: 3}\n")
    options = resolve(config=str(tmp_path / "run.yaml"), environ={}).settings.strategy_options
    assert options == {"a": 1e-5, "b": "1e", "c": 3}


def test_the_configuration_file_is_the_named_one_then_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    default, other = tmp_path / "instep" / "config.yaml", tmp_path / "other.yaml"
    assert default_file(environ) == default
    assert find_file(None, environ) is None
    default.parent.mkdir()
    for file in (default, other):
        file.touch()
    assert find_file(None, environ) == default
    assert find_file(None, {**environ, "INSTEP_CONFIG_FILE": str(other)}) == other
    assert find_file(str(default), {**environ, "INSTEP_CONFIG_FILE": str(other)}) == default
    assert find_file(NO_FILE, environ) is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_file({}) == tmp_path / ".config" / "instep" / "config.yaml"
    with pytest.raises(SettingError, match=r"there is no config file .*missing.yaml"):
        find_file(str(tmp_path / "missing.yaml"), environ)
    with pytest.raises(SettingError, match=r"there is no config file ~nobody-has-this-name/run.yaml"):
        find_file("~nobody-has-this-name/run.yaml", environ)
    with pytest.raises(SettingError, match=r"config='fsdq' is not known.*Did you mean 'fsdp'"):
        find_file("fsdq", environ)


@pytest.mark.parametrize("name", list(templates()))
def test_every_template_passes_its_own_check(name: str) -> None:
    launch = resolve(config=name, environ={})
    launch.check()
    assert launch.file is not None
    assert len(templates()[name]) > 20

"""What the environment asks of programs: how it is read, and who takes it up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import instep
from instep import Accelerator, PartialState
from instep.config.settings import NAMES
from instep.errors import SettingError
from instep.strategies import DDPStrategy, Strategy
from instep.utils.env import _MORE, VARIABLES, as_variables, from_env
from tests.trainer.toys import quiet


def test_every_variable_of_ours_is_known() -> None:
    files = Path(str(instep.__file__)).parent.rglob("*.py")
    lines = [line for file in files for line in file.read_text().splitlines() if ">>>" not in line]
    named = re.findall(r'"INSTEP_([A-Z_]+)"', "\n".join(lines))
    assert {*VARIABLES, *_MORE} == {*NAMES, *map(str.lower, named)}


def test_what_is_written_is_read() -> None:
    given = {
        "accelerator": "cpu", "strategy": "ddp", "strategy_options": {"bucket_cap_mb": 5}, "precision": "bf16",
        "accumulate_grad_batches": 3, "grace_period_s": 7.5, "hang_timeout_s": 60.0, "debug": False,
    }  # fmt: skip
    written = as_variables({**given, "unset": None})
    assert {name: from_env(name, environ=written) for name in VARIABLES} == given
    assert [from_env("debug", environ={"INSTEP_DEBUG": text}) for text in ("Yes", "0", " ")] == [True, False, None]


@pytest.mark.parametrize(
    ("setting", "text"),
    [("debug", "maybe"), ("accumulate_grad_batches", "two"), ("strategy_options", "[1]"), ("strategy_options", "{")],
)
def test_wrong_texts_name_the_variable(setting: str, text: str) -> None:
    name = f"INSTEP_{setting.upper()}"
    with pytest.raises(SettingError, match=f"{name}=.*must be"):
        from_env(setting, environ={name: text})


def test_a_trainer_takes_up_what_its_program_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in as_variables({
        "accelerator": "cpu", "strategy": "ddp", "strategy_options": {"bucket_cap_mb": 5},
        "accumulate_grad_batches": 3, "grace_period_s": 7.5,
    }).items():  # fmt: skip
        monkeypatch.setenv(name, text)
    trainer = quiet(accelerator=None)
    assert (trainer.accelerator, trainer.accumulate_grad_batches, trainer.grace_period_s) == ("cpu", 3, 7.5)
    assert isinstance(trainer.strategy, DDPStrategy)
    assert trainer.strategy.ddp_options == {"bucket_cap_mb": 5}
    assert quiet(strategy="ddp").strategy.ddp_options == {}, "the options are those of the other choice"
    assert quiet(accumulate_grad_batches=1).accumulate_grad_batches == 1
    with pytest.warns(UserWarning, match="INSTEP_ACCUMULATE_GRAD_BATCHES=3 has no effect: global_batch_size=8"):
        assert quiet(global_batch_size=8).accumulate_grad_batches == 1
    monkeypatch.setenv("INSTEP_ACCUMULATE_GRAD_BATCHES", "0")
    with pytest.raises(SettingError, match="INSTEP_ACCUMULATE_GRAD_BATCHES=0: expected"):
        quiet()
    monkeypatch.delenv("INSTEP_STRATEGY")
    with pytest.raises(SettingError, match="INSTEP_STRATEGY_OPTIONS has options of a strategy"):
        quiet(accumulate_grad_batches=1)


def test_an_accelerator_takes_up_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_ACCUMULATE_GRAD_BATCHES", "3")
    monkeypatch.setenv("INSTEP_STRATEGY", "dpp")
    with pytest.raises(SettingError, match=r"INSTEP_STRATEGY='dpp'.*Did you mean"):
        Accelerator(cpu=True)
    monkeypatch.setenv("INSTEP_STRATEGY", "single_device")
    accelerator = Accelerator(cpu=True)
    assert accelerator.gradient_accumulation_steps == 3
    assert type(accelerator._prepared.plain) is Strategy
    accelerator.end_training()


def test_the_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_ACCELERATOR", "gpx")
    with pytest.raises(SettingError, match=r"INSTEP_ACCELERATOR='gpx'.*Did you mean"):
        PartialState()
    assert PartialState(cpu=True).device.type == "cpu", "the argument goes first"
    PartialState._reset_state()
    monkeypatch.setenv("INSTEP_ACCELERATOR", "cpu")
    assert PartialState().device.type == "cpu"


def test_the_number_of_machines_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    for name, text in {**place, "GROUP_RANK": "1"}.items():
        monkeypatch.setenv(name, text)
    assert (quiet().num_nodes, quiet().world_size) == (2, 2)
    with pytest.raises(SettingError, match="set num_nodes=2"):
        quiet(num_nodes=1)

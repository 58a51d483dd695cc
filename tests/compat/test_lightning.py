"""`instep.compat.lightning`: scripts that were not ported run, and each of Lightning's names warns once."""

from __future__ import annotations

import json
import pickle
import runpy
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import instep
from instep.compat import lightning as L
from instep.errors import SettingError
from instep.utils import porting
from tests.cli.migrate.test_migrate import HERE, SCRIPTS, numbers
from tests.test_public_names import in_new_process

pytestmark = pytest.mark.filterwarnings(
    "ignore:instep.compat.lightning:FutureWarning", "ignore:trainer.lightning_module:FutureWarning"
)


@pytest.fixture(autouse=True)
def _none_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(L, "_warned", set())


def warned(code: str) -> list[tuple[int, str]]:
    """The lines and texts of what a script warns of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        exec(compile(code, "script.py", "exec"), {})
    assert {(it.filename, it.category) for it in said} <= {("script.py", FutureWarning)}
    return [(it.lineno, str(it.message).removeprefix("instep.compat.lightning: ")) for it in said]


def test_an_unported_script_computes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    old = (HERE / "lightning_script.txt").read_text()
    script.write_text(
        old.replace("import lightning as L", "from instep.compat import lightning as L")
        .replace("import lightning.pytorch", "import instep.compat.lightning.pytorch")
        .replace("from lightning", "from instep.compat.lightning")
    )
    runpy.run_path(str(script))["main"](str(tmp_path))
    assert numbers(capsys.readouterr().out) == pytest.approx([float(word) for word in SCRIPTS["lightning"]], rel=1e-6)


def test_each_name_warns_once_at_the_users_line() -> None:
    code = """
from instep.compat import lightning as L
import instep.compat.lightning.pytorch as pl
from instep.compat.lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from instep.compat.lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint as again
from instep.compat.lightning.pytorch.cli import LightningCLI
import instep
assert ModelCheckpoint is again is instep.callbacks.ModelCheckpoint is L.callbacks.ModelCheckpoint
assert issubclass(L.LightningModule, instep.TrainModule)
L.LightningModule, pl.LightningModule
L.pytorch.utilities.rank_zero.rank_zero_only, pl.loggers.CSVLogger
L.pytorch.cli_lightning_logo()
L.fabric.utilities.imports._IS_WINDOWS
"""
    assert [(line, text.partition(":")[0]) for line, text in warned(code)] == [
        (4, "ModelCheckpoint is instep.callbacks.ModelCheckpoint"),
        (4, "TQDMProgressBar is instep.callbacks.TQDMProgressBar"),
        (6, "LightningCLI is instep.cli.TrainerCLI"),
        (9, "LightningModule is instep.TrainModule"),
        (11, "rank_zero_only is instep.utils.rank_zero.rank_zero_only"),
        (11, "CSVLogger is instep.loggers.CSVLogger"),
        (12, "cli_lightning_logo does nothing"),
        (13, "_IS_WINDOWS"),
    ]


def test_arguments_that_are_left_out_or_have_another_name(tmp_path: Path) -> None:
    code = f"""
from instep.compat import lightning as L
bar = L.pytorch.callbacks.TQDMProgressBar(refresh_rate=10)
assert bar.refresh_rate == 10
trainer = L.Trainer(
    num_processes=1, strategy="ddp_spawn", enable_autolog_hparams=True, callbacks=bar,
    default_root_dir={str(tmp_path)!r},
)
assert trainer.strategy.name == "ddp" and trainer.num_devices == 1
L.seed_everything(1, verbose=False)
"""
    texts = [text for _, text in warned(code)]
    for text in (
        "Trainer(num_processes=): use devices=...",
        "Trainer(strategy='ddp_spawn'): write strategy='ddp'",
        "seed_everything(verbose=): leave it out: nothing is printed",
    ):
        assert text in texts
    with pytest.raises(SettingError, match="devices"):
        L.Trainer(gpus="a")
    assert L.Trainer(gpus=0, logger=False).num_devices == 1
    with pytest.raises(SettingError, match="use precision="):
        L.Trainer(plugins=[])


def test_an_object_of_either_class_is_one_of_both() -> None:
    ours, theirs = instep.Trainer(logger=False), L.Trainer(logger=False)
    assert isinstance(ours, L.Trainer)
    assert isinstance(theirs, instep.Trainer)
    assert not isinstance(ours, type("Own", (L.Trainer,), {}))
    assert pickle.loads(pickle.dumps(L.Trainer)) is L.Trainer


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pytorch.loggers.LitLogger", "Logger of your own"),
        ("fabric.LightningFabric", "instep.Accelerator is for"),
        ("pytorch.demos.WikiText2", "demonstrations"),
        ("no_such_thing", "nothing of that name"),
    ],
)
def test_a_lightning_name_without_a_counterpart_raises_with_advice(name: str, text: str) -> None:
    module, _, leaf = f"instep.compat.lightning.{name}".rpartition(".")
    assert not hasattr(import_module(module), leaf)
    with pytest.raises(AttributeError, match=text):
        getattr(import_module(module), leaf)
    with pytest.raises(ImportError, match=text):
        exec(f"from {module} import {leaf}", {})


def test_every_name_of_the_table_is_there() -> None:
    found: dict[str, Any] = {}
    for name, target in porting.moved()["lightning"].items():
        if target.startswith("instep."):
            found[name] = getattr(L.pytorch, name)
    assert {"Trainer", "EarlyStopping", "FSDPStrategy", "rank_zero_info"} <= set(found)


def test_two_things_of_one_name_are_told_apart() -> None:
    assert L.pytorch.callbacks.ModelSummary is instep.callbacks.ModelSummary
    assert L.pytorch.utilities.model_summary.ModelSummary is instep.callbacks.summarize


def test_importing_it_loads_nothing() -> None:
    code = "from instep.compat import lightning; import instep.compat.lightning.pytorch.callbacks"
    loaded = set(json.loads(in_new_process(f"{code}; import json, sys; print(json.dumps(sorted(sys.modules)))")))
    assert not {"torch", "numpy", "instep.trainer", "instep.callbacks"} & loaded

"""300 hostile texts, as names of all kinds, through every command and the log: nothing of them reaches a terminal raw.

INSTEP_TERMINAL_EVERY=1 gives each command more words; by default each gets all texts in files, two as words.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from instep import Accelerator, Trainer
from instep.callbacks import (
    EarlyStopping,
    LiveProgressBar,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    TQDMProgressBar,
)
from instep.cli import main as cli
from instep.errors import InstepError
from instep.utils.rank_zero import rank_zero_info
from instep.utils.warn import warn_user
from tests.fuzz.terminal import raw_in, texts
from tests.trainer.toys import QUIET, Toy, samples

EVERY = os.environ.get("INSTEP_TERMINAL_EVERY") == "1"
TEXTS = texts()
NAMES = [text.replace("/", "|").replace("\0", "")[:60] for text in texts(48, seed=1)]


def safetensors(path: Path, names: list[str], dtype: str = "F32", offset: int = 0) -> Path:
    """Write a file with a tensor of each name; with an offset its header lies."""
    header = {
        name: {"dtype": dtype, "shape": [1], "data_offsets": [4 * i + offset, 4 * i + 4 + offset]}
        for i, name in enumerate(names)
    }
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4 * len(names)))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders and files with hostile names within them."""
    root = tmp_path_factory.mktemp("hostile")
    good = safetensors(root / "model.safetensors", TEXTS)
    lying = safetensors(root / "lying.safetensors", TEXTS, offset=9)
    odd = safetensors(root / "odd.safetensors", ["w"], dtype=TEXTS[0])
    runs = root / "runs"
    for index, name in enumerate(NAMES[:12]):
        folder = runs / name
        folder.mkdir(parents=True)
        said = {"status": TEXTS[index], "why": TEXTS[index + 1], "error": TEXTS[index + 2], "run_id": TEXTS[index + 3]}
        said |= {"command": TEXTS[index : index + 3], "host": TEXTS[index + 4], "checkpoint": TEXTS[index + 5]}
        said |= {"summary": {"why": TEXTS[index + 6], "metrics": dict.fromkeys(TEXTS[:40], 1.0)}}
        (folder / "status.json").write_text(json.dumps(said))
        quoted = ",".join('"' + text.replace('"', "'").replace("\r", "\\r") + '"' for text in TEXTS[:40])
        (folder / "metrics.csv").write_bytes((f"step,{quoted}\n1,{','.join(['1'] * 40)}\n").encode())
        (folder / "hparams.yaml").write_text(json.dumps({text: text for text in TEXTS[:40]}))
    script = root / "script.py"
    script.write_text(f"import lightning as L\nx = {TEXTS[5]!r}\nL.Trainer({'q' * 5}={TEXTS[6]!r}, gpus=2)\n")
    config = root / "config.yaml"
    config.write_text(json.dumps({text: text for text in TEXTS}))
    named = root / NAMES[3]
    named.mkdir()
    paths = {"root": root, "good": good, "lying": lying, "odd": odd, "runs": runs, "script": script, "config": config}
    return {name: str(path) for name, path in {**paths, "named": named}.items()}


def commands(place: dict[str, str]) -> list[list[str]]:
    """Every command but those that open a window, each with hostile files, and with a hostile word in each place."""
    some = NAMES[:24:2] if EVERY else NAMES[1:24:12]
    files = [place[name] for name in ("good", "lying", "odd", "config", "script", "runs", "named")]
    one_path = (
        ["checkpoint", "ls"], ["checkpoint", "verify"], ["checkpoint", "show"], ["runs", "ls"], ["runs", "show"],
        ["runs", "compare"], ["runs", "sync"], ["replay"], ["migrate"],
        ["config", "show", "--config-file"], ["config", "validate", "--config-file"], ["merge-weights"], ["slurm"],
        ["tune-loader"], ["launch", "--config-file"], ["fit", "--config"],
    )  # fmt: skip
    found = [[*command, file] for command in one_path for file in files]
    found += [[*command, f"{place['root']}/{name}"] for command in one_path for name in some]
    found += [["estimate-memory", file] for file in files[1:3]]  # other names are looked for in the hub
    found += [["runs", what, place["runs"], "-m", name] for what in ("compare", "show") for name in some]
    for file in files[:3]:
        found += [["checkpoint", "diff", file, place["good"]], ["merge-weights", file, f"{place['root']}/out"]]
        found += [["checkpoint", "convert", file, f"{place['root']}/{some[0]}"], ["checkpoint", "show", file, "--json"]]
    found += [[word] for word in some] + [["runs", word] for word in some] + [["env", word] for word in some]
    found += [["fit", f"--{word}", word] for word in some] + [["fit", "--trainer.max_epochs", word] for word in some]
    found += [["launch", "--devices", word, "x.py"] for word in some]
    found += [["test", "--module", word] for word in some] + [["completion", word] for word in some]
    found += [["config", "update", "--config-file", place["config"]], ["env"]]
    return found


def test_no_command_writes_a_raw_control_code(place: dict[str, str], capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(place["root"])
    bad: dict[str, list[str]] = {}
    for words in commands(place):
        try:
            cli.main(words)
        except SystemExit:
            pass
        out, err = capfd.readouterr()
        if found := raw_in(out + err):
            bad.setdefault(" ".join(words[:2]), []).append(f"{words!r}: {found[:2]}")
    assert not bad, "\n".join(f"{name}: {len(cases)}, as {cases[0]}" for name, cases in bad.items())


class Named(Toy):
    """Its parts, metrics and hyperparameters have hostile names."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.add_module(name.replace(".", ","), nn.Linear(1, 1))
        self.hparams.update({name: name for name in NAMES})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for name in TEXTS:
            self.log(name, loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        for name in TEXTS:
            self.log(f"val_{name}", 1.0, prog_bar=True)


@pytest.mark.parametrize("bar", [LiveProgressBar, TQDMProgressBar, RichProgressBar])
def test_the_log_of_a_run_has_no_raw_control_code(bar: Any, tmp_path: Path, capfd: Any, recwarn: Any) -> None:
    warnings.simplefilter("always")
    folder = tmp_path / NAMES[1]
    loader = DataLoader(samples(), batch_size=4)
    callbacks = [
        bar(),
        ModelSummary(max_depth=-1),
        ModelCheckpoint(monitor=f"val_{TEXTS[0]}", verbose=True),
        EarlyStopping(f"val_{TEXTS[1]}", verbose=True, patience=1),
    ]
    settings = {**QUIET, "enable_checkpointing": True, "enable_progress_bar": True, "enable_model_summary": True}
    settings |= {"logger": ["csv", "jsonl"], "callbacks": callbacks, "default_root_dir": folder, "log_every_n_steps": 1}
    trainer = Trainer(**settings, max_epochs=4)
    trainer.fit(Named(), loader, loader)
    trainer.validate(Named(), loader)
    rank_zero_info(TEXTS[2])
    out, err = capfd.readouterr()
    said = [str(one.message) for one in recwarn]
    of_bar = {"\r", "\x1b", "\x0b"} if bar is not LiveProgressBar else set()  # tqdm and rich move the cursor themselves
    assert not [one for one in raw_in(out + err) if not any(repr(code)[1:-1] in one for code in of_bar)]
    assert not raw_in("\n".join(said))
    for path in folder.rglob("*"):
        if path.suffix in (".csv", ".json", ".jsonl", ".yaml", ".txt"):
            assert not raw_in(path.read_bytes().decode().replace("\r\n", "\n")), path


def unknown_checkpoint(text: str) -> None:
    Trainer(**QUIET).validate(Toy(), DataLoader(samples()), ckpt_path=f"nowhere/{text}")


def wrong_setting(text: str) -> None:
    Trainer(**{**QUIET, "accelerator": text})


def wrong_argument(text: str) -> None:
    Trainer(**{text: 1})


def wrong_state(text: str) -> None:
    accelerator = Accelerator(cpu=True)
    try:
        accelerator.load_state(f"nowhere/{text}")
    finally:
        accelerator.end_training()


@pytest.mark.parametrize("call", [unknown_checkpoint, wrong_setting, wrong_argument, wrong_state])
def test_no_error_has_a_raw_control_code(call: Callable[[str], Any]) -> None:
    for text in NAMES[: 6 if call is wrong_state else None]:
        with pytest.raises(InstepError) as caught:
            call(text)
        assert not raw_in(str(caught.value))


def test_no_warning_or_log_record_has_a_raw_control_code(recwarn: Any, caplog: Any) -> None:
    warnings.simplefilter("always")
    with caplog.at_level(logging.INFO, logger="lightning_utilities"):
        for text in TEXTS:
            warn_user(f"about {text}")
            rank_zero_info(text)
    assert len(recwarn) == len(TEXTS)
    assert not raw_in("\n".join(str(one.message) for one in recwarn))
    assert not raw_in("\n".join(record.getMessage() for record in caplog.records))
    assert not raw_in(str(InstepError(*TEXTS[:3])))
    assert torch.is_grad_enabled()
